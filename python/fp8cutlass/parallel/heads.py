"""Rows of all heads against all rows of some heads, and back: the two exchanges of Ulysses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Group, Pending, all_to_all


def to_heads(tensors: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]], group: Group) -> ToHeads:
    """Begin to send each rank its heads of tensors (B, H, S, D), whose ranks have ``lengths`` tokens of each."""
    ranks = group.size()
    parts = [part.contiguous().view(torch.uint8).flatten() for i in range(ranks) for part in _of(tensors, i, ranks)]
    widths = [x.shape[0] * x.shape[1] // ranks * x.shape[3] * x.element_size() for x in tensors]
    mine = sum(w * x.shape[2] for w, x in zip(widths, tensors, strict=True))
    received = [sum(w * n[r] for w, n in zip(widths, lengths, strict=True)) for r in range(ranks)]
    return ToHeads(all_to_all(torch.cat(parts), [mine] * ranks, received, group), tensors, lengths, ranks)


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


def from_heads(parts: Sequence[Sequence[torch.Tensor]], group: Group) -> list[torch.Tensor]:
    """Send each rank its rows: of each tensor the parts (B, H / ranks, S of the rank, D) for all ranks, against
    (B, H, S, D) of this rank's rows."""
    ranks, me = group.size(), group.rank()
    sent = [part[r].contiguous().view(torch.uint8).flatten() for r in range(ranks) for part in parts]
    sizes = [sum(part[r].numel() * part[r].element_size() for part in parts) for r in range(ranks)]
    mine = sizes[me]
    buffer, at = all_to_all(torch.cat(sent), sizes, [mine] * ranks, group).wait(), 0
    found: list[list[torch.Tensor]] = [[] for _ in parts]
    for _ in range(ranks):
        for made, part in zip(found, parts, strict=True):
            like = part[me]
            count = like.numel() * like.element_size()
            made.append(buffer.narrow(0, at, count).view(like.dtype).view(like.shape))
            at += count
    return [torch.cat(made, 1) for made in found]
