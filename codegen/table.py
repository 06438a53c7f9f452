"""The dispatch table: every cell resolves to an emitted variant and why, or to the rule that leaves it empty."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.arch import family_of
from codegen.derive import derive
from codegen.keys import Key, axes
from codegen.matrix import MATRICES
from codegen.rules import RULES
from codegen.select import order, variant_cost
from codegen.spec import Dtype, Kind, Out, Scaling, Softmax, Variant

CRITERIA = (
    "only candidate",
    "modelled time",
    "fewer shared-memory bytes",
    "fewer warps",
    "id",
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen variant and what decided; or, with `variant` None, why no kernel serves the cell."""

    variant: str | None
    criterion: str = ""
    evidence: str = "model"
    cost_us: float = 0.0
    runner_up: str | None = None
    runner_up_cost_us: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    axes: list[tuple[str, list[object]]]
    cells: tuple[int, ...]  # row-major, last axis fastest: position in `decisions`
    decisions: tuple[Decision, ...]


def candidates_of(key: Key, emitted: tuple[Variant, ...]) -> list[Variant]:
    """Emitted kernels that compute what the key asks for. `fast` prefers the code-domain softmax where it is built."""
    family = family_of(key.arch).name
    serving = [
        v
        for v in emitted
        if v.kind is Kind.FWD
        and v.family == family
        and (v.head_dim, v.dtype, v.out, v.scaling, v.causal)
        == (key.head_dim, key.dtype, key.out, key.scaling, key.causal)
    ]
    softmaxes = (Softmax.LINEAR, Softmax.EXP2) if key.precision == "fast" else (Softmax.EXP2,)
    for softmax in softmaxes:
        found = [v for v in serving if v.softmax is softmax]
        if found:
            return found
    return []


def decide(key: Key, emitted: tuple[Variant, ...]) -> Decision:
    found = candidates_of(key, emitted)
    if not found:
        return Decision(variant=None, reason=_empty_reason(key))
    ranked = sorted(found, key=lambda v: order(v, variant_cost(v, key.seqlen, key.load)))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    us = variant_cost(best, key.seqlen, key.load)
    if second is None:
        return Decision(variant=best.id, criterion=CRITERIA[0], cost_us=round(us, 2))
    theirs = variant_cost(second, key.seqlen, key.load)
    a, b = order(best, us), order(second, theirs)
    decided = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return Decision(
        variant=best.id,
        criterion=CRITERIA[1 + decided],
        cost_us=round(us, 2),
        runner_up=second.id,
        runner_up_cost_us=round(theirs, 2),
    )


def _empty_reason(key: Key) -> str:
    """The choice rule that no tile can satisfy here, or else that the profile leaves it out."""
    family = family_of(key.arch).name
    matrix = next(m for m in MATRICES if m.family == family and m.kind is Kind.FWD)
    probe = Variant(
        family=family,
        kind=Kind.FWD,
        head_dim=key.head_dim,
        tile=matrix.tile[0],
        stages=matrix.stages[0],
        scaling=key.scaling,
        causal=key.causal,
        dtype=key.dtype,
        out=key.out,
        softmax=Softmax.EXP2,
    )
    for rule in RULES:
        if rule.of_choice and rule.broken(probe, derive(probe)):
            return f"{rule.name}: {rule.explain(probe, derive(probe))}"
    return "NOT-BUILT: legal, but not in the profile or filter that was generated"


def keys(archs: tuple[str, ...]) -> Iterator[Key]:
    """All cells in table order."""
    positions: list[list[object]] = []
    for name, values in axes(archs):
        positions.append(list(range(len(values))) if name == "seqlen" else values)
    for arch, head_dim, seqlen, dtype, out, scaling, causal, precision, load in itertools.product(*positions):
        yield Key(
            arch=str(arch),
            head_dim=int(str(head_dim)),
            seqlen=int(str(seqlen)),
            dtype=Dtype(dtype),
            out=Out(out),
            scaling=Scaling(scaling),
            causal=bool(causal),
            precision=str(precision),
            load=str(load),
        )


def build(emitted: tuple[Variant, ...], archs: tuple[str, ...]) -> Table:
    numbers: dict[Decision, int] = {}
    cells = tuple(numbers.setdefault(decide(key, emitted), len(numbers)) for key in keys(archs))
    return Table(axes=axes(archs), cells=cells, decisions=tuple(numbers))
