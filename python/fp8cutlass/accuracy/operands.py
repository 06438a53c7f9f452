"""The 8-bit operands that a kernel is given, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choose.target import granularities
from ..dtypes import OPERANDS
from ..manifest import KEY_BLOCK, SCORE_AMAX, Variant
from ..quant.quantize import LIMITS, V_AMAX, dequantize, quantize
from ..quant.v_layout import without_zeros

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Operands:
    """8-bit operands with canonical descales, and what they stand for."""

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
    v_dtype: torch.dtype | None = None,
    block: int = KEY_BLOCK,
) -> Operands:
    """Quantise (B, H, S, D) operands the way ``attention`` does; ``v_dtype`` is that of V, by default ``dtype``."""
    v_dtype = v_dtype or dtype
    amaxes = (score_amax, score_amax, min(V_AMAX, LIMITS[v_dtype]))
    pairs = [
        quantize(x, granularity=shared_by, amax=amax, dtype=of, block=block)
        for x, shared_by, amax, of in zip((q, k, v), granularity, amaxes, (dtype, dtype, v_dtype), strict=True)
    ]
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = pairs
    q64, k64, v64 = (dequantize(x, d, g, block).double() for (x, d), g in zip(pairs, granularity, strict=True))
    return Operands((q8, k8, v8), (q_descale, k_descale, v_descale), (q64, k64, v64))


def operands_of(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: str | None = None
) -> Operands:
    """Quantise for one kernel: its types, the range of its scores, its blocks; in one of the modes that it serves,
    by default its own."""
    of = OPERANDS[variant.dtype]
    amax = SCORE_AMAX if variant.score == "f16" else LIMITS[of.qk]
    shared = of.granularity(dict(zip("qkv", granularities(scaling or variant.scaling), strict=True)))
    granularity = (shared["q"], shared["k"], shared["v"])
    made = make_operands(q, k, v, granularity, score_amax=amax, dtype=of.qk, v_dtype=of.v, block=variant.key_block)
    if of.v == torch.int8:
        made.descales = (*made.descales[:2], without_zeros(made.descales[2], v))
    return made
