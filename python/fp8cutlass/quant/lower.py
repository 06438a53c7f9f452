"""Rows of e4m3 Q for kernels whose scores are f16: divided by powers of two, which their descales take back.

f16 ends at 65504. A score is at most the largest |k|, 448, times the sum of |q| of its row. A row is divided by the
least power of two with which |q| is at most 7/16 on average. But for rounding no score then exceeds 196 head_dim. A
quotient is exact unless it is subnormal in e4m3: below 2^-6, 1/28 of that average. K stays as it is.
``include/fp8cutlass/lower.cuh`` does the same on a card, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MEAN = 7 / 16  # of |q| of a row, at most
_MOST = 10  # octaves: 448 becomes 7/16


def _sums(q: torch.Tensor) -> torch.Tensor:
    """Those of |q| of rows (..., D), float64. Of 16 neighbours two sums are rounded to f16 as a card does it."""
    half = F.pad(q.half(), (0, -q.shape[-1] % 16)).abs().unflatten(-1, (-1, 4, 2, 2))  # chunks, words, pairs, of a pair
    word = half[..., 0, :] + half[..., 1, :]
    chunk = (word[..., 0, :] + word[..., 1, :]) + (word[..., 2, :] + word[..., 3, :])
    return chunk.double().sum(dim=(-2, -1))


def octaves_above(q: torch.Tensor, width: int) -> torch.Tensor:
    """By which power of two each row of e4m3 q (..., D) has to be divided where a kernel reads ``width`` columns.

    Returns:
        int64 (...). A row with a NaN has the most that there is.
    """
    sums = _sums(q).float()
    limits = MEAN * width * torch.exp2(torch.arange(_MOST, device=q.device).float())
    return (~(sums[..., None] <= limits)).sum(dim=-1)


def lowered(q: torch.Tensor, descale: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring e4m3 q (B, H, S, D) into the range of f16 scores.

    Args:
        q: float8_e4m3fn, any strides. A NaN stays NaN.
        descale: float32, (1,), (B, H) or (B, H, S).
        width: the columns that the kernel reads, D or more.

    Returns:
        q of the same shape and memory order, and its descales, (B, H, S), float32.
    """
    power = torch.exp2(octaves_above(q, width).float())
    made = (q.float() / power[..., None]).to(q.dtype)
    given = q.view(torch.uint8)
    result = torch.where((power == 1)[..., None], given, made.view(torch.uint8), out=torch.empty_like(given))
    spread = descale if descale.dim() == 3 else descale.reshape(*(descale.shape if descale.dim() == 2 else (1, 1)), 1)
    return result.view(q.dtype), (spread * power).contiguous()
