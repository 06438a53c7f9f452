"""What becomes of FP8 keys whose descales differ, where a kernel reads one descale for a block of keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def requantised(x: torch.Tensor, descale: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4m3 x (heads, N, D) with a float32 descale for each key, (heads, N), as e4m3 with one for each ``block`` keys.

    The descale of a block is the largest magnitude of its finite ones. A key is multiplied by its descale over that of
    its block in float32, and rounded to e4m3. Where the two are equal its bytes stay. Powers of two lose nothing but
    the smallest numbers. A key whose descale is not finite becomes NaN.

    Returns:
        e4m3 (heads, N, D) and float32 (heads, ceil(N / block)).
    """
    heads, keys, _ = x.shape
    finite = torch.where(descale.isfinite(), descale.abs(), 0.0)
    largest = F.pad(finite, (0, -keys % block)).view(heads, -1, block).amax(-1)
    of_key = largest.repeat_interleave(block, 1)[:, :keys]
    factor = torch.where(of_key > 0, descale / of_key, descale * 0.0)[..., None]
    changed = (x.float() * factor).to(x.dtype)
    return torch.where(factor == 1.0, x.view(torch.uint8), changed.view(torch.uint8)).view(x.dtype), largest
