"""SageAttention's functions by their names, for code that is written for them.

The arguments that SageAttention swallows are not swallowed here. A mask is applied. An unknown argument is a TypeError.
The functions whose names ask for INT8 products of Q and K have ``precision="int8"``, where a device has kernels for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..api.arguments import Layout
from ..api.ask import widest_integer
from ..api.varlen import attention_varlen
from ..errors import UnsupportedError
from .dense import Accuracy, attend, count_ragged

DOOR = "sage"
LAYOUTS: dict[str, Layout] = {"HND": "bhsd", "NHD": "bshd"}
# What SageAttention's variants take and what is no part of the result here: their groups of INT8, and accumulators.
SETTINGS = {
    "qk_quant_gran": ("per_warp", "per_thread"),
    "pv_accum_dtype": ("fp32", "fp16", "fp16+fp32", "fp32+fp32", "fp32+fp16"),
    "quantization_backend": ("triton", "cuda"),
}


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    smooth_k: bool = True,
    smooth_v: bool = False,
    **settings: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention in FP8 with SageAttention's arguments.

    Args:
        q: (B, H, Sq, D), or (B, Sq, H, D) with ``tensor_layout="NHD"``; bf16 or fp16, D 1 to 256.
        k, v: (B, Hkv, Sk, D) or (B, Sk, Hkv, D). H is a multiple of Hkv.
        is_causal: row i sees the keys up to i. Needs Sq = Sk, as in SageAttention.
        sm_scale: default 1 / sqrt(D).
        return_lse: also return the natural-log sum of exponentials, (B, H, Sq) float32.
        attn_mask: what torch's attention takes. With one that is added to scores it runs there, and is counted so.
        smooth_k: subtract a mean of the keys, which changes rounding alone.
        smooth_v: only False is served.
        settings: ``qk_quant_gran``, ``pv_accum_dtype``, ``quantization_backend`` of SageAttention's variants. Their
            values are checked. They choose among kernels that are not here, so nothing follows from them.

    Raises:
        TypeError: an argument that SageAttention does not have, such as ``dropout_p``, ``scale`` or ``enable_gqa``.
        UnsupportedError: values that are not served, by name; a call that neither a kernel nor torch serves.
    """
    return _sageattn(
        "sageattn", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, smooth_v, settings,
        {"smooth_k": smooth_k},
    )  # fmt: skip


def _sageattn(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    attn_mask: torch.Tensor | None,
    smooth_v: bool,
    settings: dict[str, Any],
    accuracy: Accuracy,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    _check(settings)
    if tensor_layout not in LAYOUTS:
        raise UnsupportedError(f"tensor_layout must be HND or NHD, got {tensor_layout!r}")
    if smooth_v:
        raise UnsupportedError("smooth_v=True is not served")
    if not q.dim() == k.dim() == v.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise UnsupportedError(f"q, k and v must have 4 dimensions, got {shapes}")
    heads, tokens = (1, 2) if tensor_layout == "HND" else (2, 1)
    if is_causal and q.shape[tokens] != k.shape[tokens]:
        raise UnsupportedError(
            f"is_causal needs as many rows as keys, got {q.shape[tokens]} and {k.shape[tokens]}: which key is a row's "
            "own is not defined. fp8cutlass.attention has causal_alignment"
        )
    gqa = True if q.shape[heads] != k.shape[heads] else False  # a bool, also where sizes are symbols
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = attend(
        DOOR, name, q, k, v,
        attn_mask=attn_mask, is_causal=is_causal, scale=sm_scale, enable_gqa=gqa, layout=LAYOUTS[tensor_layout],
        return_lse=return_lse, short=return_lse, accuracy=accuracy,
    )  # fmt: skip
    if result is not None:
        return result
    if return_lse:
        raise UnsupportedError("the call is not served, and torch's attention returns no LSE")
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=sm_scale, enable_gqa=gqa)
    return out if tensor_layout == "HND" else out.transpose(1, 2)


def _integer(name: str) -> Callable[..., Any]:
    """A function of that name, which asks for INT8 products of Q and K."""

    def variant(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str = "HND",
        *,
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        attn_mask: torch.Tensor | None = None,
        smooth_k: bool = True,
        smooth_v: bool = False,
        **settings: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """:func:`sageattn` with 8-bit integers in Q K^T where the device has kernels for them, else in FP8.

        Arguments go by name after the first four, as their order differs between the variants.
        """
        accuracy: Accuracy = {"smooth_k": smooth_k}
        if q.shape[-1] <= widest_integer(q.device, "int8"):
            accuracy["precision"] = "int8"
        return _sageattn(
            name, q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, smooth_v, settings, accuracy
        )

    variant.__name__ = variant.__qualname__ = name
    return variant


sageattn_qk_int8_pv_fp16_triton = _integer("sageattn_qk_int8_pv_fp16_triton")
sageattn_qk_int8_pv_fp16_cuda = _integer("sageattn_qk_int8_pv_fp16_cuda")
sageattn_qk_int8_pv_fp8_cuda = _integer("sageattn_qk_int8_pv_fp8_cuda")
sageattn_qk_int8_pv_fp8_cuda_sm90 = _integer("sageattn_qk_int8_pv_fp8_cuda_sm90")


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **settings: Any,
) -> torch.Tensor:
    """Attention of sequences of unequal lengths whose tokens lie one after the other.

    Args:
        q: (T, H, D). k, v: (Tk, Hkv, D). See :func:`sageattn` for what is not said here.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: where the tokens of each sequence begin, and the last end.
        max_seqlen_q, max_seqlen_k: at least the largest lengths.
        is_causal: row i of a sequence sees its keys up to i.
        smooth_k: subtract the mean of all keys of a head, which changes rounding alone.

    Returns:
        (T, H, D).
    """
    _check(settings)
    if smooth_k:
        k = (k.float() - k.float().mean(0, keepdim=True)).to(k.dtype)
    out = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=sm_scale, causal=is_causal,
        causal_alignment="top_left",
    )  # fmt: skip
    count_ragged(DOOR, "sageattn_varlen", q, k, cu_seqlens_q, is_causal)
    return cast(torch.Tensor, out)


def _check(settings: dict[str, Any]) -> None:
    """TypeError for names, UnsupportedError for values that SageAttention does not have."""
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise TypeError(
            f"SageAttention has no arguments {', '.join(unknown)}; fp8cutlass.attention has those of torch's attention"
        )
    wrong = [
        f"{name} must be one of {', '.join(SETTINGS[name])}, got {value!r}"
        for name, value in settings.items()
        if value not in SETTINGS[name]
    ]
    if wrong:
        raise UnsupportedError(*wrong)
