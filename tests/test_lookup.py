"""The dispatch lookup in C++ (csrc/lookup.cpp) against the one in Python, over whole tables and at every edge.

Regressions these catch: an axis read in the wrong order, a bucket bound taken as exclusive, a tile count that
overflows, a generated table that differs between its JSON and its C++ form.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8cutlass.dispatch import Problem, Table
from fp8cutlass.manifest import load_manifest

ROOT = Path(__file__).resolve().parent.parent
NOT_IN_TABLE = -(2**31)
INT_MAX = 2**31 - 1
SMS = 58  # of the card in these problems: up to 116 query tiles are no heavy load

Lookup = Callable[..., int]

# Heads and queries: tiles of 64 rows for a tenth of the SMs, for half of them to more than four each, and short ones.
QUERIES = [(1, 64 * (SMS // 10)), *((1, 64 * (k * SMS // 2)) for k in (1, 2, 4, 6, 8, 9)), (5 * SMS, 64)]

# Neighbouring axes have different lengths, so that no two can be swapped unnoticed, and the cells fit a short; `seqlen`
# has a bucket of a single length.
SMALL_AXES: list[tuple[str, list[Any]]] = [
    ("arch", ["sm89", "sm90a"]),
    ("head_dim", [32, 64, 96, 256]),
    ("seqlen", [1, 64, 65, 128, None]),
    ("dtype", ["e4m3", "e5m2"]),
    ("out", ["bf16", "fp16", "e4m3"]),
    ("scaling", ["tensor", "head", "block", "token"]),
    ("causal", [False, True]),
    ("precision", ["fast", "accurate", "high", "balanced"]),
    ("load", ["few", "light", "heavy", "short"]),
]


def compile_lookup(table_dir: Path, out_dir: Path) -> Lookup:
    """csrc/lookup.cpp built against `table_dir/dispatch_table.inc` with nothing but a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.fail("no C++ compiler: the extension could not be built either")
    library = out_dir / "lookup.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(table_dir)]
    subprocess.run([*command, str(ROOT / "csrc" / "lookup.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).fp8cutlass_lookup
    function.argtypes = [ctypes.c_int] * 12
    function.restype = ctypes.c_int
    return function


def position_arguments(axes: dict[str, list[Any]], problem: Problem) -> list[int]:
    """The arguments of fp8cutlass_lookup for a problem."""
    return [
        axes["arch"].index(problem.arch),
        problem.head_dim,
        problem.seqlen_k,
        axes["dtype"].index(problem.dtype),
        axes["out"].index(problem.out),
        axes["scaling"].index(problem.scaling),
        axes["causal"].index(problem.causal),
        axes["precision"].index(problem.precision),
        problem.batch,
        problem.heads,
        problem.seqlen_q,
        problem.sm_count,
    ]


def seqlen_edges(axes: dict[str, list[Any]]) -> list[int]:
    """First and last length of every bucket."""
    bounds = [bound for bound in axes["seqlen"] if bound is not None]
    return sorted({0, 1, INT_MAX, *bounds, *(bound + 1 for bound in bounds)})


def grid(axes: dict[str, list[Any]]) -> Iterator[Problem]:
    """Every cell of a table, each at the edges of its bucket of seqlen, with every number of tiles an SM that is some
    load's, and with short queries."""
    names = ("arch", "head_dim", "dtype", "out", "scaling", "causal", "precision")
    for values in itertools.product(*(axes[name] for name in names)):
        point = dict(zip(names, values, strict=True))
        for seqlen_k, (heads, queries) in itertools.product(seqlen_edges(axes), QUERIES):
            yield Problem(**point, seqlen_q=queries, seqlen_k=seqlen_k, batch=1, heads=heads, sm_count=SMS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, Lookup]:
    """A table whose every cell holds another variant, in both forms."""
    folder = tmp_path_factory.mktemp("small_table")
    axes = dict(SMALL_AXES)
    shape = [len(values) for values in axes.values()]
    count = 1
    for size in shape:
        count *= size
    data = {
        "format": 1,
        "axes": SMALL_AXES,
        "load": {"rows": 64, "bounds": [["few", 1, 4], ["light", 2, 1]], "most": "heavy", "short": "short"},
        "cells": list(range(count)),
        "decisions": [{"variant": str(cell)} for cell in range(count)],
    }
    (folder / "dispatch.json").write_text(json.dumps(data))

    def numbers(values: Any) -> str:
        return ", ".join(map(str, values))

    (folder / "dispatch_table.inc").write_text(
        f"""
        namespace fp8cutlass::table {{
        constexpr int kAxes = 9;
        constexpr int kShape[kAxes] = {{{numbers(shape)}}};
        constexpr int kHeadDims[] = {{{numbers(axes["head_dim"])}}};
        constexpr int kSeqlenBounds[] = {{{numbers(axes["seqlen"][:-1])}}};
        constexpr int kLoadRows = 64;
        constexpr int kLoadBounds[][2] = {{{{1, 4}}, {{2, 1}}}};
        constexpr short kCells[] = {{{numbers(range(count))}}};
        }}
        """
    )
    return Table(folder), compile_lookup(folder, folder)


def test_every_cell_of_a_table_of_distinct_variants(small: tuple[Table, Lookup]) -> None:
    table, lookup = small
    reached = set()
    for problem in grid(table.axes):
        number = lookup(*position_arguments(table.axes, problem))
        assert str(number) == table.lookup(problem).variant, problem
        reached.add(number)
    assert reached == set(range(len(table.cells)))


def test_generated_table(tmp_path: Path) -> None:
    folder = ROOT / "generated"
    table, manifest = Table(folder), load_manifest(folder)
    lookup = compile_lookup(folder, tmp_path)
    for problem in grid(table.axes):
        number = lookup(*position_arguments(table.axes, problem))
        expected = table.lookup(problem).variant
        got = manifest.variants[number].id if number >= 0 else None
        assert got == expected and number >= -1, problem


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "sm_count", "load"),
    [
        (1, 58, 128, SMS, "light"),
        (1, 59, 128, SMS, "heavy"),
        (1, 117, 65, SMS, "heavy"),
        (1, 39, 192, SMS, "heavy"),
        (1, 38, 192, SMS, "light"),
        (29, 2, 128, SMS, "light"),
        (29, 2, 129, SMS, "heavy"),
        (1, 1, 116 * 64, SMS, "light"),
        (1, 1, 116 * 64 + 1, SMS, "heavy"),
        (0, 8, 4096, SMS, "few"),
        (8, 8, 0, SMS, "few"),
        (1, 7, 128, SMS, "few"),
        (1, 8, 128, SMS, "light"),
        (1, 14, 64, SMS, "few"),
        (1, 15, 64, SMS, "short"),
        (1, 15, 65, SMS, "light"),
        (1, 1000, 64, SMS, "short"),
        (1, 1000, 1, SMS, "short"),
        (1, 8, 1, 32, "few"),
        (1, 8, 1, 31, "short"),
        (1, 1, 1, 0, "short"),
        (1, 1, 65, 0, "heavy"),
        (0, 0, 0, 0, "few"),
        (INT_MAX, INT_MAX, INT_MAX, INT_MAX, "heavy"),
        (65536, 65536, 1, INT_MAX, "short"),
        (65536, 65536, 65, INT_MAX, "heavy"),
        (65536, 8191, 1, INT_MAX, "few"),
    ],
)
def test_load(small: tuple[Table, Lookup], batch: int, heads: int, seqlen_q: int, sm_count: int, load: str) -> None:
    table, lookup = small
    problem = Problem(
        arch="sm90a",
        head_dim=64,
        seqlen_q=seqlen_q,
        seqlen_k=64,
        batch=batch,
        heads=heads,
        dtype="e4m3",
        out="fp16",
        scaling="block",
        causal=True,
        precision="fast",
        sm_count=sm_count,
    )
    assert table.load_of(problem) == load
    assert str(lookup(*position_arguments(table.axes, problem))) == table.lookup(problem).variant


LEGAL = (0, 64, 100, 0, 0, 0, 0, 0, 1, 8, 128, SMS)
ILLEGAL = [
    (0, (-1, 2)),  # arch
    (1, (0, 72, -64)),  # head_dim
    (2, (-1,)),  # seqlen_k
    (3, (-1, 2)),  # dtype
    (4, (-1, 3)),  # out
    (5, (-1, 4)),  # scaling
    (6, (-1, 2)),  # causal
    (7, (-1, 4)),  # precision
    (8, (-1,)),  # batch
    (9, (-1,)),  # heads
    (10, (-1,)),  # seqlen_q
    (11, (-1,)),  # sm_count
]


@pytest.mark.parametrize(("argument", "value"), [(i, value) for i, values in ILLEGAL for value in values])
def test_values_outside_the_table(small: tuple[Table, Lookup], argument: int, value: int) -> None:
    _, lookup = small
    assert lookup(*LEGAL) >= 0
    assert lookup(*LEGAL[:argument], value, *LEGAL[argument + 1 :]) == NOT_IN_TABLE
