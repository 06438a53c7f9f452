"""What the views of all families have in common: how kernels spell axes and what their head comments say."""

from __future__ import annotations

from codegen.variant import Variant


def symbol(variant_id: str) -> str:
    return f"kLaunch_{variant_id}"


def summary(v: Variant) -> str:
    """The lines of the head comment that say what the kernel computes."""
    grain = v.scaling.grain
    text = (
        f"head_dim {v.head_dim}, {v.dtype} operands, {v.out} output, {v.mask.text}, {v.softmax.text};\n"
        f"//   descales of Q per {grain.q}, of K per {grain.k}, of V per {grain.v}."
    )
    if v.kind.diagnostic:
        text += "\n//   Diagnostic: also writes scores, P, weights and tile products."
    return text
