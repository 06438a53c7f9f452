"""Ranks that disagree, refuse, sleep or die: an error on every other rank within the timeout, and nothing hangs.

Regressions these catch: a check that one rank fails after the others have begun to exchange, a fact that is not
compared, an answer of the handshake that is taken for another call's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from fp8cutlass import parallel
from fp8cutlass.parallel import plan

RANKS = 3
ODD = 1  # the rank that does something else
PATIENCE = timedelta(seconds=6)
SIZES = (1, 4, 40, 32)
Make = Callable[..., dict[str, Any]]


def call(rank: int, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    q, k, v = (torch.randn(sizes, generator=torch.Generator().manual_seed(rank + i)).to(dtype) for i in range(3))
    grad = options.pop("grad", False)
    return parallel.attention(q.requires_grad_(grad), k, v, **options)


# What the odd rank says and what all others say, and a word of the error.
DISAGREE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": (
        {"sizes": (1, 8, 40, 32)},
        {},
        "ranks differ in query: (1, 4, S, 32) on ranks 0, 2, (1, 8, S, 32) on rank 1",
    ),
    "head_dim": ({"sizes": (1, 4, 40, 16)}, {}, "ranks differ in query"),
    "dtype": (
        {"dtype": torch.float16},
        {},
        "ranks differ in dtype: torch.bfloat16 on ranks 0, 2, torch.float16 on rank 1",
    ),
    "mask": ({"is_causal": True}, {}, "ranks differ in causal"),
    "method": ({"method": "ring"}, {"method": "gather"}, "ranks differ in method"),
    "precision": ({"precision": "accurate"}, {}, "ranks differ in precision"),
    "unequal zigzag": ({"sizes": (1, 4, 30, 32), "shards": "zigzag"}, {"shards": "zigzag"}, "shards='zigzag' has"),
    "gradient": ({"grad": True}, {}, "rank 1: query has requires_grad=True"),
    "refused": ({"head_groups": 0}, {}, "rank 1: head_groups must be None or an integer from 1 up, got 0"),
    "float32": ({"dtype": torch.float32}, {}, "rank 1: query has dtype torch.float32"),
    "head_dim beyond": ({"sizes": (1, 4, 40, 600)}, {}, "rank 1: head_dim must lie in"),
    "smooth_k": ({"smooth_k": True}, {"smooth_k": True}, "cannot serve smooth_k"),
    "scaling": ({"scaling": "token"}, {"scaling": "token"}, "needs scaling='block'"),
    "ulysses": (
        {"method": "ulysses"},
        {"method": "ulysses"},
        "query has 4 heads, which the 3 ranks of ulysses must divide",
    ),
}


def work(rank: int, odd_one: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i, (name, (odd, others, _)) in enumerate(DISAGREE.items()):
        new = {"scale": 0.1 + i}  # a signature that no rank knows
        found[name] = ranks.error_of(partial(call, rank, **(odd if rank == ODD else others), **new))
        found[f"after {name}"] = ranks.error_of(partial(call, rank))
    if rank == ODD:
        plan.__version__ = "0.0.0"
    found["version"] = ranks.error_of(lambda: call(rank, scale=0.5))
    found["always"] = ranks.error_of(
        partial(call, rank, (1, 4, 40 + rank, 32) if rank == ODD else SIZES, agree="always")
    )
    slow = dist.new_group(range(RANKS), timeout=PATIENCE)
    begun = time.monotonic()
    if rank != ODD:
        found["asleep"] = ranks.error_of(lambda: call(rank, group=slow))
        found["waited"] = time.monotonic() - begun
        found["dead"] = ranks.error_of(lambda: call(rank))  # it wakes up during this, and ends
        return found
    torch.save(found, odd_one)
    time.sleep(1.5 * PATIENCE.total_seconds())
    os._exit(9)


pytestmark = pytest.mark.xdist_group("faults")  # one process starts the ranks, and waits for them


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("faults")
    odd_one = str(folder / "odd")
    found = ranks.run(RANKS, work, folder, odd_one)
    assert found[ODD] == 9, found
    found[ODD] = torch.load(odd_one, weights_only=False)
    assert all(isinstance(x, dict) for x in found), found
    return found


@pytest.mark.parametrize("name", DISAGREE)
def test_all_ranks_raise_one_error(outcomes: list[dict[str, Any]], name: str) -> None:
    errors = {of_rank[name] for of_rank in outcomes}
    assert len(errors) == 1
    [(kind, text)] = errors
    assert kind == "UnsupportedError" and DISAGREE[name][2] in text
    assert [of_rank[f"after {name}"] for of_rank in outcomes] == [("", "")] * RANKS  # the group is as it was


def test_versions_are_compared(outcomes: list[dict[str, Any]]) -> None:
    [(kind, text)] = {of_rank["version"] for of_rank in outcomes}
    assert kind == "UnsupportedError" and "ranks differ in version" in text and "0.0.0 on rank 1" in text


def test_a_known_call_is_compared_again_if_asked(outcomes: list[dict[str, Any]]) -> None:
    [(kind, text)] = {of_rank["always"] for of_rank in outcomes}
    assert kind == "UnsupportedError" and "ranks differ in version" in text


@pytest.mark.parametrize("what", ["asleep", "dead"])
def test_a_missing_rank_is_an_error_within_the_timeout(outcomes: list[dict[str, Any]], what: str) -> None:
    for rank, of_rank in enumerate(outcomes):
        if rank != ODD:
            assert of_rank[what][0] in ("RuntimeError", "DistBackendError"), of_rank[what]
    waited = max(x["waited"] for r, x in enumerate(outcomes) if r != ODD)
    assert waited < 3 * PATIENCE.total_seconds()
