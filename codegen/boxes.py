"""Points of a product, as few full products of axis values: what the ledger and the dispatch table are grouped by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Box = dict[str, tuple[Any, ...]]
Point = tuple[Any, ...]


def boxes(points: Sequence[Point], axes: tuple[str, ...]) -> list[Box]:
    """Splits distinct points, which have a value for each axis, into few full products. Raises ValueError for twins."""
    if len(set(points)) < len(points):
        raise ValueError("duplicate points")
    return [{axis: box[axis] for axis in axes} for box in _split(list(points), axes)]


def _split(points: list[Point], axes: tuple[str, ...]) -> list[Box]:
    """Along the axis whose values fall into the fewest groups that hold the same points of the other axes."""
    if not axes:
        return [{}]

    def groups(at: int) -> dict[frozenset[Point], list[object]]:
        """The values of an axis by the points that they have on the others."""
        rests: dict[object, dict[Point, None]] = {}
        for point in points:
            rests.setdefault(point[at], {})[point[:at] + point[at + 1 :]] = None
        joined: dict[frozenset[Point], list[object]] = {}
        for value, rest in rests.items():
            joined.setdefault(frozenset(rest), []).append(value)
        return joined

    found = [groups(at) for at in range(len(axes))]
    at = min(range(len(axes)), key=lambda i: len(found[i]))
    result = []
    for rest, values in found[at].items():
        inside = [p for p in dict.fromkeys(q[:at] + q[at + 1 :] for q in points) if p in rest]
        result += [{axes[at]: tuple(values)} | box for box in _split(inside, axes[:at] + axes[at + 1 :])]
    return result
