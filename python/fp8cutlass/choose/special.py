"""Kernels that have no cell of the table: those of windows and of caps. A class has one or two, and the first that
serves is it."""

from __future__ import annotations

from typing import NamedTuple

from ..manifest import Manifest, Variant
from .problem import Decision, Problem

NEW_MASKS = ("blocks", "bias")  # which no kernel has yet

# The softmaxes that a precision is content with, the fastest first.
PRECISE_ENOUGH = {
    "fast": ("linear", "quadratic", "exp2", "exp2x2"),
    "accurate": ("exp2", "exp2x2"),
    "high": ("exp2x2",),
    "balanced": ("quadratic", "exp2", "exp2x2"),
    "int8": ("codes",),
}


class Asked(NamedTuple):
    """What such a kernel is found by: a mask, whether scores are capped, and the axes of the call."""

    mask: str
    capped: bool
    dtype: str
    out: str
    scaling: str
    precision: str

    @staticmethod
    def by(problem: Problem) -> Asked:
        return Asked(problem.mask, problem.capped, problem.dtype, problem.out, problem.scaling, problem.precision)

    @property
    def kind(self) -> str:
        """The manifest's word for it."""
        return "capped" if self.capped else "window"


def special_kernels(manifest: Manifest, arch: str, head_dim: int, asked: Asked) -> list[Variant]:
    """Those that serve such a call, the fastest softmax first; ``head_dim`` is a kernel's."""
    softmaxes = PRECISE_ENOUGH[asked.precision]
    wanted = (asked.kind, "dense", asked.mask, head_dim, asked.dtype, asked.out)
    found = [
        v
        for v in manifest.variants
        if (v.kind, v.walk, v.mask, v.head_dim, v.dtype, v.out) == wanted
        and arch in v.targets
        and asked.scaling in v.scalings
        and v.softmax in softmaxes
    ]
    return sorted(found, key=lambda v: softmaxes.index(v.softmax))


def no_special_kernel(asked: Asked) -> str:
    """The reason where there is none."""
    what, where = ("windows", "sm90a")
    if asked.capped:
        what, where = ("softcap", "sm90a, on sm89 without a window")
    return (
        f"kernels for {what} take e4m3, bf16 and fp16 operands, give bf16 and fp16, and are there for scaling tensor, "
        f"head and block and precision fast, balanced and accurate on {where}; the call has {asked.dtype} to "
        f"{asked.out}, scaling {asked.scaling}, {asked.precision}, mask {asked.mask}"
    )


def no_mask_kernel(mask: str) -> str:
    """The reason why a call with one of NEW_MASKS has no kernel on a card."""
    kind = "an additive one" if mask == "bias" else "boolean ones and BlockMask"
    return f"attn_mask has no kernel yet, only the emulator of CPU tensors serves {kind}"


def for_special(problem: Problem, served: list[Variant]) -> Decision:
    """The decision for a problem of a kernel's head_dim; without a kernel it has the reason."""
    asked = Asked.by(problem)
    if not served:
        return Decision(None, no_special_kernel(asked))
    what = f"softcap, mask {asked.mask}," if asked.capped else "windows"
    return Decision(served[0].id, criterion=f"the kernel for {what} of its class", evidence="no other was measured")
