"""Tensors of the same values at other addresses: every memory order that a caller may bring."""

from __future__ import annotations

import torch

ORDERS = ("bhsd", "bshd", "wide rows", "spaced", "expanded", "unaligned", "transposed")


def laid_out(x: torch.Tensor, order: str) -> torch.Tensor:
    """(B, H, S, D) with these values in a memory order of ORDERS, but "expanded": then every batch and head is the
    first. What lies between the elements is NaN."""
    batch, heads, tokens, head_dim = x.shape

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=x.device).to(x.dtype)

    if order == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "wide rows":
        inside = room(batch, heads, tokens, head_dim + 24)[..., 16 : 16 + head_dim]
    elif order == "spaced":
        inside = room(batch, 2 * heads, tokens + 3, head_dim + -head_dim % 8)[:, ::2, 1 : tokens + 1, :head_dim]
    elif order == "unaligned":
        inside = room(batch, heads, tokens, head_dim + 1)[..., 1:]
    elif order == "transposed":
        inside = room(batch, heads, head_dim, tokens).transpose(2, 3)
    elif order == "expanded":
        return x[:1, :1].expand(x.shape)
    else:
        return x
    return inside.copy_(x)


def on_card(x: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage, so that the strides stay."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return storage.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
