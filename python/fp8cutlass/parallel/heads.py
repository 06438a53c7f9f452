"""Rows of all heads against all rows of some heads, and back: the two exchanges of Ulysses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory import copy_into, in_one, taken
from .exchange import Group, Pending, all_to_all


def to_heads(tensors: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]], group: Group) -> ToHeads:
    """Begin to send each rank its heads of tensors (B, H, S, D), whose ranks have ``lengths`` tokens of each."""
    ranks = group.size()
    parts = [part for i in range(ranks) for part in _of(tensors, i, ranks)]
    widths = [x.shape[0] * x.shape[1] // ranks * x.shape[3] * x.element_size() for x in tensors]
    mine = sum(w * x.shape[2] for w, x in zip(widths, tensors, strict=True))
    received = [sum(w * n[r] for w, n in zip(widths, lengths, strict=True)) for r in range(ranks)]
    return ToHeads(all_to_all(in_one(parts), [mine] * ranks, received, group), tensors, lengths, ranks)


def _of(tensors: Sequence[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    return [x.narrow(1, rank * (x.shape[1] // ranks), x.shape[1] // ranks) for x in tensors]


class ToHeads:
    """An exchange under way."""

    def __init__(
        self, pending: Pending, tensors: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]], ranks: int
    ) -> None:
        self._pending, self._lengths = pending, lengths
        self._shapes = [((x.shape[0], x.shape[1] // ranks), x.shape[3], x.dtype) for x in tensors]

    def wait(self) -> list[list[torch.Tensor]]:
        """Of each tensor the parts (B, H / ranks, S of the rank, D) of all ranks, in their order."""
        buffer, at = self._pending.wait(), 0
        found: list[list[torch.Tensor]] = [[] for _ in self._shapes]
        for rank in range(len(self._lengths[0])):
            for parts, (lead, width, dtype), lengths in zip(found, self._shapes, self._lengths, strict=True):
                shape = (*lead, lengths[rank], width)
                count = lead[0] * lead[1] * lengths[rank] * width * dtype.itemsize
                parts.append(buffer.narrow(0, at, count).view(dtype).view(shape))
                at += count
        return found


def from_heads(parts: Sequence[Sequence[Sequence[torch.Tensor]]], group: Group) -> list[torch.Tensor]:
    """Send each rank its rows: of each tensor and each rank the pieces (B, H / ranks, S of the piece, D), in their
    order, against (B, H, S, D) of this rank's rows."""
    ranks, me = group.size(), group.rank()
    pieces = [x for r in range(ranks) for of_ranks in parts for x in of_ranks[r]]
    sizes = [sum(x.numel() * x.element_size() for of_ranks in parts for x in of_ranks[r]) for r in range(ranks)]
    buffer, at = all_to_all(in_one(pieces), sizes, [sizes[me]] * ranks, group).wait(), 0
    found = [_rows_of_all(of_ranks[me], ranks) for of_ranks in parts]
    for r in range(ranks):
        for made, of_ranks in zip(found, parts, strict=True):
            first = 0
            for like in of_ranks[me]:
                count, heads, rows = like.numel() * like.element_size(), like.shape[1], like.shape[2]
                room = made.narrow(1, r * heads, heads).narrow(2, first, rows)
                copy_into(room, taken(buffer, at, like))
                at, first = at + count, first + rows
    return found


def _rows_of_all(mine: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Room for these pieces of rows with the heads of all ranks."""
    batch, heads, _, width = mine[0].shape
    return mine[0].new_empty((batch, heads * ranks, sum(x.shape[2] for x in mine), width))
