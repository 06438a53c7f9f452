"""Scales that are known before the tensor is: a fixed one, or one that earlier tensors have set.

``quantize`` alone must find the maximum of a tensor before it can convert an element. These modules know the descale
beforehand, and larger elements saturate. Their state is on the device and the host never waits for it. So CUDA graphs
and torch.compile work::

    class Attention(torch.nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.q_scale, self.k_scale = DelayedScale(heads=heads), DelayedScale(heads=heads)
            self.v_scale = StaticScale(0.05)

        def forward(self, q, k, v):  # (B, heads, S, D)
            q8, q_descale = self.q_scale.quantize(q)
            k8, k_descale = self.k_scale.quantize(k)
            v8, v_descale = self.v_scale.quantize(v)
            descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
            return fp8cutlass.attention(q8, k8, v8, scaling="head", **descales)

After ``model.eval()`` a history is only read: run some batches in training mode, and the scales are calibrated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .descale import SMALLEST, refuse_host
from .quantize import FP8_MAX, group_amax, quantize

E4M3_MAX = FP8_MAX[torch.float8_e4m3fn]


class Scale(torch.nn.Module):
    """``module(x)`` is the descale for x (B, H, S, D), float32 (1,) or (H,); its buffers stay float32 whatever
    the model is cast to. ``amax`` is the magnitude in [1, 448] at which x saturates."""

    def __init__(self, amax: float) -> None:
        super().__init__()
        if not 1 <= amax <= E4M3_MAX:
            raise ValueError(f"amax must lie in [1, {E4M3_MAX:g}], got {amax}")
        self.amax = float(amax)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x in float8_e4m3fn and its descale, (1,) or (B, H), as ``attention`` takes them."""
        descale = self(x)
        granularity = "tensor" if descale.numel() == 1 else "head"
        return quantize(x, granularity=granularity, amax=self.amax, descale=descale)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What moves and casts a module: here it only moves."""

        def moved(x: torch.Tensor) -> torch.Tensor:
            y = fn(x)
            return y if y.dtype == x.dtype else x.to(y.device)

        return super()._apply(moved, recurse)


class StaticScale(Scale):
    """One descale for all calls.

    Args:
        descale: ``real = fp8 * descale``: a float in [2^-126, 2^126], or a float32 tensor (1,), or (H,) for one a head.
        amax: where elements saturate.

    Raises:
        ValueError: an argument outside the above.
    """

    descale: torch.Tensor

    def __init__(self, descale: torch.Tensor | float, amax: float = E4M3_MAX) -> None:
        super().__init__(amax)
        if not isinstance(descale, torch.Tensor):
            refusal = refuse_host("descale", descale)
            if refusal is not None:
                raise ValueError(refusal)
            descale = torch.tensor([float(descale)])
        elif descale.dim() != 1 or descale.dtype != torch.float32:
            raise ValueError(
                f"descale must be float32 of shape (1,) or (H,), got {descale.dtype}, {tuple(descale.shape)}"
            )
        self.register_buffer("descale", descale.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.descale


class DelayedScale(Scale):
    """The descale that the largest magnitude of the last calls asks for; then the magnitude of this one is recorded.

    Where nothing but zeros was recorded yet, that of x itself counts. Infinities and NaN count as 0.

    Args:
        history: calls that are remembered.
        margin: octaves of room above the largest of them.
        heads: one descale for each of so many heads, over all batches; without it one for the tensor.
        amax: what that magnitude becomes, margin aside, and where elements saturate.

    The buffer ``amax_history`` is (history, 1) or (history, heads), the last call in its last row. It is written in
    place, by operations on x's device, in training mode only.

    Raises:
        TypeError: x that is no tensor.
        ValueError: an argument outside the above, or x with another number of heads.
    """

    amax_history: torch.Tensor

    def __init__(
        self, history: int = 16, margin: float = 0.0, *, heads: int | None = None, amax: float = E4M3_MAX
    ) -> None:
        super().__init__(amax)
        if history < 1:
            raise ValueError(f"history must be at least 1, got {history}")
        if not abs(margin) <= 32:  # false for NaN
            raise ValueError(f"margin must lie in [-32, 32], got {margin}")
        if heads is not None and heads < 1:
            raise ValueError(f"heads must be at least 1 or None, got {heads}")
        self.heads, self.margin = heads, float(margin)
        self.register_buffer("amax_history", torch.zeros(history, heads or 1))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = self._magnitude(x)
        before = self.amax_history.amax(0)
        expected = torch.where(before > 0, before, now)
        # One product by a number: the same bits on every device.
        descale = (expected * (2.0**self.margin / self.amax)).clamp(SMALLEST, 1 / SMALLEST)
        if self.training:
            self.amax_history.copy_(torch.cat((self.amax_history[1:], now[None])))
        return torch.where(expected > 0, descale, 1.0)

    def _magnitude(self, x: torch.Tensor) -> torch.Tensor:
        """The largest finite |x|, (1,) or (heads,)."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4 or self.heads not in (None, x.shape[1]):
            heads = "heads" if self.heads is None else self.heads
            raise ValueError(f"x must be (batch, {heads}, tokens, head_dim), got shape {tuple(x.shape)}")
        if self.heads is None or x.numel() == 0:
            return group_amax(x, "tensor").expand(self.heads or 1)
        return group_amax(x, "head").amax(0)
