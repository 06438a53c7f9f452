"""Attention in float64, and which keys a row sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

STEP = 32  # columns of a step of the FP8 matrix instructions


def visible(
    seqlen_q: int, seqlen_k: int, causal_offset: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(Sq, Sk) bool: which keys a row sees; None means no mask."""
    if causal_offset is None:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    row = torch.arange(seqlen_q, device=device)[:, None]
    return torch.arange(seqlen_k, device=device)[None] <= row + causal_offset


@dataclass
class Reference:
    """``out`` (B, H, Sq, D), ``lse`` (B, H, Sq) and the probabilities (B, H, Sq, Sk), all float64."""

    out: torch.Tensor
    lse: torch.Tensor
    probabilities: torch.Tensor
    values: torch.Tensor  # (B, H, Sk, D), heads repeated
    max_score: float  # largest |visible logit|
    queries: torch.Tensor  # (B, H, Sq, D), times the scale
    keys: torch.Tensor  # (B, H, Sk, D), heads repeated

    @cached_property
    def max_partial(self) -> float:
        """The largest number that a tensor core meets on the way to a logit: a product, or a sum after some of the
        steps of 32 columns. It is to this that the core cuts."""
        terms = self.queries.abs().amax(2) * self.keys.abs().amax(2) if self.probabilities.numel() else None
        largest = 0.0 if terms is None else float(terms.max())
        partial = torch.zeros_like(self.probabilities)
        for q, k in zip(self.queries.split(STEP, -1), self.keys.split(STEP, -1), strict=True):
            partial += q @ k.transpose(-1, -2)
            largest = max(largest, float(partial.abs().max()) if partial.numel() else 0.0)
        return largest


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal_offset: int | None = None
) -> Reference:
    """Attention of (B, H, Sq, D) and (B, Hkv, Sk, D) operands in float64; rows without keys are 0 and -inf."""
    repeat = q.shape[1] // k.shape[1]
    k64, v64 = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    q64 = scale * q.double()
    logits = q64 @ k64.transpose(-1, -2)
    if causal_offset is None:
        largest = max(float(logits.amax()), -float(logits.amin())) if logits.numel() else 0.0
    else:
        seen = visible(q.shape[2], k.shape[2], causal_offset, q.device)
        largest = float(logits[..., seen].abs().max()) if bool(seen.any()) else 0.0
        logits = logits.masked_fill_(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    probabilities = logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    return Reference(probabilities @ v64, lse, probabilities, v64, largest, q64, k64)
