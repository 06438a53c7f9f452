"""What happens to scores beside the softmax: a cap before it, and sinks after it (docs/design/numerics.md)."""

from __future__ import annotations

import torch

from .visible import LOG2E

# How much larger than they should be the P of a softmax are on average, which a sink is not: the mean of (1 + x) / 2^x
# over an octave.
EXCESS = {"linear": 1.0407}


def unit_slope(scale: float, softcap: float, device: torch.device) -> torch.Tensor:
    """What a row's slope is times its descales: octaves, or with a cap what the tanh takes."""
    if softcap:
        return torch.tensor(scale / softcap, dtype=torch.float32, device=device)
    return torch.tensor(scale, dtype=torch.float32, device=device) * LOG2E


def capped(s: torch.Tensor, slope: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and their slopes (G, R, 1) in octaves, of scores and slopes within the cap; 0 caps nothing.

    The kernels' tanh is good to 2^-11 of itself.
    """
    if not softcap:
        return s, slope
    cap = torch.tensor(softcap * LOG2E, dtype=torch.float32, device=s.device)
    return torch.tanh(s * slope), cap.expand(slope.shape[0], slope.shape[1], 1)


def of_rows(sinks: torch.Tensor, batch: int, kv_heads: int, seqlen_q: int) -> torch.Tensor:
    """Sinks (H,) as the rows of groups have them, in octaves: (B * Hkv, H / Hkv * Sq, 1)."""
    rows = (sinks * LOG2E).view(1, kv_heads, -1, 1).expand(batch, -1, -1, seqlen_q)
    return rows.reshape(batch * kv_heads, -1, 1)


def add_sinks(row_sum: torch.Tensor, ref: torch.Tensor, sinks: torch.Tensor, softmax: str) -> torch.Tensor:
    """The sums of P, relative to ``ref`` octaves, with the sinks of their rows; a row that saw no key has none."""
    return torch.where(row_sum == 0, row_sum, row_sum + EXCESS.get(softmax, 1.0) * torch.exp2(sinks - ref))


def lse_of_all(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The LSE (B, H, S) of keys and sinks (H,), of that of the keys; a row that saw no key stays -inf."""
    return lse if sinks is None else torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks[:, None]))
