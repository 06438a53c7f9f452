"""Rotary position embedding, as FlashAttention has it."""

from __future__ import annotations

import torch


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = True
) -> torch.Tensor:
    """Turn the first R columns of x (T, H, D) by the angles of their positions, and return them in the dtype of x.

    ``cos`` and ``sin`` are (S, R / 2), ``positions`` (T,) integers, clamped to the table. A pair is two neighbouring
    columns with ``interleaved``, else columns i and i + R / 2. The turn is float32 and rounded once, so that K appended
    with its turn has the bytes of K turned before.
    """
    half = cos.shape[1]
    at = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = cos[at].float()[:, None], sin[at].float()[:, None]
    turned = x[..., : 2 * half].float()
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((y.to(x.dtype), x[..., 2 * half :]), -1)
