"""Two partial results as one: by a kernel where it takes them, else by torch operations."""

from __future__ import annotations

import torch

from ..native.merge import merge, merges


def merge_into(out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor) -> None:
    """Merge ``to`` (B, H, S, D) into ``out``, and its LSE (B, H, S) into ``lse``, both float32."""
    if merges(out, lse, to, to_lse):
        merge(out, lse, to, to_lse)
        return
    total, weight = weights(lse, to_lse)
    out.lerp_(to.float(), weight.unsqueeze(-1))
    lse.copy_(total)


def merged(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as new tensors, of any dtypes."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (out_a, lse_a, out_b, lse_b))
    if out_a.is_cuda and not differentiated and not torch.compiler.is_compiling():
        out, lse = out_a.to(torch.float32, copy=True), lse_a.clone()
        merge_into(out, lse, out_b, lse_b)
        return out, lse
    total, weight = weights(lse_a, lse_b)
    return torch.lerp(out_a.float(), out_b.float(), weight.unsqueeze(-1)), total


def weights(lse_a: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The LSE of both, and the weight of the second result; 0 where neither saw a key."""
    total = torch.logaddexp(lse_a, lse_b)
    return total, torch.exp(lse_b - total).masked_fill(total == -torch.inf, 0.0)
