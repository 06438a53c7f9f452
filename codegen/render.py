"""Spec to text. Pure: templates in, strings out, no disk, no clock, no environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from codegen.arch import FAMILIES
from codegen.derive import STEPS_AT_ONCE, Derived, derive, descale_slots
from codegen.rules import kernel_asserts
from codegen.scaling import GRANULARITY, KEY_BLOCK
from codegen.spec import Dtype, Kind, Out, Softmax, Variant

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

OUT_POLICY = {Out.BF16: "OutBf16", Out.FP16: "OutFp16", Out.E4M3: "OutE4m3"}


def environment(templates: Path = TEMPLATES) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@dataclass(frozen=True, kw_only=True)
class Assert:
    cpp: str
    message: str


@dataclass(frozen=True, kw_only=True)
class KernelView:
    """What the kernel template may ask about a variant beyond its axes."""

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


def symbol(variant_id: str) -> str:
    return f"kLaunch_{variant_id}"


def kernel_view(v: Variant) -> KernelView:
    d: Derived = derive(v)
    grain = GRANULARITY[v.scaling]
    operand = "E4M3" if v.dtype is Dtype.E4M3 else "E5M2"
    score = "F16" if v.softmax is Softmax.LINEAR else "F32"
    mask = "causal mask" if v.causal else "no mask"
    softmax = {
        Softmax.LINEAR: "code-domain softmax on f16 scores",
        Softmax.EXP2: "exponential softmax on float32 scores",
    }[v.softmax]
    summary = (
        f"head_dim {v.head_dim}, {v.dtype} operands, {v.out} output, {mask}, {softmax};\n"
        f"//   descales of Q per {grain.q}, of K per {grain.k}, of V per {grain.v}."
    )
    if v.kind is Kind.DIAG:
        summary += "\n//   Diagnostic: also writes scores, P, weights and tile products."
    return KernelView(
        symbol=symbol(v.id),
        summary=summary,
        threads=d.threads,
        rows_per_warp=d.rows_per_warp,
        m_fragments=d.m_fragments,
        ctas_per_sm=d.ctas_per_sm,
        ctas_limit=d.ctas_limit,
        q_in_registers=d.q_in_registers,
        rows_in_registers=d.rows_in_registers,
        steps_at_once=STEPS_AT_ONCE,
        descale_slots=descale_slots(v),
        smem_sum=" + ".join(f"{name} {size:,}" for name, size in d.smem_parts) + f" = {d.smem_bytes:,} bytes",
        smem_bytes=d.smem_bytes,
        mma_scores=f"SM89_16x8x32_{score}{operand}{operand}{score}_TN",
        mma_values=f"SM89_16x8x32_F32E4M3{operand}F32_TN",
        mma_sums="SM89_16x8x32_F32E4M3E4M3F32_TN",
        mma_comment=f"{d.mma_per_tile} of these a warp and KV tile",
        out_policy=OUT_POLICY[v.out],
        q_granularity=grain.q,
        k_granularity=grain.k,
        v_granularity=grain.v,
        key_block=KEY_BLOCK,
    )


def render_kernel(v: Variant, env: Environment) -> str:
    template = env.get_template(FAMILIES[v.family].template)
    asserts = [Assert(cpp=cpp, message=message) for cpp, message in kernel_asserts()]
    return template.render(v=v, d=kernel_view(v), asserts=asserts)
