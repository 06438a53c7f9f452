"""The lookup in a dispatch table, over whole tables and at every edge.

Regressions these catch: an axis read in the wrong order, a bucket bound taken as exclusive, a load whose bounds are
taken as exclusive, a value off the axes that is taken for another.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from fp8cutlass.choose.dispatch import Table
from fp8cutlass.choose.problem import Problem
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
    count = 1
    for _, values in SMALL_AXES:
        count *= len(values)
    data = {
        "format": 1,
        "axes": SMALL_AXES,
        "load": {"rows": 64, "bounds": [["few", 1, 4], ["light", 2, 1]], "most": "heavy", "short": "short"},
        "cells": list(range(count)),
        "decisions": [{"variant": str(cell)} for cell in range(count)],
    }
    (folder / "dispatch.json").write_text(json.dumps(data))
    return Table(folder)


def test_every_cell_of_a_table_of_distinct_variants(small: Table) -> None:
    """Each cell by the first and the last length of its bucket."""
    edges = ((0, 1), (2, 64), (65, 65), (66, 128), (129, INT_MAX))
    positions = [range(len(values)) for _, values in SMALL_AXES]
    for cell, index in enumerate(itertools.product(*positions)):
        point = {name: values[i] for (name, values), i in zip(SMALL_AXES, index, strict=True)}
        heads, queries = QUERIES[point.pop("load")]
        for seqlen_k in edges[index[2]]:
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
