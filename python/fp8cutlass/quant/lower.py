"""e4m3 of any range for kernels whose scores are f16: divided by powers of two, which the descales take back.

Scores of Q and K fit f16 where no element exceeds 14. e4m3 goes to 448. A group of elements that share a descale, a row
of Q or a block of K, is divided by the least power of two with which its largest magnitude is 14 or less. Its descale
is multiplied by the same. A quotient is exact unless it is subnormal in e4m3: below 2^-6, 1/896 of 14.
``include/fp8cutlass/pack_fp8.cuh`` does the same on a card, bit for bit.
"""

from __future__ import annotations

import torch

from .quantize import group_amax

_LARGEST = 0x7E  # 448 as a byte of e4m3
_OCTAVE = 8  # bytes


def limit_byte(amax: float) -> int:
    """The largest e4m3 number that is no larger than ``amax``, 1 or more, as its byte."""
    numbers = torch.arange(_LARGEST + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return int((numbers <= amax).sum()) - 1


def lowered(
    x: torch.Tensor, descale: torch.Tensor, granularity: str, *, amax: float, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring e4m3 x (B, H, S, D) into the range of ``amax``.

    Args:
        x: float8_e4m3fn, any strides. A NaN counts as 448 and stays NaN.
        descale: float32, (1,), (B, H) or those of the groups.
        granularity: what is divided by one number, ``token`` or ``block``.
        amax: the largest magnitude that may be there, 1 or more.
        block: tokens of a block.

    Returns:
        x of the same shape and memory order, and its descales, (B, H, S) or (B, H, ceil(S / block)), float32.
    """
    magnitude = (x.view(torch.uint8) & 0x7F).clamp(max=_LARGEST)
    largest = group_amax(magnitude.float(), granularity, block).int()
    octaves = (largest - limit_byte(amax) + _OCTAVE - 1).clamp(min=0) // _OCTAVE
    power = torch.exp2(octaves.float())
    each = power if granularity == "token" else power.repeat_interleave(block, dim=2)[:, :, : x.shape[2]]
    made = (x.float() / each[..., None]).to(x.dtype)
    spread = descale if descale.dim() == 3 else descale.reshape(*(descale.shape if descale.dim() == 2 else (1, 1)), 1)
    given = x.view(torch.uint8)
    result = torch.where((each == 1)[..., None], given, made.view(torch.uint8), out=torch.empty_like(given))
    return result.view(x.dtype), (spread * power).contiguous()
