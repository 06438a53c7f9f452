"""The dispatch table: every cell resolves to an emitted variant and why, or to the rule that leaves it empty."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import itemgetter
from typing import Any

from codegen.arch import TARGETS
from codegen.axes import Change, Cluster, Kind, Operand, Out, Scaling, Walk
from codegen.evidence import digest
from codegen.families import FAMILIES, Family, derive, families_of
from codegen.kept import kept
from codegen.keys import SOFTMAXES, Key, axes
from codegen.legal import served
from codegen.matrix import head_dims, matrix_of
from codegen.select import Order, Timing, order, select, timing
from codegen.variant import Variant

CRITERIA = (
    "only candidate",
    "measured, the others are not",
    "measured time",
    "modelled time",
    "fewer shared-memory bytes",
    "fewer warps",
    "id",
)
# Who serves a cell, or why nobody does, depends on these axes alone: on neither sequence length nor load.
NAMES = tuple(f.name for f in fields(Key))
CLASS = ("arch", "head_dim", "dtype", "out", "scaling", "causal", "precision")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The chosen variant and what decided; or, with `variant` None, why no kernel serves the cell."""

    variant: str | None
    criterion: str = ""
    evidence: str = ""
    cost_us: float = 0.0
    runner_up: str | None = None
    runner_up_cost_us: float = 0.0
    reason: str = ""


Group = tuple[object, ...]  # a value of each of CLASS


@dataclass(frozen=True, kw_only=True)
class Table:
    axes: list[tuple[str, list[object]]]
    cells: tuple[int, ...]  # row-major, last axis fastest: position in `decisions`
    decisions: tuple[Decision, ...]
    rivals: Mapping[Group, tuple[Variant, ...]]  # the kernels that a class chooses among; none where nobody serves


def serving(key: Key) -> tuple[Family, ...]:
    """The families that may serve a key, in order of preference. Integers are left to those made for the target. Where
    they are emulated, bf16 attention is faster, and more exact."""
    return tuple(f for f in families_of(key.arch) if not (key.dtype.qk.integer and key.arch in f.emulated))


def candidates_of(key: Key, emitted: tuple[Variant, ...]) -> list[Variant]:
    """Emitted kernels that compute what the key asks for: those of the first family that has any."""
    if key.head_dim not in head_dims(key.arch):
        return []
    for family in serving(key):
        able = [
            v
            for v in emitted
            if not v.kind.diagnostic
            and v.family == family.name
            and (v.head_dim, v.dtype, v.out, v.mask) == (key.head_dim, key.dtype, key.out, key.mask)
            and v.walk is Walk.DENSE
            and v.change is Change.NONE
            and key.scaling in served(v)
        ]
        for softmax in SOFTMAXES[key.precision]:
            found = [v for v in able if v.softmax is softmax]
            if found:
                return found
    return []


def decide(key: Key, emitted: tuple[Variant, ...]) -> Decision:
    found = candidates_of(key, emitted)
    return _best(key, found) if found else _nobody(key)


def _nobody(key: Key) -> Decision:
    return Decision(variant=None, reason=_empty_reason(key))


def _best(key: Key, found: list[Variant]) -> Decision:
    times = {v.id: timing(v, key.seqlen, key.load) for v in found}
    ranked = sorted(found, key=lambda v: order(v, times[v.id]))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    decision = Decision(
        variant=best.id,
        criterion=CRITERIA[0],
        evidence=evidence_of(best, times[best.id], key.arch),
        cost_us=round(times[best.id].us, 2),
    )
    if second is None:
        return decision
    return replace(
        decision,
        criterion=_criterion(order(best, times[best.id]), order(second, times[second.id])),
        runner_up=second.id,
        runner_up_cost_us=round(times[second.id].us, 2),
    )


def _criterion(best: Order, second: Order) -> str:
    """What put one before the other."""
    decided = next(i for i, (x, y) in enumerate(zip(best, second, strict=True)) if x != y)
    return CRITERIA[3] if decided == 1 and best[0] == 1 else CRITERIA[1 + decided + (decided > 1)]


def evidence_of(v: Variant, t: Timing, arch: str = "") -> str:
    """Where a time is from; on a target that only emulates the kernel, this is said, too."""
    if (m := t.measurement) is not None:
        return f"measured on {m.card} at {m.clock_mhz} MHz"
    family = FAMILIES[v.family]
    return f"model of {family.model_card}" + (f", emulated on {arch}" if arch in family.emulated else "")


def _empty_reason(key: Key) -> str:
    """The padding rule, or the choice rule that no rival can satisfy here, or else that the profile leaves it out."""
    if key.head_dim not in head_dims(key.arch):
        wider = next((d for d in head_dims(key.arch) if d > key.head_dim), None)
        text = f"padded up to {wider}" if wider else "wider than any kernel"
        return f"PADDED: head_dim {key.head_dim} is {text} on {key.arch}"
    reasons = [_refusal(key, family.name) for family in serving(key)]
    if None in reasons:
        return "NOT-BUILT: legal, but not in the profile or filter that was generated"
    return str(reasons[0])


def _refusal(key: Key, family: str) -> str | None:
    """Why a family cannot serve the cell, whatever tile, stages, schedule and cluster; None where it can."""
    matrix = matrix_of(family, Kind.FWD)
    if matrix is None or key.head_dim not in matrix.head_dim:
        return f"HEAD-DIM: {family} has no kernels for head_dim {key.head_dim}"
    probe = Variant(
        family=family,
        kind=Kind.FWD,
        head_dim=key.head_dim,
        tile=matrix.tile[0],
        stages=matrix.stages[0],
        scaling=key.scaling,
        mask=key.mask,
        dtype=key.dtype,
        out=key.out,
        softmax=SOFTMAXES[key.precision][-1],
        schedule=matrix.schedule[0],
        cluster=Cluster.SOLO,
        walk=Walk.DENSE,
        change=Change.NONE,
    )
    probes = (replace(probe, scaling=scaling) for scaling in matrix.scaling)
    probe = next((v for v in probes if key.scaling in served(v)), probe)
    for rule in FAMILIES[family].rules:
        if rule.of_choice and rule.broken(probe, derive(probe)):
            return f"{rule.name}: {rule.explain(probe, derive(probe))}"
    return None


def cells_of(archs: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """The values of NAMES of all cells, in table order."""
    typed: dict[str, Callable[[Any], object]] = {"head_dim": int, "dtype": Operand, "out": Out, "scaling": Scaling}
    positions: list[list[Any]] = []
    for name, values in axes(archs):
        positions.append(
            [*range(len(values))] if name == "seqlen" else [typed.get(name, lambda x: x)(x) for x in values]
        )
    return itertools.product(*positions)


def keys(archs: tuple[str, ...]) -> Iterator[Key]:
    """All cells in table order."""
    return (Key(**dict(zip(NAMES, values, strict=True))) for values in cells_of(archs))


def build(emitted: tuple[Variant, ...], archs: tuple[str, ...]) -> Table:
    rivals: dict[tuple[object, ...], list[Variant]] = defaultdict(list)
    for v in emitted:
        rivals[v.head_dim, v.dtype, v.out, v.mask].append(v)
    numbers: dict[Decision, int] = {}
    cells = []
    among: dict[Group, tuple[Variant, ...]] = {}
    # What a decision depends on: the class where nobody serves it, which most cells are; else who competes, and where.
    decided: dict[tuple[object, ...], int] = {}
    of_class, of_cell = (itemgetter(*map(NAMES.index, some)) for some in (CLASS, ("arch", "seqlen", "load")))
    for values in cells_of(archs):
        group = of_class(values)
        found = among.get(group)
        basis = (found, *of_cell(values)) if found else group
        if found is None or basis not in decided:
            key = Key(**dict(zip(NAMES, values, strict=True)))
            if found is None:
                of = tuple(rivals[key.head_dim, key.dtype, key.out, key.mask])
                found = among[group] = tuple(candidates_of(key, of))
                basis = (found, *of_cell(values)) if found else group
            decision = _best(key, list(found)) if found else _nobody(key)
            decided[basis] = numbers.setdefault(decision, len(numbers))
        cells.append(decided[basis])
    return Table(axes=axes(archs), cells=tuple(cells), decisions=tuple(numbers), rivals=among)


def built(variants: tuple[Variant, ...], archs: tuple[str, ...], emulated: bool) -> tuple[Variant, ...]:
    """Those of `variants` that a build for these targets holds: kernels of families made for one of them.

    And of families that are emulated on one of them, what its table chooses, or with `emulated` everything.
    """
    families = {f.name for a in archs for f in families_of(a) if emulated or a not in f.emulated}
    held = {v.id for v in variants if v.family in families}
    if len(held) == len(variants):
        return variants
    held = held.union(*chosen_by(variants, archs).values())
    return tuple(v for v in variants if v.id in held)


def whole(variants: tuple[Variant, ...]) -> Table:
    """The table of all targets."""
    return _whole(variants, tuple(TARGETS), digest())


@cache
def _whole(variants: tuple[Variant, ...], archs: tuple[str, ...], measured: str) -> Table:
    """measured: digest of the measurements, which decide with the variants."""
    if variants != select().emitted:
        return build(variants, archs)
    return kept("-".join(("table", *archs)), lambda: build(variants, archs))


def chosen_by(variants: tuple[Variant, ...], archs: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Ids in the table, by target."""
    table, order_of = whole(variants), tuple(TARGETS)
    share = len(table.cells) // len(order_of)  # cells of a target, which is the first axis
    found = {}
    for arch in archs:
        at = share * order_of.index(arch)
        decisions = (table.decisions[cell] for cell in set(table.cells[at : at + share]))
        found[arch] = frozenset(d.variant for d in decisions if d.variant is not None)
    return found


def targets_of(
    v: Variant, archs: tuple[str, ...], chosen: Mapping[str, frozenset[str]] | None = None
) -> tuple[str, ...]:
    """The targets of a build that a variant of it is compiled for: those that its family serves.

    chosen: what the tables of the targets choose. Where the family is emulated on a target, a variant is then compiled
    for it only if it is among these.
    """
    family = FAMILIES[v.family]
    left_out = () if chosen is None else tuple(a for a in archs if a in family.emulated and v.id not in chosen[a])
    return tuple(a for a in archs if a in family.targets and a not in left_out)
