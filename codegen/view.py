"""What the views of all families have in common: how kernels spell axes and what their head comments say."""

from __future__ import annotations

from codegen.scaling import GRANULARITY
from codegen.spec import Kind, Out, Softmax, Variant

OUT_POLICY = {Out.BF16: "OutBf16", Out.FP16: "OutFp16", Out.E4M3: "OutE4m3"}


def symbol(variant_id: str) -> str:
    return f"kLaunch_{variant_id}"


def summary(v: Variant) -> str:
    """The lines of the head comment that say what the kernel computes."""
    grain = GRANULARITY[v.scaling]
    mask = "causal mask" if v.causal else "no mask"
    softmax = {
        Softmax.LINEAR: "code-domain softmax on f16 scores",
        Softmax.QUADRATIC: "code-domain softmax on f16 scores, bent inside an octave",
        Softmax.EXP2: "exponential softmax on float32 scores",
        Softmax.EXP2X2: "exponential softmax on float32 scores, P in two terms",
    }[v.softmax]
    text = (
        f"head_dim {v.head_dim}, {v.dtype} operands, {v.out} output, {mask}, {softmax};\n"
        f"//   descales of Q per {grain.q}, of K per {grain.k}, of V per {grain.v}."
    )
    if v.kind is Kind.DIAG:
        text += "\n//   Diagnostic: also writes scores, P, weights and tile products."
    return text
