"""Which kernels read keys and values that were packed for another call: their form, what a kernel needs of it, and the
choice among the kernels that read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import NoKernelError, UnsupportedError
from ..manifest import SCORE_AMAX, Manifest, Variant
from .problem import Decision


@dataclass(frozen=True)
class KVForm:
    """Columns of packed K and V, keys that share a ``block`` descale, and what K was quantised to."""

    head_dim: int
    key_block: int
    amax: float


def misfits(variant: Variant, form: KVForm, scaling: str) -> list[str]:
    """Why a kernel cannot read keys and values of this form; nothing if it can."""
    wrong = []
    if variant.head_dim != form.head_dim:
        wrong.append(f"head_dim {variant.head_dim}, packed are {form.head_dim} columns")
    if scaling == "block" and variant.key_block != form.key_block:
        wrong.append(f"a descale per {variant.key_block} keys, packed with one per {form.key_block}")
    if variant.score == "f16" and form.amax > SCORE_AMAX:
        wrong.append(f"keys of magnitude {SCORE_AMAX:g} at most, packed up to {form.amax:g}")
    return wrong


def readable(
    decision: Decision,
    near: Iterable[Decision],
    unchosen: Iterable[Decision],
    manifest: Manifest,
    form: KVForm,
    scaling: str,
    pinned: bool,
) -> Decision:
    """The decision itself where its kernel reads the form, else the second in its cell, else the first of ``near``
    whose kernel does, else of ``unchosen``.

    UnsupportedError for a pinned kernel, NoKernelError where there is none.
    """
    wrong = misfits(manifest.find(str(decision.variant)), form, scaling)
    if not wrong:
        return decision
    needs = f"{decision.variant} reads {', '.join(wrong)}"
    remedy = "pack key and value again with the query_shape, is_causal and out_dtype of this call, or its kernel"
    if pinned:
        raise UnsupportedError(f"key is a PackedKV that kernel={decision.variant!r} cannot read: {needs}", remedy)
    second = decision.runner_up
    if second is not None and not misfits(manifest.find(second), form, scaling):
        why = f"reads the packed keys, second in this cell of the table: {needs}"
        cost = decision.runner_up_cost_us
        return replace(decision, variant=second, criterion=why, cost_us=cost, runner_up=None, runner_up_cost_us=None)
    for where, others in (("near this cell of the table", near), ("chosen by no cell of the table", unchosen)):
        for other in others:
            if other.variant is not None and not misfits(manifest.find(other.variant), form, scaling):
                why = f"reads the packed keys, {where}: {needs}"
                return replace(other, criterion=why, cost_us=None, runner_up=None, runner_up_cost_us=None)
    raise NoKernelError(f"no kernel for this query reads the packed keys: {needs}", remedy)
