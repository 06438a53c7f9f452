"""Which legal points become kernels: those that win a cell of the dispatch table. The ledger holds the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from codegen.axes import Change, Mask, Operand, Out, Scaling, Walk
from codegen.evidence import Measurement, evidence, measured, measured_of
from codegen.families import FAMILIES, derive
from codegen.kept import kept
from codegen.keys import LOADS, MOST, SEQLEN_BOUNDS, representative
from codegen.legal import Rejection, check
from codegen.matrix import MATRICES, Matrix
from codegen.scaling import key_block
from codegen.variant import SHAPE, Variant

# A class gets one kernel, or two where the second makes the cells more than 6% faster on average: each costs build time
# and size, and the model is not exact to 6% either.
WORTH = 1.06

# Where kernels were measured, a class gets as many, up to six, as bring every measured cell within 2% of the best.
CLOSE = 1.02
MOST_MEASURED = 6
ONLY_CELL = (SEQLEN_BOUNDS.index(4096), MOST)  # what a class with one kernel is chosen for
MOST_RARE = 2  # one for light loads, one for heavy ones

FAR = 1.05  # from here on the ledger does not say by how much a kernel was outranked, so that its rows can be joined

Cell = tuple[int, str]  # position among the seqlen buckets, load
CELLS: tuple[Cell, ...] = tuple((s, load) for s in range(len(SEQLEN_BOUNDS) + 1) for load in LOADS)
# Where nothing was measured, kernels are emitted for these loads alone: what the model says of a tile's height in one
# wave more or less is within its error. Among the emitted ones it chooses in every cell.
MODELLED_LOADS = ("few", "wave1", "heavy")
Costs = Mapping[str, Mapping[Cell, float]]  # microseconds by id and cell; a cell may be missing
Order = tuple[int, float, int, int, str]


@dataclass(frozen=True, kw_only=True, eq=False)  # by identity: it is large, and there is one of it
class Selection:
    """`emitted` sorted by id; `rejected` in declared order; together they are the whole product."""

    emitted: tuple[Variant, ...]
    rejected: tuple[tuple[Variant, Rejection], ...]
    declared: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of a variant in a cell, and the measurement that they come from, if any."""

    us: float
    measurement: Measurement | None = None


@cache
def modelled_us(v: Variant, seqlen: int, load: str) -> float:
    """Modelled microseconds of the problem that stands for a cell, on the card that stands for the family."""
    family = FAMILIES[v.family]
    card = family.card
    return family.cost(v, representative(card, seqlen, load, v.causal), card).us


def timing(v: Variant, seqlen: int, load: str) -> Timing:
    """Measured where it was, else modelled."""
    if (m := measured(v, seqlen, load)) is not None:
        return Timing(us=m.us, measurement=m)
    return Timing(us=modelled_us(_modelled(v), seqlen, load))


def modelled_costs(v: Variant) -> dict[Cell, float]:
    """Modelled cost of a variant in the cells of its class that count where nothing was measured."""
    return {(s, load): modelled_us(_modelled(v), s, load) for s, load in CELLS if load in MODELLED_LOADS}


def measured_costs(v: Variant) -> dict[Cell, float]:
    """Measured cost of a variant in the cells of its class where it was measured."""
    return {cell: m.us for cell, m in measured_of(v, CELLS).items()}


def order(v: Variant, t: Timing) -> Order:
    """The comparator: measured first, then time, fewer shared-memory bytes, fewer warps, and the id, to be total."""
    return (0 if t.measurement else 1, round(t.us, 3), derive(v).smem_bytes, v.warps, v.id)


def problem_class(v: Variant) -> tuple[object, ...]:
    """Variants that compete: everything equal but tile, stages, schedule and cluster."""
    return v.problem


def _floor(costs: Costs) -> dict[Cell, float]:
    """The least cost of each cell that anybody has one in."""
    floor: dict[Cell, float] = {}
    for of in costs.values():
        for cell, us in of.items():
            floor[cell] = min(us, floor.get(cell, math.inf))
    return floor


def _losses(chosen: tuple[Variant, ...], costs: Costs, floor: Mapping[Cell, float]) -> list[float]:
    """For each cell: best of chosen / best of all."""
    own = [costs[v.id] for v in chosen]
    return [min(of.get(cell, math.inf) for of in own) / us for cell, us in floor.items()]


def _mean(losses: list[float]) -> float:
    return math.exp(sum(map(math.log, losses)) / len(losses))


def regret(chosen: tuple[Variant, ...], costs: Costs) -> float:
    """Geometric mean over the cells of (best of chosen / best of all)."""
    return _mean(_losses(chosen, costs, _floor(costs)))


def _still(v: Variant) -> Order:
    """Order by everything but time."""
    return order(v, Timing(us=0.0))


def _unbeaten(candidates: tuple[Variant, ...], costs: Costs) -> tuple[Variant, ...]:
    """Without those that another one beats or equals in every cell and in the order: no best set needs them."""
    still = {v.id: _still(v) for v in candidates}

    def beaten(v: Variant, by: Variant) -> bool:
        theirs = costs[by.id]
        return still[by.id] < still[v.id] and all(theirs.get(c, math.inf) <= us for c, us in costs[v.id].items())

    return tuple(v for v in candidates if not any(beaten(v, w) for w in candidates))


def _best(candidates: tuple[Variant, ...], size: int, costs: Costs, close: float = math.inf) -> tuple[Variant, ...]:
    """The set of this size with the least regret among those that lose no more than `close` in any cell; or none."""
    floor = _floor(costs)
    losses = {s: _losses(s, costs, floor) for s in itertools.combinations(candidates, size)}
    fit = [s for s, of in losses.items() if max(of) <= close]
    return min(fit, key=lambda s: (round(_mean(losses[s]), 4), tuple(map(_still, s))), default=())


def _by_model(candidates: tuple[Variant, ...], most: int, costs: Costs) -> tuple[Variant, ...]:
    rivals = _unbeaten(candidates, costs)
    one, two = _best(rivals, 1, costs), _best(rivals, 2, costs) if most > 1 else ()
    return two if two and round(regret(one, costs), 4) > WORTH * round(regret(two, costs), 4) else one


def _by_measurement(candidates: tuple[Variant, ...], most: int, costs: Costs) -> tuple[Variant, ...]:
    rivals = _unbeaten(tuple(v for v in candidates if costs[v.id]), costs)
    most = min(most, len(rivals))
    for size in range(1, most + 1):
        if close := _best(rivals, size, costs, CLOSE):
            return close
    return _best(rivals, most, costs)


@cache
def _winners(candidates: tuple[Variant, ...], most: int) -> tuple[tuple[Variant, ...], dict[Variant, Rejection]]:
    """The kernels of a class, at most so many, with the least regret over the cells, and why not the others."""
    costs: dict[str, dict[Cell, float]] = {v.id: measured_costs(v) for v in candidates}
    if most == 1:
        costs = {i: {cell: us for cell, us in of.items() if cell == ONLY_CELL} for i, of in costs.items()}
    seen = any(costs.values())
    if seen:
        chosen = _by_measurement(candidates, most, costs)
    else:
        costs = {v.id: modelled_costs(v) for v in candidates}
        chosen = _by_model(candidates, min(most, 2), costs)
    how = "measured" if seen else "modelled"
    against = " and ".join(v.shape for v in chosen)
    floor = _floor(costs)
    rejections = {}
    for v in candidates:
        if v in chosen:
            continue
        if not (mine := costs[v.id]):
            message = f"not measured, as {against} were"
        else:
            message = f"{how} at {FAR} or more of {against} in every cell"
            average = _mean([us / floor[c] for c, us in mine.items()])
            best = min(us / min(costs[w.id].get(c, math.inf) for w in chosen) for c, us in mine.items())
            if best < FAR:
                message = f"{how} at {average:.2f} of the best on average and {best:.2f} of {against} in its best cell"
        rejections[v] = Rejection(rule="OUTRANKED", message=message)
    return chosen, rejections


def _modelled(v: Variant) -> Variant:
    """The variant with what neither model nor measurement reads set to one value, so that equal classes rank once."""
    scaling = v.scaling if v.scaling.per_key else Scaling.TENSOR
    mask = Mask.CAUSAL if v.windowed else Mask.FULL if v.listed else v.mask
    read = (v.family, v.kind, v.head_dim, v.tile, v.stages, v.softmax, v.schedule, v.cluster, scaling, mask)
    if (stand_in := _STAND_INS.get(read)) is None:
        of_one_value = replace(v, dtype=Operand.E4M3, out=Out.BF16, walk=Walk.DENSE, change=Change.NONE)
        stand_in = _STAND_INS[read] = replace(of_one_value, scaling=scaling, mask=mask)
    return stand_in


_STAND_INS: dict[tuple[object, ...], Variant] = {}  # with their ids, which are asked for often


def _most(v: Variant) -> int:
    """How many kernels the class of a variant may get: fewer in the modes that few calls have."""
    if v.special:
        return 1
    return MOST_RARE if v.softmax.rare or not v.dtype.made or v.out.scaled else MOST_MEASURED


def _for_other_masks(emitted: Iterable[Variant], outranked: Mapping[str, Rejection]) -> list[Variant]:
    """What is missing beside ``emitted``: keys that were packed for a call without a causal mask are attended with one
    as well, and the other way round, so that kernels of 16-bit output read a key block with every mask or none. A
    cell of the table may choose such a kernel or not; for packed keys it is found all the same."""
    there = {(problem_class(v), key_block(v)) for v in emitted}
    missing: dict[tuple[object, ...], Variant] = {}
    for v in emitted:
        for mask in () if v.special else (Mask.FULL, Mask.CAUSAL):
            other = replace(v, mask=mask)
            place = problem_class(other), key_block(other)
            if not v.kind.diagnostic and not v.out.scaled and place not in there and other.id in outranked:
                missing.setdefault(place, other)
    return list(missing.values())


@cache
def _judged(matrices: tuple[Matrix, ...]) -> tuple[list[Variant], list[Rejection | None]]:
    """Every point of the matrices, and what is against it. No measurement has a say in that."""
    points = [v for m in matrices for v in m.points]
    return points, [check(v) for v in points]


@cache
def select(matrices: tuple[Matrix, ...] = MATRICES) -> Selection:
    """The release profile: every point of the matrices, emitted or rejected. Raises EvidenceError, before it begins."""
    evidence()
    return kept("selection", lambda: _select(matrices)) if matrices is MATRICES else _select(matrices)


def _select(matrices: tuple[Matrix, ...]) -> Selection:
    points, verdicts = _judged(matrices)
    classes: dict[tuple[object, ...], list[Variant]] = {}
    for v, broken in zip(points, verdicts, strict=True):
        if broken is None:
            classes.setdefault(problem_class(v), []).append(v)
    emitted: list[Variant] = []
    outranked: dict[str, Rejection] = {}
    for members in classes.values():
        ranked = tuple(map(_modelled, members))
        chosen, rejections = _winners(ranked, _most(members[0]))
        for v, stand_in in zip(members, ranked, strict=True):
            if stand_in in chosen:
                emitted.append(v)
            else:
                outranked[v.id] = rejections[stand_in]
    for v in _for_other_masks(emitted, outranked):
        emitted.append(v)
        del outranked[v.id]
    judged = ((v, broken or outranked.get(v.id)) for v, broken in zip(points, verdicts, strict=True))
    rejected = tuple((v, r) for v, r in judged if r is not None)
    return Selection(emitted=tuple(sorted(emitted, key=lambda v: v.id)), rejected=rejected, declared=len(points))


def rivals(v: Variant) -> list[Variant]:
    """All declared points of a variant's class, legal or not."""
    matrix = next((m for m in MATRICES if m.is_of(v)), None)
    if matrix is None:
        return []
    return [
        replace(v, **dict(zip(SHAPE, values, strict=True)))
        for values in itertools.product(*(getattr(matrix, axis) for axis in SHAPE))
    ]
