"""The lookup in a dispatch table, over whole tables and at every edge.

Regressions these catch: an axis read in the wrong order, a bucket bound taken as exclusive, a load whose bounds are
taken as exclusive, a value off the axes that is taken for another.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from pathlib import Path
from typing import Any

import pytest

from fp8cutlass.choose.problem import Problem
from fp8cutlass.choose.table import CLASS, Table
from fp8cutlass.errors import UnsupportedError

SMS = 58  # of the card in these problems: up to 116 query tiles are no heavy load
INT_MAX = 2**31 - 1

# Of each load, heads and queries.
QUERIES = {"few": (1, 64), "light": (1, 64 * SMS), "heavy": (1, 64 * 9 * SMS), "short": (5 * SMS, 64)}

# Neighbouring axes have different lengths, so that no two can be swapped unnoticed; `seqlen` has a bucket of a single
# length.
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """A table whose every cell holds another variant."""
    folder = tmp_path_factory.mktemp("small_table")
    (folder / "table.txt").write_text(small_text())
    return Table(folder)


def small_text() -> str:
    """The kernels of a class are called by their cells' numbers, in the order of the buckets and loads."""
    axes = dict(SMALL_AXES)
    axes["causal"], axes["seqlen"] = ["full", "causal"], [*axes["seqlen"][:-1], "-"]
    lines = ["format 2", *(f"axis {name} {' '.join(map(str, values))}" for name, values in axes.items())]
    lines.append("load rows=64 few=1/4 light=2/1 most=heavy short=short")
    cells = itertools.product(axes["seqlen"], axes["load"])
    letters = dict(zip(cells, string.ascii_letters, strict=False))
    for number, of in enumerate(itertools.product(*(axes[name] for name in CLASS))):
        lines += ["", f"class {' '.join(map(str, of))}"]
        lines += [f"{letter} {number * len(letters) + i}" for i, letter in enumerate(letters.values())]
        lines += [f"{s} {''.join(letters[s, load] for load in axes['load'])}" for s in axes["seqlen"]]
    return "\n".join(lines) + "\n"


def test_a_list_of_classes_that_answer_alike(tmp_path: Path) -> None:
    """One block for many classes, all values of an axis, the rows of another class, one kernel without rows."""
    head = small_text().partition("\n\n")[0]
    rows = ["1 aaaa", "64 abab", "65 bbbb", "128 bbbb", "- bbba"]
    blocks = [
        [f"class sm89 * * * * * {precision}", *kernels]
        for precision, kernels in (
            ("fast,high", ["a one", "b two", *rows]),
            ("accurate", ["a three", "b four", "as sm89 32 e4m3 bf16 tensor full fast"]),
            ("balanced", ["a five"]),
        )
    ] + [["class sm90a * * * * * *", "none RULE: not today"]]
    (tmp_path / "table.txt").write_text("\n\n".join([head, *map("\n".join, blocks)]) + "\n")
    table, there = Table(tmp_path), dataclasses.replace(PROBLEM, arch="sm89", batch=0, seqlen_k=64)
    assert (there.precision, table.load_of(there)) == ("fast", "few")
    for precision, few, light in (
        ("fast", "one", "two"),
        ("high", "one", "two"),
        ("accurate", "three", "four"),
        ("balanced", "five", "five"),
    ):
        for problem, wanted in ((there, few), (dataclasses.replace(there, batch=SMS, seqlen_q=128, heads=1), light)):
            assert table.lookup(dataclasses.replace(problem, precision=precision)).variant == wanted
    cell = table.lookup(PROBLEM)
    assert (cell.variant, cell.reason, cell.rivals) == (None, "RULE: not today", ())
    assert table.kernels == {"one", "two", "three", "four", "five"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nclass sm90a 256 e5m2 e4m3 token causal balanced\n", "\nclass sm90a 256 e5m2 e4m3 token full balanced\n"),
        ("\nclass sm89 32 e4m3 bf16 tensor full fast\n", "\nclass sm89 40 e4m3 bf16 tensor full fast\n"),
        ("\nclass sm89 32 e4m3 bf16 tensor full fast\n", "\nclass sm89 32 e4m3 bf16 tensor full\n"),
        ("\nclass sm89 32 e4m3 bf16 tensor full fast\n", "\nclasses sm89 32 e4m3 bf16 tensor full fast\n"),
        ("\n64 efgh\n65 ijkl\n", "\n64 efgh\n"),
        ("\n64 efgh\n", "\n64 efg\n"),
        ("\n64 efgh\n", "\n64 efgz\n"),
        ("\n64 efgh\n65 ijkl\n", "\n65 ijkl\n64 efgh\n"),
        ("\n1 abcd\n64 efgh\n65 ijkl\n128 mnop\n- qrst\n", "\nas sm89 32 e4m3 bf16 tensor full low\n"),
        ("\naxis load few light heavy short\n", "\n"),
        (" 64 65 128 -\n", " 64 65 128 256\n"),
        ("most=heavy", "many=heavy"),
    ],
)
def test_a_table_that_is_not_total_is_refused(old: str, new: str, tmp_path: Path) -> None:
    """A class that is missing, twice or off the axes, rows that are missing or too short: never an answer by chance."""
    text = small_text()
    assert old in text
    (tmp_path / "table.txt").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"table.txt is damaged \(.*install the package again, or in a checkout run"):
        Table(tmp_path)


def test_every_cell_of_a_table_of_distinct_variants(small: Table) -> None:
    """Each cell by the first and the last length of its bucket."""
    edges = ((0, 1), (2, 64), (65, 65), (66, 128), (129, INT_MAX))
    axes = dict(SMALL_AXES)
    names = (*CLASS, "seqlen", "load")
    for cell, of in enumerate(itertools.product(*(axes[name] for name in names))):
        point = dict(zip(names, of, strict=True))
        heads, queries = QUERIES[point.pop("load")]
        for seqlen_k in edges[axes["seqlen"].index(point["seqlen"])]:
            values = {**point, "seqlen_q": queries, "seqlen_k": seqlen_k, "batch": 1, "heads": heads, "sm_count": SMS}
            del values["seqlen"]
            assert small.lookup(Problem(**values)).variant == str(cell), values


PROBLEM = Problem(
    arch="sm90a",
    head_dim=64,
    seqlen_q=64,
    seqlen_k=64,
    batch=1,
    heads=8,
    dtype="e4m3",
    out="fp16",
    scaling="block",
    causal=True,
    precision="fast",
    sm_count=SMS,
)


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
def test_load(small: Table, batch: int, heads: int, seqlen_q: int, sm_count: int, load: str) -> None:
    problem = dataclasses.replace(PROBLEM, batch=batch, heads=heads, seqlen_q=seqlen_q, sm_count=sm_count)
    assert small.load_of(problem) == load


@pytest.mark.parametrize(
    "values",
    [
        {"arch": "sm120"},
        {"head_dim": 72},
        {"dtype": "e3m4"},
        {"out": "fp32"},
        {"scaling": "row"},
        {"causal": None},
        {"precision": "low"},
    ],
)
def test_values_outside_the_table(small: Table, values: dict[str, Any]) -> None:
    assert small.lookup(PROBLEM).variant is not None
    with pytest.raises(UnsupportedError, match=f"{next(iter(values))}=.* is not in the dispatch table"):
        small.lookup(dataclasses.replace(PROBLEM, **values))
