"""What the views of all families have in common: how kernels spell axes and what their head comments say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.derived import Derived
from codegen.scaling import key_block
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True)
class View:
    """What the template of every family may ask about a variant beyond its axes."""

    summary: str
    threads: int
    smem_sum: str
    smem_bytes: int
    out_policy: str
    q_granularity: str
    k_granularity: str
    v_granularity: str
    key_block: int


def common(v: Variant, d: Derived) -> dict[str, Any]:
    """The fields of View."""
    grain = v.grain
    return {
        "summary": summary(v),
        "threads": d.threads,
        "smem_sum": f"{d.smem_sum} bytes",
        "smem_bytes": d.smem_bytes,
        "out_policy": v.out.policy,
        "q_granularity": grain.q,
        "k_granularity": grain.k,
        "v_granularity": grain.v,
        "key_block": key_block(v),
    }


def summary(v: Variant) -> str:
    """The lines of the head comment that say what the kernel computes. A line has few axes, so that few kernels show
    them all."""
    grain = v.grain
    text = (
        f"head_dim {v.head_dim}, {v.dtype} operands, {v.out} output;\n"
        f"//   {v.mask.text}{v.change.text};\n//   {v.softmax.text};\n"
        f"//   descales of Q per {grain.q}, of K per {grain.k}, of V per {grain.v}."
    )
    if v.kind.diagnostic:
        text += "\n//   Diagnostic: also writes scores, P, weights and tile products."
    return text
