"""Which legal points become kernels: those that win a cell of the dispatch table. The ledger holds the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from codegen.arch import CARDS, MODEL_CARD
from codegen.derive import derive
from codegen.keys import LOADS, SEQLEN_BOUNDS, Key, representative
from codegen.matrix import MATRICES, Matrix, in_profile
from codegen.model import cost
from codegen.rules import Rejection, check
from codegen.spec import Dtype, Kind, Out, Scaling, Softmax, Tile, Variant

# A class gets one kernel, or two where the second makes the cells more than 6% faster on average: each costs build time
# and size, and the model is not exact to 6% either.
WORTH = 1.06

Order = tuple[float, int, int, str]
Rank = tuple[float, tuple[Order, ...]]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """`emitted` sorted by id; `rejected` in declared order; together they are the whole product."""

    emitted: tuple[Variant, ...]
    rejected: tuple[tuple[Variant, Rejection], ...]
    declared: int


@cache
def _cell_cost(
    head_dim: int, tile: Tile, stages: int, token: bool, causal: bool, softmax: Softmax, cell: int, load: str
) -> float:
    """Modelled microseconds; only the fields that the model reads, so that the product is evaluated once."""
    v = Variant(
        family="sm89",
        kind=Kind.FWD,
        head_dim=head_dim,
        tile=tile,
        stages=stages,
        scaling=Scaling.TOKEN if token else Scaling.TENSOR,
        causal=causal,
        dtype=Dtype.E4M3,
        out=Out.BF16,
        softmax=softmax,
    )
    return variant_cost(v, cell, load)


def variant_cost(v: Variant, seqlen: int, load: str) -> float:
    key = Key(
        arch="sm89",
        head_dim=v.head_dim,
        seqlen=seqlen,
        dtype=v.dtype,
        out=v.out,
        scaling=v.scaling,
        causal=v.causal,
        precision="fast",
        load=load,
    )
    return cost(v, representative(key), CARDS[MODEL_CARD]).us


def cell_costs(v: Variant) -> dict[tuple[int, str], float]:
    """Modelled cost of a variant in every (seqlen, load) cell of its class."""
    token = v.scaling is Scaling.TOKEN
    return {
        (s, load): _cell_cost(v.head_dim, v.tile, v.stages, token, v.causal, v.softmax, s, load)
        for s in range(len(SEQLEN_BOUNDS) + 1)
        for load in LOADS
    }


def order(v: Variant, us: float) -> Order:
    """The comparator: modelled time, then fewer shared-memory bytes, then fewer warps, then the id, to be total."""
    return (round(us, 3), derive(v).smem_bytes, v.warps, v.id)


def problem_class(v: Variant) -> tuple[object, ...]:
    """Variants that compete: everything equal but tile and stages."""
    return (v.family, v.kind, v.head_dim, v.scaling, v.causal, v.dtype, v.out, v.softmax)


def regret(chosen: tuple[Variant, ...], costs: dict[str, dict[tuple[int, str], float]]) -> float:
    """Geometric mean over the cells of (best of chosen / best of all)."""
    cells = next(iter(costs.values()))
    logs = [math.log(min(costs[v.id][c] for v in chosen) / min(of[c] for of in costs.values())) for c in cells]
    return math.exp(sum(logs) / len(logs))


@cache
def _winners(candidates: tuple[Variant, ...]) -> tuple[tuple[Variant, ...], dict[Variant, Rejection]]:
    """The one or two kernels of a class with the least regret over the cells of the table, and why not the others."""
    costs = {v.id: cell_costs(v) for v in candidates}

    def rank(chosen: tuple[Variant, ...]) -> Rank:
        return round(regret(chosen, costs), 4), tuple(order(v, 0.0) for v in chosen)

    ranked: dict[tuple[Variant, ...], Rank] = {(v,): rank((v,)) for v in candidates}
    one = min(ranked, key=lambda k: ranked[k])
    pairs: dict[tuple[Variant, ...], Rank] = {k: rank(k) for k in itertools.combinations(candidates, 2)}
    two = min(pairs, key=lambda k: pairs[k], default=one)
    chosen = two if two != one and ranked[one][0] > WORTH * pairs[two][0] else one
    against = " and ".join(f"{v.tile}_s{v.stages}" for v in chosen)
    rejections = {}
    for v in candidates:
        if v not in chosen:
            best = min(us / min(costs[w.id][c] for w in chosen) for c, us in costs[v.id].items())
            rejections[v] = Rejection(
                rule="OUTRANKED",
                message=(
                    f"modelled at {ranked[(v,)][0]:.2f} of the best on average "
                    f"and {best:.2f} of {against} in its best cell"
                ),
            )
    return chosen, rejections


def _modelled(v: Variant) -> Variant:
    """The variant with what the model does not read set to one value, so that equal classes are ranked once."""
    scaling = Scaling.TOKEN if v.scaling is Scaling.TOKEN else Scaling.TENSOR
    return replace(v, scaling=scaling, dtype=Dtype.E4M3, out=Out.BF16)


@cache
def select(matrices: tuple[Matrix, ...] = MATRICES) -> Selection:
    """The release profile: every point of the matrices, emitted or rejected."""
    points = [v for m in matrices for v in m.points()]
    illegal = {v.id: r for v in points if (r := check(v)) is not None}
    classes: dict[tuple[object, ...], list[Variant]] = {}
    for v in points:
        if v.id not in illegal:
            classes.setdefault(problem_class(v), []).append(v)
    emitted: list[Variant] = []
    outranked: dict[str, Rejection] = {}
    for members in classes.values():
        chosen, rejections = _winners(tuple(_modelled(v) for v in members))
        emitted += [v for v in members if _modelled(v) in chosen]
        outranked |= {v.id: rejections[_modelled(v)] for v in members if _modelled(v) not in chosen}
    rejected = tuple((v, r) for v in points if (r := illegal.get(v.id) or outranked.get(v.id)) is not None)
    return Selection(emitted=tuple(sorted(emitted, key=lambda v: v.id)), rejected=rejected, declared=len(points))


def of_profile(variants: Iterable[Variant], profile: str) -> tuple[Variant, ...]:
    return tuple(v for v in variants if in_profile(v, profile))


def rivals(v: Variant) -> list[Variant]:
    """All declared points of a variant's class, legal or not."""
    matrix = next(m for m in MATRICES if m.family == v.family and m.kind == v.kind)
    return [replace(v, tile=tile, stages=stages) for tile in matrix.tile for stages in matrix.stages]
