"""``alibi_bias``: attention with linear biases, as an additive mask."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError


def alibi_slopes(heads: int) -> torch.Tensor:
    """The slopes of Press, Smith and Lewis, "Train Short, Test Long" (2022), (H,) float32: ``2^(-8 h / H)`` for h = 1
    to H where H is a power of two. Else those of the next lower power, and then every other one of the next higher."""
    if not isinstance(heads, int) or heads < 1:
        raise UnsupportedError(f"heads must be a positive integer, got {heads!r}")
    lower = 1 << (heads.bit_length() - 1)
    exponents = [8 * h / lower for h in range(1, lower + 1)]
    exponents += [8 * h / (2 * lower) for h in range(1, 2 * (heads - lower), 2)]
    return 2.0 ** -torch.tensor(exponents, dtype=torch.float32)


def alibi_bias(
    slopes: torch.Tensor,
    rows: int,
    keys: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
) -> torch.Tensor:
    """The ``attn_mask`` that takes ``slope * |distance|`` from each logit, made once for all layers and steps.

    Args:
        slopes: (H,) or (B, H), floating point, of any device: one for each head of query.
        rows, keys: Sq and Sk.
        is_causal: for calls with ``is_causal``. The mask is then one row of keys, ``slope * (key - (Sk - 1))``. From
            the biases it differs by a number for each row, which softmax does not see. An LSE is smaller by it:
            ``slope * (Sk - 1 - own)``.
        causal_alignment: which key is a row's own, from which distances count: key i, or with ``"bottom_right"`` key
            ``i + Sk - Sq``, as FlashAttention counts them.

    Returns:
        (1, H, 1, Sk) with ``is_causal``, else (1, H, Sq, Sk); of batches B instead of 1; float32.

    Raises:
        UnsupportedError: slopes of another shape or type, sizes that are not positive, another alignment.
    """
    if not isinstance(slopes, torch.Tensor):
        raise UnsupportedError(f"slopes must be a tensor, got {type(slopes).__name__}")
    if not slopes.is_floating_point() or slopes.dim() not in (1, 2):
        raise UnsupportedError(f"slopes must be (H,) or (B, H) of floats, got {tuple(slopes.shape)} of {slopes.dtype}")
    if rows < 1 or keys < 1:
        raise UnsupportedError(f"rows and keys must be positive, got {rows} and {keys}")
    if causal_alignment not in ("top_left", "bottom_right"):
        raise UnsupportedError(f'causal_alignment is "top_left" or "bottom_right", got {causal_alignment!r}')
    slope = slopes.to(torch.float32).reshape(-1, slopes.shape[-1], 1, 1)
    key = torch.arange(keys, device=slopes.device, dtype=torch.float32)
    if is_causal:
        return slope * (key - (keys - 1))
    own = torch.arange(rows, device=slopes.device, dtype=torch.float32)[:, None]
    own += keys - rows if causal_alignment == "bottom_right" else 0
    return -slope * (own - key).abs()
