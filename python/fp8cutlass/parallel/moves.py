"""Rows of keys and values move to the rank that packs their block, where shards end between blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory import concatenated, in_one
from .exchange import Group, all_to_all
from .shards import Segment, Shards


def moved(tensors: Sequence[torch.Tensor], source: Shards, target: Shards, group: Group) -> list[torch.Tensor]:
    """Tensors (B, H, S, D) of one dtype whose tokens are those of ``source``, with those of ``target``. Only rows that
    change their rank are sent, in one exchange."""
    me = group.rank()
    sizes, received = ([_tokens(x) for x in row] for row in (_sent(source, target, me), _got(source, target, me)))
    sizes[me] = received[me] = 0
    if source == target:
        return list(tensors)
    widths = [x.numel() // max(1, x.shape[2]) * x.element_size() for x in tensors]  # bytes of a token
    batch = [x.shape[:2] for x in tensors]
    parts = [
        _rows(x, source.segments[me], common)
        for rank, common in enumerate(_sent(source, target, me))
        if rank != me
        for x in tensors
    ]
    room = in_one(parts) if parts else tensors[0].new_empty((0,), dtype=torch.uint8)
    arrived = all_to_all(room, [n * sum(widths) for n in sizes], [n * sum(widths) for n in received], group).wait()
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in tensors]
    at = 0
    for rank, common in enumerate(_got(source, target, me)):
        for i, x in enumerate(tensors):
            if rank == me:
                rows = _rows(x, source.segments[me], common)
            else:
                size = _tokens(common) * widths[i]
                rows = arrived.narrow(0, at, size).view(x.dtype).view(*batch[i], _tokens(common), x.shape[3])
                at += size
            first = 0
            for start, stop in common:
                found[i].append((start, rows.narrow(2, first, stop - start)))
                first += stop - start
    return [
        concatenated([rows for _, rows in sorted(pieces, key=lambda piece: piece[0])], 2)
        if pieces
        else x.narrow(2, 0, 0)
        for pieces, x in zip(found, tensors, strict=True)
    ]


def _sent(source: Shards, target: Shards, rank: int) -> list[list[Segment]]:
    return [_common(source.segments[rank], theirs) for theirs in target.segments]


def _got(source: Shards, target: Shards, rank: int) -> list[list[Segment]]:
    return [_common(theirs, target.segments[rank]) for theirs in source.segments]


def _common(mine: Sequence[Segment], theirs: Sequence[Segment]) -> list[Segment]:
    found = ((max(a, c), min(b, d)) for a, b in mine for c, d in theirs)
    return sorted(segment for segment in found if segment[0] < segment[1])


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(stop - start for start, stop in segments)


def _rows(x: torch.Tensor, mine: Sequence[Segment], wanted: Sequence[Segment]) -> torch.Tensor:
    """The rows of some of its tokens, of a tensor that has ``mine``."""
    found, at = [], 0
    for start, stop in mine:
        for a, b in wanted:
            if start <= a < stop:
                found.append(x.narrow(2, at + a - start, b - a))
        at += stop - start
    return concatenated(found, 2) if found else x.narrow(2, 0, 0)
