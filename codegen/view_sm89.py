"""What the sm89 template may ask about a variant beyond its axes."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.derive_sm89 import STEPS_AT_ONCE, derive, descale_slots
from codegen.scaling import key_block
from codegen.variant import Variant
from codegen.view import summary, symbol


@dataclass(frozen=True, kw_only=True)
class KernelView:
    symbol: str
    summary: str
    threads: int
    rows_per_warp: int
    m_fragments: int
    ctas_per_sm: int
    ctas_limit: str
    q_in_registers: bool
    rows_in_registers: bool
    steps_at_once: int
    descale_slots: int
    smem_sum: str
    smem_bytes: int
    mma_scores: str
    mma_values: str
    mma_sums: str
    mma_comment: str
    out_policy: str
    q_granularity: str
    k_granularity: str
    v_granularity: str
    key_block: int


def kernel_view(v: Variant) -> KernelView:
    d = derive(v)
    grain, operand, score = v.scaling.grain, v.dtype.mma, v.score.upper()
    return KernelView(
        symbol=symbol(v.id),
        summary=summary(v),
        threads=d.threads,
        rows_per_warp=d.rows_per_warp,
        m_fragments=d.m_fragments,
        ctas_per_sm=d.ctas_per_sm,
        ctas_limit=d.ctas_limit,
        q_in_registers=d.q_in_registers,
        rows_in_registers=d.rows_in_registers,
        steps_at_once=STEPS_AT_ONCE,
        descale_slots=descale_slots(v),
        smem_sum=f"{d.smem_sum} bytes",
        smem_bytes=d.smem_bytes,
        mma_scores=f"SM89_16x8x32_{score}{operand}{operand}{score}_TN",
        mma_values=f"SM89_16x8x32_F32E4M3{operand}F32_TN",
        mma_sums="SM89_16x8x32_F32E4M3E4M3F32_TN",
        mma_comment=f"{d.mma_per_tile} of these a warp and KV tile",
        out_policy=v.out.policy,
        q_granularity=grain.q,
        k_granularity=grain.k,
        v_granularity=grain.v,
        key_block=key_block(v),
    )
