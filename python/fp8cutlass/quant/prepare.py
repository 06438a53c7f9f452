"""What ``smooth_k`` and ``hadamard`` make of Q and K before they are quantised."""

from __future__ import annotations

import torch

from .rotate import rotate


def prepared(x: torch.Tensor, mean: torch.Tensor | None, *, head_dim: int, hadamard: bool) -> torch.Tensor:
    """Return x, which is Q or K (B, H, S, D), bf16 or fp16, as it is quantised for a kernel of ``head_dim``.

    ``mean`` (B, H, D) is subtracted in float32, one rounding; then x is rotated, and has head_dim columns. What was
    changed is rounded to bf16, also from fp16, whose range a rotated row may leave: 2^-9 beside the 2^-4 of e4m3. A
    kernel can so hold what it has transformed in the registers that held the source.
    """
    if mean is None and not hadamard:
        return x
    if mean is not None:
        x = x.float() - mean[:, :, None]
    return (rotate(x, head_dim) if hadamard else x).bfloat16()
