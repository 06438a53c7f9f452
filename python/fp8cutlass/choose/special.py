"""Kernels that have no cell of the table: those of windows. A class has one or two, and the first that serves is it."""

from __future__ import annotations

from ..manifest import Manifest, Variant
from .problem import Decision, Problem

NEW_MASKS = ("blocks", "bias")  # which no kernel has yet

# The softmaxes that a precision is content with, the fastest first.
PRECISE_ENOUGH = {
    "fast": ("linear", "quadratic", "exp2", "exp2x2"),
    "accurate": ("exp2", "exp2x2"),
    "high": ("exp2x2",),
    "balanced": ("quadratic", "exp2", "exp2x2"),
}


def window_kernels(
    manifest: Manifest, arch: str, head_dim: int, dtype: str, out: str, scaling: str, precision: str
) -> list[Variant]:
    """Those for windows that serve such a call, the fastest softmax first; ``head_dim`` is a kernel's."""
    softmaxes = PRECISE_ENOUGH[precision]
    found = [
        v
        for v in manifest.variants
        if (v.kind, v.head_dim, v.dtype, v.out) == ("window", head_dim, dtype, out)
        and arch in v.targets
        and scaling in v.scalings
        and v.softmax in softmaxes
    ]
    return sorted(found, key=lambda v: softmaxes.index(v.softmax))


def no_window_kernel(dtype: str, out: str, scaling: str, precision: str) -> str:
    """The reason where there is none."""
    return (
        f"kernels for windows take e4m3, bf16 and fp16 operands, give bf16 and fp16, and are there for scaling tensor, "
        f"head and block and precision fast, balanced and accurate on sm90a; the call has {dtype} to {out}, scaling "
        f"{scaling}, {precision}"
    )


def no_mask_kernel(mask: str) -> str:
    """The reason why a call with one of NEW_MASKS has no kernel on a card."""
    kind = "an additive one" if mask == "bias" else "boolean ones and BlockMask"
    return f"attn_mask has no kernel yet, only the emulator of CPU tensors serves {kind}"


def for_window(problem: Problem, served: list[Variant]) -> Decision:
    """The decision for a problem of a kernel's head_dim; without a kernel it has the reason."""
    if not served:
        return Decision(None, no_window_kernel(problem.dtype, problem.out, problem.scaling, problem.precision))
    return Decision(served[0].id, criterion="the kernel for windows of its class", evidence="no other was measured")
