"""What the CPU and the GPU tests share: the references and gates of ``fp8cutlass.accuracy``, and operands that only
tests need."""

from __future__ import annotations

import torch

from fp8cutlass.accuracy.inputs import randn
from fp8cutlass.accuracy.measures import min_row_cosine, relative_l2
from fp8cutlass.accuracy.operands import Operands, make_operands, operands_of
from fp8cutlass.accuracy.reference import Reference, attention64, visible
from fp8cutlass.accuracy.ztest import FLOOR, ZTest, z_test

__all__ = [
    "FLOOR",
    "Operands",
    "Reference",
    "ZTest",
    "attention64",
    "make_operands",
    "masked64",
    "min_row_cosine",
    "operands_of",
    "randn",
    "relative_l2",
    "unseen_tile",
    "visible",
    "z_test",
]


def masked64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Reference:
    """``attention64`` where row i sees the keys of ``seen[i]``, (Sq, Sk) bool, whatever the mask. ``sinks`` (H,) join
    the denominator of rows that see a key; probabilities are those of the keys alone. ``bias`` is added to logits."""
    repeat = q.shape[1] // k.shape[1]
    k64, v64 = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    q64 = scale * q.double()
    logits = q64 @ k64.transpose(-1, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if bias is None else logits + bias.double()
    largest = float(logits[..., seen].abs().max()) if bool(seen.any()) else 0.0
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    if sinks is not None:
        lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks.to(lse)[:, None]))
    probabilities = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return Reference(probabilities @ v64, lse, probabilities, v64, largest, q64, k64)


def unseen_tile(head_dim: int, device: torch.device | str = "cpu") -> tuple[tuple[torch.Tensor, ...], int]:
    """Q, K and V, and a causal offset: rows see keys with logits near -100, and nothing of a tile of their KV block
    whose keys, and with them its descale, are 20 times smaller. Weighed by that descale it would outweigh all they saw.
    """
    q = randn(1, 1, 200, head_dim, seed=1, device=device).abs()
    k = -randn(1, 1, 256, head_dim, seed=2, device=device).abs() * (100 / (0.64 * head_dim**0.5))
    k[:, :, 128:] *= 0.05
    return (q, k, randn(1, 1, 256, head_dim, seed=3, device=device)), 56
