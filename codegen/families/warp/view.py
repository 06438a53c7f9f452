"""What the sm89 template may ask about a variant beyond its axes."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.families.view import View, common
from codegen.families.warp.derive import STEPS_AT_ONCE, derive, descale_slots
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True)
class KernelView(View):
    rows_per_warp: int
    m_fragments: int
    ctas_per_sm: int
    ctas_limit: str
    q_in_registers: bool
    rows_in_registers: bool
    steps_at_once: int
    descale_slots: int
    mma_scores: str
    mma_values: str
    mma_sums: str
    mma_comment: str


def kernel_view(v: Variant) -> KernelView:
    d = derive(v)
    qk, p, values, score = v.dtype.qk.mma, v.dtype.p.mma, v.dtype.v.mma, v.score.upper()
    sums = v.dtype.v.sums.upper()
    return KernelView(
        **common(v, d),
        rows_per_warp=d.rows_per_warp,
        m_fragments=d.m_fragments,
        ctas_per_sm=d.ctas_per_sm,
        ctas_limit=d.ctas_limit,
        q_in_registers=d.q_in_registers,
        rows_in_registers=d.rows_in_registers,
        steps_at_once=STEPS_AT_ONCE,
        descale_slots=descale_slots(v),
        mma_scores=f"SM{80 if v.dtype.qk.integer else 89}_16x8x32_{score}{qk}{qk}{score}_TN",
        mma_values=f"SM{80 if v.dtype.v.integer else 89}_16x8x32_{sums}{p}{values}{sums}_TN",
        mma_sums=f"SM89_16x8x32_{sums}{p}{p}{sums}_TN",
        mma_comment=f"{d.mma_per_tile} of these a warp and KV tile",
    )
