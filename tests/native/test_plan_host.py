"""The kernel that plans a ragged batch, on the host, against a list that is made by loops.

Regressions these catch: a sequence that is left out or listed twice where there are more of them than threads; row
tiles of another sequence; rows in another order; a list that is longer than its memory; short sequences ahead of long
ones; a barrier that is missing.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path

import pytest
import torch
from compilers import ROOT, host_library

_P, _I = ctypes.c_void_p, ctypes.c_int32
THREADS, BUCKET_KEYS = 1024, 64
TILE_M, KEY_BLOCK = 128, 192


class _Params(ctypes.Structure):
    """planning::PlanParams"""

    _fields_ = [
        ("tiles", _P), ("count", _P), ("most", _I), ("cu_q", _P), ("cu_k", _P), ("used_q", _P), ("used_k", _P),
        *((name, _I) for name in ("sequences", "key_tokens", "keys_in_blocks", "bottom_right", "q_descale_sequence")),
        *((name, _I) for name in ("k_descale_sequence", "v_descale_sequence", "early", "total_q", "tile_m")),
        ("key_block", _I),
    ]  # fmt: skip


class Plan:
    """``edits`` replace texts in the kernel's header."""

    def __init__(self, folder: Path, edits: Sequence[tuple[str, str]] = ()) -> None:
        for name in ("walk/plan.cuh", "walk/plan_params.h", "walk/lengths.cuh", "params.h"):
            path = folder / "include" / "fp8cutlass" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (ROOT / "include" / "fp8cutlass" / name).read_text()
            for old, new in edits if name == "walk/plan.cuh" else ():
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            path.write_text(text)
        self.library = host_library("plan_host.cpp", folder, folder / "include")
        self.library.run.restype = ctypes.c_char_p
        assert self.library.params_bytes() == ctypes.sizeof(_Params), "planning::PlanParams has changed"

    def run(self, rows: Sequence[int], keys: Sequence[int], most: int, in_blocks: bool, seed: int) -> list[list[int]]:
        """The list, an entry a row: sequence, row, rows, keys, query, key, block."""
        ends = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (rows, keys)]
        tiles = torch.full((most + 1, 8), -77, dtype=torch.int32)
        count = torch.full((1,), -1, dtype=torch.int32)
        params = _Params(
            tiles.data_ptr(), count.data_ptr(), most, ends[0].data_ptr(), ends[1].data_ptr(), None, None, len(rows),
            int(ends[1][-1]), int(in_blocks), 1, 0, 0, 0, 0, int(ends[0][-1]), TILE_M, KEY_BLOCK,
        )  # fmt: skip
        failure = self.library.run(ctypes.byref(params), seed)
        assert failure is None, failure
        assert tiles[most].tolist() == [-77] * 8, "behind the list"
        found: list[list[int]] = tiles[: int(count), :7].tolist()
        return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan(tmp_path_factory.mktemp("plan"))


def wrong(found: list[list[int]], rows: Sequence[int], keys: Sequence[int], in_blocks: bool) -> list[str]:
    """Everything in which a whole list is not what it should be."""
    query, key = ([0, *accumulate(x)] for x in (rows, keys))
    said = []
    listed = [(s, [entry[1:] for entry in entries]) for s, entries in groupby(found, key=lambda entry: entry[0])]
    if sorted(s for s, _ in listed) != [s for s, n in enumerate(rows) if n]:
        said.append("sequences are left out, or not listed in one piece")
        return said
    for s, entries in listed:
        block = key[s] // KEY_BLOCK + s
        first = block * KEY_BLOCK if in_blocks else key[s]
        of = [rows[s], keys[s], query[s], first, block]
        if entries != [[row, *of] for row in reversed(range(0, rows[s], TILE_M))]:
            said.append(f"sequence {s}: {entries}")
    buckets = [min(keys[s] // BUCKET_KEYS, THREADS - 1) for s, _ in listed]
    return said if buckets == sorted(buckets, reverse=True) else [*said, "a short one is ahead of a long one"]


def lengths(count: int, most: int, seed: int) -> tuple[list[int], list[int]]:
    drawn = random.Random(seed)
    return [max(0, drawn.randint(-2, most)) for _ in range(count)], [drawn.randint(0, most) for _ in range(count)]


def tiles_of(rows: Sequence[int]) -> int:
    return sum(-(-n // TILE_M) for n in rows)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    ("count", "most"),
    [(1, 700), (8, 4096), (32, 500), (33, 500), (THREADS, 140), (THREADS + 1, 140), (2 * THREADS + 452, 300)],
)
def test_every_sequence_is_listed_once(plan: Plan, count: int, most: int, in_blocks: bool) -> None:
    rows, keys = lengths(count, most, count)
    found = plan.run(rows, keys, tiles_of(rows), in_blocks, seed=count)
    assert not wrong(found, rows, keys, in_blocks)


@pytest.mark.parametrize("count", [20, THREADS + 300])
def test_a_list_ends_where_its_memory_does(plan: Plan, count: int) -> None:
    rows, keys = lengths(count, 600, 1)
    whole = plan.run(rows, keys, tiles_of(rows), False, seed=1)
    found = plan.run(rows, keys, tiles_of(rows) // 2, False, seed=1)
    assert len(found) == tiles_of(rows) // 2
    assert all(entry in whole for entry in found)


EDITS = {
    "the first sequences again": ("list_tiles(p, base + i,", "list_tiles(p, i,"),
    "rows from the first on": ("entry.row = (tiles - 1 - t) * p.tile_m;", "entry.row = t * p.tile_m;"),
    "only the first thousand": (
        "if (base > 0 && number < p.batch.sequences) own = sequence_at(p, number);",
        "if (base > kThreads && number < p.batch.sequences) own = sequence_at(p, number);",
    ),
    "no barrier before the list": (
        "Count(p.batch.most)));\n    __syncthreads();\n    const int end",
        "Count(p.batch.most)));\n    const int end",
    ),
    "the shortest first": ("return kBuckets - 1 - min(", "return min("),
}


OF_FEW = {
    "the first one again": ("list_tiles(p, warp, sequence,", "list_tiles(p, 0, sequence,"),
    "two at one place": ("(of == bucket && s < lane)", "(of == bucket && s + 1 < lane)"),
    "the shortest of few first": ("if (of < bucket ||", "if (of > bucket ||"),
}


@pytest.mark.parametrize("edit", [*EDITS, *OF_FEW])
def test_a_broken_plan_is_noticed(edit: str, tmp_path: Path) -> None:
    broken = Plan(tmp_path, [(EDITS | OF_FEW)[edit]])
    rows, keys = lengths(32 if edit in OF_FEW else 2 * THREADS + 452, 300, 7)
    assert wrong(broken.run(rows, keys, tiles_of(rows), False, seed=3), rows, keys, False)
