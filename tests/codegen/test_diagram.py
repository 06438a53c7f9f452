"""The picture of its pipeline that a kernel opens with, against the kernel below it.

Regressions these catch: a barrier or a buffer that the picture does not have, or has of another kernel; a number of
slots, rows or keys that is not the kernel's; a line that nobody can read whole.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from codegen.render import environment, render_kernel
from codegen.select import select
from codegen.variant import Variant

MOST_LINES = 18  # some 12 of the picture, and what a tile and a phase are
WIDTH = 120


@cache
def rendered(family: str) -> list[tuple[Variant, str, str]]:
    """Kernels with their pictures and the code below."""
    env = environment()
    found = []
    for v in select().emitted:
        if v.family == family:
            head, code = render_kernel(v, env).split("\n\n", 1)
            found.append((v, head[head.index("// An item is ") :], code))
    return found


def numbers(code: str, name: str) -> int:
    """What a constant of the kernel is."""
    found = re.search(rf"\b{name} = (\d+)[;,]", code)
    assert found is not None, name
    return int(found[1])


@pytest.mark.parametrize("family", ["sm89", "sm90a"])
def test_a_picture_can_be_read(family: str) -> None:
    for v, picture, code in rendered(family):
        lines = picture.splitlines()
        assert all(line.startswith("//") and len(line) <= WIDTH and line == line.rstrip() for line in lines), v.id
        assert len(lines) <= MOST_LINES and code.lstrip().startswith("#"), v.id
        rows, keys = re.search(r"An item is (\d+) query rows .* tiles of (\d+) keys", picture).groups()
        assert (int(rows), int(keys)) == (numbers(code, "kTileM"), numbers(code, "kTileN")), v.id


def test_every_barrier_is_in_the_picture_of_sm90a() -> None:
    for v, picture, code in rendered("sm90a"):
        declared = set()
        for names in re.findall(r"^    sm90::Barrier (.*);", code, re.M):
            declared |= {re.sub(r"\[.*", "", name) for name in names.split(", ")}
        assert set(re.findall(r"\b(?:\w+_full|\w+_empty)\b", picture)) == declared, v.id
        assert ("wait_turn" in picture) == ("sm90::wait_turn(" in code), v.id
        assert ("cluster" in picture) == ("sm90::merge<" in code), v.id
        assert ("fetchers" in picture) == ("fetch_queries(params" in code), v.id
        assert ("plan" in picture) == ("Ragged<kMask>" in code), v.id


def test_the_slots_of_the_picture_are_those_of_sm90a() -> None:
    for v, picture, code in rendered("sm90a"):
        drawn = {name: int(number) for name, number in re.findall(r"\b(q|k|v|items|slope)\[(\d+)\]", picture)}
        names = {"q": "kQBuffers", "k": "kKeySlots", "v": "kValueSlots", "items": "kItemSlots", "slope": "kItemSlots"}
        assert drawn == {short: numbers(code, name) for short, name in names.items()}, v.id
        threads = re.search(r"(\d+) threads", picture)
        assert threads is not None and int(threads[1]) == numbers(code, "kThreads"), v.id
        assert ("half a tile" in picture) == (numbers(code, "kSlotKeys") < v.tile_n), v.id


def test_the_slots_of_the_picture_are_those_of_sm89() -> None:
    for v, picture, code in rendered("sm89"):
        drawn = {name: int(number) for name, number in re.findall(r"\b(k|v|work)\[(\d+)\]", picture)}
        stages = numbers(code, "kStages")
        assert drawn == {"k": stages, "v": stages, "work": 2}, v.id
        waits = set(re.findall(r"wait<(\d+)>", picture))
        assert waits == {"1" if stages == 1 else str(stages - 2)}, v.id
        assert ("k_descale" in picture) == ("float k_descale[" in code), v.id
        assert (": rows" in picture) == ("RowState rows[kThreads]" in code), v.id
        assert ("registers" in picture) == ("uint32_t q[kFrags]" in code), v.id
