"""What ``smooth_k`` and ``hadamard`` make of Q and K before they are quantised."""

from __future__ import annotations

import torch

from .rotate import rotate


def prepared(
    q: torch.Tensor, k: torch.Tensor, mean: torch.Tensor | None, *, head_dim: int, hadamard: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q (B, H, Sq, D) and k (B, Hkv, Sk, D), bf16 or fp16, as they are quantised for a kernel of ``head_dim``.

    ``mean`` (B, Hkv, D) is subtracted from the keys in float32, one rounding; then q and k are rotated, and have
    head_dim columns. What was changed is rounded to bf16, also from fp16, whose range a rotated row may leave: 2^-9
    beside the 2^-4 of e4m3. A kernel can so hold what it has transformed in the registers that held the source.
    """
    if not hadamard:
        return q, k if mean is None else (k.float() - mean[:, :, None]).bfloat16()
    keys = k if mean is None else k.float() - mean[:, :, None]
    return rotate(q, head_dim).bfloat16(), rotate(keys, head_dim).bfloat16()
