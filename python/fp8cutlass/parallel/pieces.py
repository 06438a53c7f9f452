"""Which part of the mask a rank's rows and a shard of keys have in common, as calls of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .shards import Segment


class Piece(NamedTuple):
    """A call: some rows and some keys, counted in the tensors of their ranks, both ends of each."""

    rows: Segment
    keys: Segment
    offset: int | None  # row i of these sees keys up to i + offset of these; None: all of them


def pieces(rows: Sequence[Segment], keys: Sequence[Segment], causal: bool) -> list[Piece]:
    """The calls by which rows with these tokens attend to keys with those, each pair that the mask leaves in one of
    them. Rows without a key are in none."""
    row_ends, key_ends = _positions(rows), _positions(keys)
    if not causal:
        whole = Piece((0, row_ends[-1]), (0, key_ends[-1]), None)
        return [whole] if row_ends[-1] and key_ends[-1] else []
    found: list[Piece] = []
    for (start, stop), first, last in zip(rows, row_ends, row_ends[1:], strict=False):
        base = seen = 0  # keys before `base` are in calls already; all rows see those from there to `seen`
        for i, (begin, end) in enumerate(keys):
            if begin >= stop or begin == end or start == stop:
                continue
            if end <= start + 1:
                seen = key_ends[i + 1]
                continue
            if begin <= start + 1:  # of those before, all rows see all
                offset = start - begin + key_ends[i] - base
                found.append(Piece((first, last), (base, key_ends[i + 1]), offset))
            else:
                if seen > base:
                    found.append(Piece((first, last), (base, seen), None))
                found.append(Piece((first, last), (key_ends[i], key_ends[i + 1]), start - begin))
            base = seen = key_ends[i + 1]
        if seen > base:
            found.append(Piece((first, last), (base, seen), None))
    return _together(found)


def _positions(segments: Sequence[Segment]) -> list[int]:
    ends = [0]
    for start, stop in segments:
        ends.append(ends[-1] + stop - start)
    return ends


def _together(found: Sequence[Piece]) -> list[Piece]:
    """Neighbouring rows in one call where one offset serves both."""
    joined: list[Piece] = []
    for piece in found:
        if joined and joined[-1].rows[1] == piece.rows[0]:
            before = joined[-1]
            rows = (before.rows[0], piece.rows[1])
            if before.offset is None and piece.offset is None and before.keys == piece.keys:
                joined[-1] = Piece(rows, piece.keys, None)
                continue
            if before.offset is not None and piece.offset is not None and before.keys[0] == piece.keys[0]:
                same = before.offset == piece.offset - (piece.rows[0] - before.rows[0])
                # The rows before see nothing of the keys that only those after have.
                beyond = before.rows[1] - before.rows[0] - 1 + before.offset
                if same and before.keys[1] <= piece.keys[1] and beyond < before.keys[1]:
                    joined[-1] = Piece(rows, piece.keys, before.offset)
                    continue
        joined.append(piece)
    return joined
