"""``smooth_k``: one vector is subtracted from all keys of a head before they are quantised.

Softmax does not change when all keys are moved by one vector, as every logit of a row moves by ``scale * q . vector``.
But a bias that all keys share takes range of e4m3 from their differences, and subtraction frees it. The vector need not
be the mean of all keys: the mean of 32 adds 1/32 to their variance, 1.5% to the magnitude of what is quantised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SAMPLES = 32  # keys that the mean is taken over, a power of two


def key_mean(k: torch.Tensor) -> torch.Tensor:
    """What is subtracted from the keys of each head, (B, Hkv, D) float32: k is (B, Hkv, Sk, D), bf16 or fp16, Sk > 0.

    The mean of the ``n = min(32, Sk)`` keys at positions ``i * Sk // n``. Infinities and NaN count as 0, so that a
    broken key does not break the others, and so does a mean whose sum is beyond float32. To the bit: the n keys and
    zeros up to 32 are added in neighbouring pairs, then pairs of pairs, and the sum is multiplied by float32(1 / n).
    """
    tokens = k.shape[2]
    n = min(SAMPLES, tokens)
    total = k[:, :, torch.arange(n, device=k.device) * tokens // n].float()
    total = F.pad(torch.where(total.isfinite(), total, 0.0), (0, 0, 0, SAMPLES - n))
    while total.shape[2] > 1:
        total = total[:, :, 0::2] + total[:, :, 1::2]
    mean = total[:, :, 0] * (1.0 / n)
    return torch.where(mean.isfinite(), mean, 0.0)


def restore_lse(lse: torch.Tensor, q: torch.Tensor, mean: torch.Tensor, scale: float) -> None:
    """Turn the LSE of the logits that a kernel saw into that of the original ones: add ``scale * q . mean``, in place.

    ``lse`` is (B, H, Sq) float32, ``q`` (B, H, Sq, D) as the caller gave it, ``mean`` (B, Hkv, D). The sum is no matrix
    product, which would be TF32 where the program allows it. A row without keys stays -inf.
    """
    shared = mean.repeat_interleave(q.shape[1] // mean.shape[1], 1)[:, :, None]
    shift = (q.float() * shared).sum(-1) * scale
    lse.copy_(torch.where(lse == -torch.inf, lse, lse + shift))
