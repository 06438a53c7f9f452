"""What ``attention_varlen`` has checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedCall:
    """What ``attention_varlen`` has checked. ``descales`` are those of FP8 q, k and v, (1,) or (sequences, heads)."""

    q: torch.Tensor  # (tokens, H, D)
    k: torch.Tensor  # (tokens, Hkv, D)
    v: torch.Tensor
    cu_q: torch.Tensor  # (sequences + 1,) int32
    cu_k: torch.Tensor
    used_q: torch.Tensor | None  # (sequences,) int32
    used_k: torch.Tensor | None
    max_q: int
    max_k: int
    descales: tuple[torch.Tensor, ...]
    scale: float
    left: int  # keys before a row's own that it sees, -1 for all
    right: int
    bottom_right: bool
    out_dtype: torch.dtype
    precision: str
    return_lse: bool
    kernel: str
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # (H,) float32

    @property
    def mask(self) -> str:
        """The kernels' word for it."""
        return mask_of(self.left, self.right)


def mask_of(left: int, right: int) -> str:
    """What kernels call the mask of rows that see so many keys before and after their own, -1 for all."""
    if left < 0 and right < 0:
        return "full"
    return "causal" if left < 0 and right == 0 else "window"
