"""Points of a product, as few full products of axis values: what the ledger and the dispatch table are grouped by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

Box = dict[str, tuple[Any, ...]]
Point = tuple[Any, ...]
Numbers = tuple[int, ...]  # of values of axes


def boxes(points: Sequence[Point], axes: tuple[str, ...]) -> list[Box]:
    """Splits distinct points, which have a value for each axis, into few full products. Raises ValueError for twins."""
    if len(set(points)) < len(points):
        raise ValueError("duplicate points")
    # Numbers stand for the values: they hash in no time, and there are millions of look-ups.
    values = [list(dict.fromkeys(column)) for column in zip(*points, strict=True)] or [[] for _ in axes]
    numbers = [{value: number for number, value in enumerate(column)} for column in values]
    numbered = [tuple(of[value] for of, value in zip(numbers, point, strict=True)) for point in points]
    found = _split(numbered, tuple(range(len(axes))))
    return [{axes[at]: tuple(values[at][n] for n in box[at]) for at in range(len(axes))} for box in found]


def _split(points: list[Numbers], axes: tuple[int, ...]) -> list[dict[int, Numbers]]:
    """Along the axis whose values fall into the fewest groups that hold the same points of the other axes."""
    columns = [dict.fromkeys(column) for column in zip(*points, strict=True)]
    if points and math.prod(map(len, columns)) == len(points):  # a full product, as most of what is left is
        return [dict(zip(axes, map(tuple, columns), strict=True))]
    if any(len(column) == 1 for column in columns):
        several = [at for at, column in enumerate(columns) if len(column) > 1]
        alone = {axes[at]: tuple(column) for at, column in enumerate(columns) if len(column) == 1}
        rests = list(map(itemgetter(*several), points))  # two columns or more: those of one are a full product
        return [alone | box for box in _split(rests, tuple(axes[at] for at in several))]

    def groups(at: int) -> dict[frozenset[Numbers], list[int]]:
        """The values of an axis by the points that they have on the others."""
        rests: dict[int, set[Numbers]] = {}
        for point in points:
            rests.setdefault(point[at], set()).add(point[:at] + point[at + 1 :])
        joined: dict[frozenset[Numbers], list[int]] = {}
        for value, rest in rests.items():
            joined.setdefault(frozenset(rest), []).append(value)
        return joined

    at, found = 0, groups(0)
    for other in range(1, len(axes)):
        if len(found) == 1:  # no axis has fewer
            break
        if len(those := groups(other)) < len(found):
            at, found = other, those
    result: list[dict[int, Numbers]] = []
    for rest, values in found.items():
        inside = [p for p in dict.fromkeys(q[:at] + q[at + 1 :] for q in points) if p in rest]
        result += [{axes[at]: tuple(values)} | box for box in _split(inside, axes[:at] + axes[at + 1 :])]
    return result
