"""The FP8 operands that a kernel is given, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choose.target import granularities
from ..manifest import KEY_BLOCK, SCORE_AMAX, Variant
from ..quant.quantize import FP8_MAX, V_AMAX, dequantize, quantize

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Operands:
    """FP8 operands with canonical descales, and what they stand for."""

    fp8: Three
    descales: Three
    real: Three  # float64


def make_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    granularity: tuple[str, str, str],
    *,
    score_amax: float = SCORE_AMAX,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: int = KEY_BLOCK,
) -> Operands:
    """Quantise (B, H, S, D) operands the way ``attention`` does."""
    pairs = [
        quantize(x, granularity=shared_by, amax=amax, dtype=dtype, block=block)
        for x, shared_by, amax in zip((q, k, v), granularity, (score_amax, score_amax, V_AMAX), strict=True)
    ]
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = pairs
    q64, k64, v64 = (dequantize(x, d, g, block).double() for (x, d), g in zip(pairs, granularity, strict=True))
    return Operands((q8, k8, v8), (q_descale, k_descale, v_descale), (q64, k64, v64))


def operands_of(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: str | None = None
) -> Operands:
    """Quantise for one kernel: its FP8 type, the range of its scores, its blocks; in one of the modes that it serves,
    by default its own."""
    dtype = torch.float8_e4m3fn if variant.dtype == "e4m3" else torch.float8_e5m2
    amax = SCORE_AMAX if variant.score == "f16" else FP8_MAX[dtype]
    granularity = granularities(scaling or variant.scaling)
    return make_operands(q, k, v, granularity, score_amax=amax, dtype=dtype, block=variant.key_block)
