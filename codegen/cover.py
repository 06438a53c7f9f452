"""Small sets of kernels in which everything occurs that occurs in any: what is shown of them, and what is compiled.

What a kernel is made of is read from its text, so that no list of conditions has to follow the templates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from heapq import heapify, heapreplace
from pathlib import PurePosixPath
from typing import TypeVar

Part = TypeVar("Part")

SHOWN = "shown"  # folder of the kernels that a checkout shows
_NUMBER = re.compile(r"(?<![A-WYZa-wyz\d])\d+(?:,\d{3})*")  # not a part of a type: bf16, E4M3, F32; but 64x128


def cover(parts: Mapping[str, frozenset[Part]], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names, sorted, of few sets that together hold every part of any. Greedy: the most new parts first, of equals the
    first name; then without those that the others make needless. `given` names are there already, and stay."""
    missing = set().union(*parts.values()).difference(*(parts[name] for name in given))
    chosen = list(given)
    # What a set would add only shrinks, so that the first of the queue is the best once its number is that of now.
    queue = [(-len(of & missing), name) for name, of in parts.items()]
    heapify(queue)
    while missing:
        then, name = queue[0]
        now = -len(parts[name] & missing)
        if now != then:
            heapreplace(queue, (now, name))
            continue
        chosen.append(name)
        missing -= parts[name]
    times = Counter(part for name in chosen for part in parts[name])
    for name in chosen[len(given) :]:
        if all(times[part] > 1 for part in parts[name]):
            chosen.remove(name)
            times.subtract(parts[name])
    return tuple(sorted(chosen))


def kinds_of_lines(text: str, name: str) -> frozenset[str]:
    """The lines of a kernel but for its name, its numbers, its indentation and the rule behind a heading."""
    return frozenset(map(_kind, text.replace(name, "@").splitlines()))


@cache  # the same few thousand lines make all kernels
def _kind(line: str) -> str:
    return _NUMBER.sub("#", line.strip().rstrip("- "))


def committed(files: Mapping[str, str]) -> dict[str, str]:
    """What a checkout holds of all files of a generation: the lists, which have the digest of every kernel, and so many
    whole kernels that every kind of line of every kernel is in one."""
    kernels = {path: text for path, text in files.items() if path.endswith(".cu")}
    lines = {path: kinds_of_lines(text, PurePosixPath(path).stem) for path, text in kernels.items()}
    lists = {path: text for path, text in files.items() if path not in kernels}
    return lists | {f"{SHOWN}/{PurePosixPath(path).name}": kernels[path] for path in cover(lines)}
