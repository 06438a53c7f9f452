"""Exchanges of bytes between the ranks of a group. All are torch's; here they are counted.

Gloo takes tensors of a card in few of them. There they go through the CPU, which is for tests and for machines without
NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name


@dataclass
class Sent:
    """Bytes that this rank has sent to others."""

    bytes: int = 0


_counting: list[Sent] = []


@contextmanager
def count_sent() -> Iterator[Sent]:
    """Counts what this process sends to other ranks meanwhile, handshakes aside."""
    sent = Sent()
    _counting.append(sent)
    try:
        yield sent
    finally:
        _counting.remove(sent)


def _count(number: int) -> None:
    for sent in _counting:
        sent.bytes += number


class Pending:
    """An exchange under way."""

    def __init__(self, works: Sequence[Any], result: torch.Tensor, staged: torch.Tensor | None = None) -> None:
        self._works, self._result, self._staged = works, result, staged

    def wait(self) -> torch.Tensor:
        """What has arrived. On a card the stream waits and the host goes on."""
        for work in self._works:
            work.wait()
        if self._staged is not None:
            self._result.copy_(self._staged)
        return self._result


def _staged(x: torch.Tensor, group: Group) -> bool:
    return x.is_cuda and dist.get_backend(group) == "gloo"


def all_gather(mine: torch.Tensor, group: Group) -> Pending:
    """(ranks, n) of each rank's n bytes."""
    ranks = group.size()
    _count(mine.numel() * (ranks - 1))
    result = mine.new_empty((ranks, mine.numel()))
    if _staged(mine, group):
        host = torch.empty(result.shape, dtype=mine.dtype, device="cpu")
        works = [_all_gather(host.view(-1), mine.cpu(), group=group, async_op=True)]
        return Pending(works, result, host)
    return Pending([_all_gather(result.view(-1), mine, group=group, async_op=True)], result)


def all_to_all(parts: torch.Tensor, sizes: Sequence[int], received: Sequence[int], group: Group) -> Pending:
    """Elements for each rank one after the other, ``sizes`` of them, against ``received`` of each."""
    _count((parts.numel() - sizes[group.rank()]) * parts.element_size())
    result = parts.new_empty((sum(received),))
    given, host = parts, None
    if _staged(parts, group):
        given, host = parts.cpu(), torch.empty(result.shape, dtype=parts.dtype, device="cpu")
    into = result if host is None else host
    work = dist.all_to_all_single(into, given, list(received), list(sizes), group=group, async_op=True)
    return Pending([work], result, host)


def pass_on(mine: torch.Tensor, received: int, group: Group) -> Pending:
    """Send bytes to the next rank of the ring, and receive so many from the one before."""
    _count(mine.numel())
    rank, ranks = group.rank(), group.size()
    result = mine.new_empty((received,))
    given, host = mine, None
    if _staged(mine, group):
        given, host = mine.cpu(), torch.empty((received,), dtype=mine.dtype, device="cpu")
    into = result if host is None else host
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    exchange = [dist.P2POp(dist.isend, given, after, group), dist.P2POp(dist.irecv, into, before, group)]
    return Pending([*dist.batch_isend_irecv(exchange), _Kept(given)], result, host)


class _Kept:
    """Holds a tensor until the exchange that reads it is waited for."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def wait(self) -> None:
        """Nothing to wait for."""
