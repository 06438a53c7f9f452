"""Kernels that have no cell of the table: those of windows, lists of tiles, caps and biases. A class has one or two,
and the first that serves is it."""

from __future__ import annotations

from typing import NamedTuple

from ..manifest import Manifest, Variant
from .problem import Decision, Problem

LISTED = "blocks"  # the mask of boolean masks, packed or not
BIAS = "bias"  # that of additive ones, with any band
NEW_MASKS = (LISTED, BIAS)  # of ``attn_mask``

# The softmaxes that a precision is content with, the fastest first.
PRECISE_ENOUGH = {
    "fast": ("linear", "quadratic", "exp2", "exp2x2"),
    "accurate": ("exp2", "exp2x2"),
    "high": ("exp2x2",),
    "balanced": ("quadratic", "exp2", "exp2x2"),
    "int8": ("codes",),
    "int8_full": ("bytes",),
}


class Asked(NamedTuple):
    """What such a kernel is found by: a mask, whether scores are capped, and the axes of the call."""

    mask: str
    capped: bool
    dtype: str
    out: str
    scaling: str
    precision: str
    whole: bool = False  # of lists of tiles: that all of them are seen whole, so that blocks were given

    @staticmethod
    def by(problem: Problem) -> Asked:
        p = problem
        return Asked(p.mask, p.capped, p.dtype, p.out, p.scaling, p.precision, p.whole)

    @property
    def kind(self) -> str:
        """The manifest's word for it; "" where there is none."""
        if self.mask == BIAS:
            return "" if self.capped else "biased"
        return "capped" if self.capped else self.mask

    @property
    def band(self) -> str:
        """The mask of its kernel: that of a window serves every band."""
        return "window" if self.mask == BIAS else self.mask


def special_kernels(manifest: Manifest, arch: str, head_dim: int, asked: Asked) -> list[Variant]:
    """Those that serve such a call, the fastest softmax first; ``head_dim`` is a kernel's. Lists of tiles have kernels
    for some head_dims, to the next of which others are padded. Of two tiles the wider one is faster where rows see keys
    in a row; the narrower one where blocks were given, as half of a wide tile may not be seen (docs/lab/masks.md)."""
    softmaxes = PRECISE_ENOUGH[asked.precision]
    wanted = (asked.kind, "dense", asked.band, asked.dtype, asked.out)
    found = [
        v
        for v in manifest.variants
        if (v.kind, v.walk, v.mask, v.dtype, v.out) == wanted
        and (v.head_dim == head_dim or (asked.mask == LISTED and v.head_dim > head_dim))
        and arch in v.targets
        and asked.scaling in v.scalings
        and v.softmax in softmaxes
    ]
    narrowest = min((v.head_dim for v in found), default=0)
    fitting = (v for v in found if v.head_dim == narrowest)
    return sorted(fitting, key=lambda v: (softmaxes.index(v.softmax), v.tile_n if asked.whole else -v.tile_n))


def no_special_kernel(asked: Asked) -> str:
    """The reason where there is none."""
    what, where = ("windows", "sm89 and sm90a, of int8 on sm90a up to head_dim 128")
    precisions = "fast, balanced, accurate and int8"
    if asked.mask == BIAS:
        what, where = (
            "an attn_mask that is added to scores",
            "sm89 and sm90a, head_dim up to 128, without softcap",
        )
        precisions = "fast, balanced, accurate and high"
    elif asked.mask == LISTED:
        what, where = (
            "boolean masks and BlockMask",
            "sm89 and sm90a, of int8 on sm90a, up to head_dim 128, without softcap",
        )
    elif asked.capped:
        what, where = ("softcap", "sm89 and sm90a")
        precisions = "fast, balanced and accurate"
    return (
        f"kernels for {what} take e4m3, bf16 and fp16 operands, give bf16 and fp16, and are there for scaling tensor, "
        f"head and block and precision {precisions} on {where}; the call has {asked.dtype} to "
        f"{asked.out}, scaling {asked.scaling}, {asked.precision}, mask {asked.mask}"
    )


def for_special(problem: Problem, served: list[Variant]) -> Decision:
    """The decision for a problem of a kernel's head_dim; without a kernel it has the reason."""
    asked = Asked.by(problem)
    if not served:
        return Decision(None, no_special_kernel(asked))
    what = {LISTED: "lists of tiles", BIAS: "biases"}.get(asked.mask, "windows")
    if asked.capped:
        what = f"softcap, mask {asked.mask},"
    return Decision(served[0].id, criterion=f"the kernel for {what} of its class", evidence="no other was measured")
