"""Attention in float64, and which keys a row sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal_offset: int | None = None
) -> Reference:
    """Attention of (B, H, Sq, D) and (B, Hkv, Sk, D) operands in float64; rows without keys are 0 and -inf."""
    repeat = q.shape[1] // k.shape[1]
    k64, v64 = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    logits = scale * (q.double() @ k64.transpose(-1, -2))
    if causal_offset is None:
        largest = max(float(logits.amax()), -float(logits.amin())) if logits.numel() else 0.0
    else:
        seen = visible(q.shape[2], k.shape[2], causal_offset, q.device)
        largest = float(logits[..., seen].abs().max()) if bool(seen.any()) else 0.0
        logits = logits.masked_fill_(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    probabilities = logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    return Reference(probabilities @ v64, lse, probabilities, v64, largest)
