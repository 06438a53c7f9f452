"""What ranks have to agree on before they exchange the first byte: compared once for each signature of a call.

No exchange follows where they differ, and each rank raises the same error. Without it gloo ends a process and NCCL
waits for its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import UnsupportedError
from .exchange import Group

T = TypeVar("T")

_settled: WeakKeyDictionary[Group, dict[tuple[Group | None, Hashable], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Groups:
    """The ranks of a call: ``inner`` alone, or with ``outer`` a grid, rank ``outer * size of inner + inner``."""

    inner: Group
    outer: Group | None = None

    @property
    def rank(self) -> int:
        """Of this process, among all."""
        return self.inner.rank() + (0 if self.outer is None else self.outer.rank() * self.inner.size())

    @property
    def size(self) -> int:
        """How many there are."""
        return self.inner.size() * (1 if self.outer is None else self.outer.size())

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has, in their order. Any Python objects, by torch's ``all_gather_object``."""
        found: list[Any] = [None] * self.inner.size()
        dist.all_gather_object(found, mine, group=self.inner)
        if self.outer is None:
            return found
        rows: list[Any] = [None] * self.outer.size()
        dist.all_gather_object(rows, found, group=self.outer)
        return [x for row in rows for x in row]


def settled(groups: Groups, signature: Hashable, ask: Callable[[], T], *, anew: bool = False) -> T:
    """What ``ask`` gave when a call of this signature first ran on these groups; with ``anew`` it is asked again."""
    held = _settled.setdefault(groups.inner, {})
    key = (groups.outer, signature)
    if anew or key not in held:
        held[key] = ask()
    found: T = held[key]
    return found


def known(groups: Groups) -> list[Any]:
    """What was settled on these groups, the oldest first."""
    return [found for (outer, _), found in _settled.get(groups.inner, {}).items() if outer == groups.outer]


def compare(groups: Groups, facts: Mapping[str, object], wrong: Sequence[str]) -> list[Mapping[str, object]]:
    """The facts of all ranks, once they are found to be equal but for those whose name begins with "local".

    Args:
        wrong: what this rank has against the call by itself; then it fails on all.

    Raises:
        UnsupportedError: the same on each rank, with what differs and which ranks have it.
    """
    told = groups.gather((dict(facts), list(wrong)))
    reasons = [f"rank {r}: {reason}" for r, (_, theirs) in enumerate(told) for reason in theirs]
    names = dict.fromkeys(name for theirs, _ in told for name in theirs if not name.startswith("local"))
    for name in () if reasons else names:
        held: dict[object, list[int]] = {}
        for rank, (theirs, _) in enumerate(told):
            held.setdefault(theirs.get(name), []).append(rank)
        if len(held) > 1:
            said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in held.items())
            reasons.append(f"ranks differ in {name}: {said}")
    if reasons:
        raise UnsupportedError(*reasons)
    return [theirs for theirs, _ in told]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
