"""Which tokens of a sequence each rank has: integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..errors import UnsupportedError
from ..memory import concatenated

Segment = tuple[int, int]  # first token, and one past the last


@dataclass(frozen=True)
class Shards:
    """``segments[r]`` are the tokens of rank r, in the order in which they lie in its tensors, which is ascending.

    Each token of ``range(tokens)`` is in one segment. A rank may have none.
    """

    segments: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        every = sorted(segment for mine in self.segments for segment in mine)
        ends = [0, *(stop for _, stop in every)]
        holes = any(start != end for (start, _), end in zip(every, ends, strict=False))
        ascending = all(list(mine) == sorted(mine) for mine in self.segments)
        if not self.segments or holes or not ascending or any(start > stop for start, stop in every):
            raise UnsupportedError(
                f"segments must cover a range of tokens from 0 on once, each rank's ascending, got {self.segments}"
            )

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.segments)

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return max((stop for mine in self.segments for _, stop in mine), default=0)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(stop - start for start, stop in mine) for mine in self.segments)

    def ends(self) -> tuple[int, ...]:
        """Where segments begin and end, ascending, each once."""
        return tuple(sorted({end for mine in self.segments for segment in mine for end in segment}))

    def fits(self, multiple: int) -> bool:
        """Whether every end but that of the sequence is a multiple."""
        return all(end % multiple == 0 for end in self.ends() if end != self.tokens)

    def snapped(self, multiple: int) -> Shards:
        """The same with ends at the nearest multiples; that of the sequence stays."""
        last = self.tokens

        def snap(end: int) -> int:
            return end if end == last else min(last, (2 * end + multiple) // (2 * multiple) * multiple)

        moved = (tuple((snap(a), snap(b)) for a, b in mine) for mine in self.segments)
        return Shards(tuple(_joined([s for s in mine if s[0] < s[1]]) for mine in moved))

    def split(self, parts: int) -> Shards:
        """Each rank's tokens spread over ``parts`` ranks, one after the other: rank r becomes ``r * parts + i``."""
        found = []
        for mine, length in zip(self.segments, self.lengths, strict=True):
            for i in range(parts):
                found.append(_cut(mine, i * length // parts, (i + 1) * length // parts))
        return Shards(tuple(found))

    def shard(self, x: torch.Tensor, rank: int, dim: int = 2) -> torch.Tensor:
        """A rank's tokens of a tensor of the whole sequence, with tokens in dimension ``dim``; contiguous."""
        return concatenated(self.pieces(x, rank, dim), dim)

    def pieces(self, x: torch.Tensor, rank: int, dim: int = 2) -> list[torch.Tensor]:
        """The same as views of ``x``, one for each segment; an empty one for a rank without tokens."""
        if x.shape[dim] != self.tokens:
            raise UnsupportedError(f"x has {x.shape[dim]} tokens in dimension {dim}, the sequence has {self.tokens}")
        mine = [x.narrow(dim, start, stop - start) for start, stop in self.segments[rank]]
        return mine or [x.narrow(dim, 0, 0)]

    def unshard(self, parts: Sequence[torch.Tensor], dim: int = 2) -> torch.Tensor:
        """The tensor of the whole sequence of those of all ranks, in their order."""
        wrong = [
            f"part {r} has {x.shape[dim]} tokens in dimension {dim}, rank {r} has {length}"
            for r, (x, length) in enumerate(zip(parts, self.lengths, strict=False))
            if x.shape[dim] != length
        ]
        if wrong or len(parts) != self.ranks:
            raise UnsupportedError(*wrong, f"{len(parts)} parts for {self.ranks} ranks")
        return concatenated([parts[r].narrow(dim, at, stop - start) for start, stop, r, at in self.in_order()], dim)

    def in_order(self) -> list[tuple[int, int, int, int]]:
        """(start, stop, rank, where it begins in the rank's tensor) of all segments, by their tokens; none is empty."""
        found = []
        for rank, mine in enumerate(self.segments):
            at = 0
            for start, stop in mine:
                if start < stop:
                    found.append((start, stop, rank, at))
                at += stop - start
        return sorted(found)


def contiguous(tokens: int | Sequence[int], ranks: int | None = None, *, multiple: int = 1) -> Shards:
    """Rank after rank: of so many ``tokens`` as even as ends at multiples can be, or of the given lengths."""
    if isinstance(tokens, int):
        if ranks is None:
            raise UnsupportedError("ranks must be given where tokens is a number")
        ends = _even(tokens, ranks, multiple)
    else:
        ends = [0, *accumulate(tokens)]
    return Shards(tuple(((a, b),) if a < b else () for a, b in zip(ends, ends[1:], strict=False)))


def zigzag(tokens: int, ranks: int, *, multiple: int = 1) -> Shards:
    """For causal masks: of 2 x ranks pieces rank r has r and ``2 * ranks - 1 - r``, so that all ranks have as many
    pairs of a row and a key that it sees. Where 2 x ranks divides tokens, it is the order of torch's head-tail load
    balancer.
    """
    ends = _even(tokens, 2 * ranks, multiple)
    pieces = list(zip(ends, ends[1:], strict=False))
    mine = ([pieces[r], pieces[2 * ranks - 1 - r]] for r in range(ranks))
    return Shards(tuple(_joined([piece for piece in pair if piece[0] < piece[1]]) for pair in mine))


def _even(tokens: int, pieces: int, multiple: int) -> list[int]:
    if tokens < 0 or pieces < 1 or multiple < 1:
        raise UnsupportedError(f"tokens, ranks and multiple must be positive, got {tokens}, {pieces} and {multiple}")
    step = pieces * multiple
    return [min(tokens, (2 * i * tokens + step) // (2 * step) * multiple) for i in range(pieces)] + [tokens]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours become one."""
    found: list[Segment] = []
    for start, stop in segments:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _cut(segments: Sequence[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """What lies between two positions of a rank's tokens."""
    found, at = [], 0
    for start, stop in segments:
        a, b = max(begin - at, 0), min(end - at, stop - start)
        if a < b:
            found.append((start + a, start + b))
        at += stop - start
    return tuple(found)
