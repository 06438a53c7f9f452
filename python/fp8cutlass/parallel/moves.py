"""Rows of keys and values move to the rank that packs their block, where shards end between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..memory import concatenated, in_one
from .exchange import Group, all_to_all
from .shards import Segment, Shards


class Route(NamedTuple):
    """What a rank sends, gets and keeps. Rows are counted in its own tensors."""

    sent: tuple[tuple[Segment, ...], ...]  # rows for each rank, none for itself
    got: tuple[tuple[int, ...], ...]  # the lengths of the pieces of each rank
    # The result in the order of its tokens: rows of its own (None, first, count), or piece (rank, number, count).
    made: tuple[tuple[int | None, int, int], ...]


def moved(tensors: Sequence[torch.Tensor], source: Shards, target: Shards, group: Group) -> list[torch.Tensor]:
    """Tensors (B, H, S, D) of one dtype whose tokens are those of ``source``, with those of ``target``. Only rows that
    change their rank are sent, in one exchange."""
    if source == target:
        return list(tensors)
    route = _route(source, target, group.rank())
    widths = [x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in tensors]  # bytes of a token
    parts = [x.narrow(2, a, b - a) for rows in route.sent for x in tensors for a, b in rows]
    room = in_one(parts) if parts else tensors[0].new_empty((0,), dtype=torch.uint8)
    sizes = [sum(b - a for a, b in rows) * sum(widths) for rows in route.sent]
    received = [sum(counts) * sum(widths) for counts in route.got]
    arrived, at = all_to_all(room, sizes, received, group).wait(), 0
    pieces: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in tensors]
    for rank, counts in enumerate(route.got):
        for x, width, of in zip(tensors, widths, pieces, strict=True):
            for number, count in enumerate(counts):
                bytes_of = arrived.narrow(0, at, count * width).view(x.dtype)
                of[rank, number] = bytes_of.view(*x.shape[:2], count, x.shape[3])
                at += count * width
    found = []
    for x, of in zip(tensors, pieces, strict=True):
        rows_of = [x.narrow(2, first, count) if rank is None else of[rank, first] for rank, first, count in route.made]
        found.append(concatenated(rows_of, 2) if rows_of else x.narrow(2, 0, 0))
    return found


@lru_cache(maxsize=256)
def _route(source: Shards, target: Shards, me: int) -> Route:
    sent = [_common(source.segments[me], theirs) for theirs in target.segments]
    got = [_common(theirs, target.segments[me]) for theirs in source.segments]
    kept, sent[me], got[me] = sent[me], [], []
    places = {start: at for start, _, rank, at in source.in_order() if rank == me}
    own = [[(places[start] + a - start, places[start] + b - start) for start, a, b in rows] for rows in sent]
    made: list[tuple[int, tuple[int | None, int, int]]] = [
        (a, (None, places[start] + a - start, b - a)) for start, a, b in kept
    ]
    made += [(a, (rank, i, b - a)) for rank, rows in enumerate(got) for i, (_, a, b) in enumerate(rows)]
    return Route(
        tuple(map(tuple, own)),
        tuple(tuple(b - a for _, a, b in rows) for rows in got),
        tuple(piece for _, piece in sorted(made, key=lambda one: one[0])),
    )


def _common(mine: Sequence[Segment], theirs: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """The tokens that both have, ascending: the first token of the segment of ``mine``, begin and end."""
    found = ((a, max(a, c), min(b, d)) for a, b in mine for c, d in theirs)
    return sorted(((a, c, d) for a, c, d in found if c < d), key=lambda one: one[1])
