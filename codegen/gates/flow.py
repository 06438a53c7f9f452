"""Natural loops of a function's control flow, from its branches. Positions are those of instructions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NaturalLoop:
    """body: positions in ascending order. path: those of the shortest way from its head back to it."""

    body: tuple[int, ...]
    path: tuple[int, ...]


def _blocks(size: int, targets: Mapping[int, int | None], no_fall: set[int]) -> tuple[list[range], list[list[int]]]:
    """Stretches that control enters at the first instruction and leaves at the last; and the successors of each."""
    starts = {0, *(t for t in targets.values() if t is not None and t < size)}
    starts |= {i + 1 for i in {*targets, *no_fall} if i + 1 < size}
    heads = sorted(starts)
    blocks = [range(a, b) for a, b in zip(heads, [*heads[1:], size], strict=True)]
    number = {block.start: i for i, block in enumerate(blocks)}
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1]
        after = [] if last in no_fall or i + 1 == len(blocks) else [i + 1]
        target = targets.get(last)
        successors.append(after + ([number[target]] if target is not None and target < size else []))
    return blocks, successors


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the set of blocks, as bits, that every way from the first to it goes through; 0 if unreachable."""
    everything = (1 << len(successors)) - 1
    before: list[list[int]] = [[] for _ in successors]
    for block, after in enumerate(successors):
        for other in after:
            before[other].append(block)
    reached, waiting = {0}, [0]
    while waiting:
        for other in successors[waiting.pop()]:
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    sets = [everything if block in reached else 0 for block in range(len(successors))]
    sets[0] = 1
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            common = everything
            for other in before[block]:
                if other in reached:
                    common &= sets[other]
            if (new := common | 1 << block) != sets[block]:
                sets[block], changed = new, True
    return sets


def _loops(successors: list[list[int]]) -> dict[int, set[int]]:
    """Head -> blocks of each natural loop; loops with one head are one."""
    dominators = _dominators(successors)
    before: list[list[int]] = [[] for _ in successors]
    for block, after in enumerate(successors):
        for other in after:
            before[other].append(block)
    loops: dict[int, set[int]] = {}
    for block, after in enumerate(successors):
        for head in after:
            if not dominators[block] >> head & 1:
                continue
            body = loops.setdefault(head, {head})
            waiting = [block]
            while waiting:
                here = waiting.pop()
                if here not in body:
                    body.add(here)
                    waiting += [b for b in before[here] if dominators[b]]
    return loops


def _way_round(head: int, body: set[int], blocks: list[range], successors: list[list[int]]) -> list[int]:
    """Blocks with the fewest instructions from the head until it comes again."""
    cost, came = {head: len(blocks[head])}, {head: head}
    waiting = deque([head])
    while waiting:
        here = waiting.popleft()
        for there in successors[here]:
            if there in body and there != head and cost[here] + len(blocks[there]) < cost.get(there, 1 << 60):
                cost[there], came[there] = cost[here] + len(blocks[there]), here
                waiting.append(there)
    last = min((b for b in cost if head in successors[b]), key=lambda b: cost[b])
    way = [last]
    while way[-1] != head:
        way.append(came[way[-1]])
    return way


def innermost(size: int, targets: Mapping[int, int | None], no_fall: set[int], wanted: set[int]) -> NaturalLoop | None:
    """The loop with most of the wanted instructions among those without a loop inside that has any; the shorter of two.

    size: instructions of the function. targets: position of a branch -> where it leads, None for elsewhere.
    no_fall: positions that control never leaves downwards.
    """
    blocks, successors = _blocks(size, targets, no_fall)
    found = {
        head: body for head, body in _loops(successors).items() if any(i in wanted for b in body for i in blocks[b])
    }
    inner = {h: body for h, body in found.items() if not any(other < body for other in found.values())}
    if not inner:
        return None

    def rank(head: int) -> tuple[int, int, int]:
        inside = [i for b in inner[head] for i in blocks[b]]
        return -sum(i in wanted for i in inside), len(inside), head

    head = min(inner, key=rank)
    return NaturalLoop(
        body=tuple(sorted(i for b in inner[head] for i in blocks[b])),
        path=tuple(sorted(i for b in _way_round(head, inner[head], blocks, successors) for i in blocks[b])),
    )
