"""The fuzzer of calls over pages: all is drawn, and it finds what is planted into decode and append.

Regressions these catch: a fuzzer that draws one kind of cache, judges nothing, or passes a fault of one element.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
import torch
from fuzz_cases import CELLS, VALUES
from fuzz_paged import CACHES, DESCALES, KERNEL_DIMS, PAGE_SIZES, PagedCase, draw_paged
from fuzz_paged_check import run_paged_case
from fuzz_pages import paged_inputs
from test_kvcache_mutants import APPENDS, MUTANTS

from fp8cutlass.cache import write
from fp8cutlass.call import kvcache
from tests import fuzz

CASES, CELLS_OF_A_FAULT = 30, 1 << 13


def test_cases_of_every_kind_are_drawn() -> None:
    """Caches, pages, groups, queries, masks, appends, garbage; the same for a number, within the bound on the work."""
    cases = [draw_paged(1, number, CELLS["cuda"]) for number in range(800)]
    assert draw_paged(1, 7, 1 << 16) == draw_paged(1, 7, 1 << 16) != draw_paged(2, 7, 1 << 16)
    assert {c.cache for c in cases} == set(CACHES) and {c.descales for c in cases} == set(DESCALES)
    assert {c.page_size for c in cases if c.cache != "rows"} == set(PAGE_SIZES)
    assert {c.heads // c.kv_heads for c in cases} == {1, 2, 4, 5, 8, 16} and {c.source for c in cases} == {
        "bf16",
        "fp16",
    }
    assert {value for c in cases for value in c.values} == set(VALUES) and {c.splits for c in cases} >= {0, 1, 2, 32}

    def drawn(holds: Callable[[PagedCase], bool]) -> int:
        return sum(map(holds, cases))

    assert {n for c in cases for n in c.rows} >= {*range(17), 40, 70}
    assert drawn(lambda c: set(c.rows) == {1}) > 200 and drawn(lambda c: c.dense) > 100
    assert drawn(lambda c: 0 in c.keys) > 100 and drawn(lambda c: max(c.keys) > 2000) > 60
    assert drawn(lambda c: c.new is not None and sum(c.new) > 0) > 150 and drawn(lambda c: c.window[0] >= 0) > 100
    assert (
        drawn(lambda c: c.softcap > 0) > 100 and drawn(lambda c: c.sinks) > 100 and drawn(lambda c: not c.causal) > 100
    )
    assert drawn(lambda c: c.poisoned >= 0) > 100 and drawn(lambda c: c.before > 0) > 60 < drawn(lambda c: c.behind > 0)
    assert drawn(lambda c: c.head_dim in KERNEL_DIMS) > 600 > drawn(lambda c: c.head_dim not in KERNEL_DIMS) > 30
    assert all(c.heads * sum(m * n for m, n in zip(c.rows, c.keys, strict=True)) <= CELLS["cuda"] for c in cases)


def test_what_is_not_to_be_read_is_nan() -> None:
    """Else a fault that reads it would pass."""
    for number in range(40):
        case = draw_paged(3, number, 1 << 14)
        given = paged_inputs(case)
        elements = 2 * sum(case.old) * case.kv_heads * case.head_dim
        clean = sum(int((x != 0xFF).sum()) for x in given.raw)
        assert clean <= elements + (4 * (sum(case.old) + len(case.old) * 20) * 2 * case.kv_heads)
        assert sum(x.numel() for x in given.raw) > clean
        used = [-(-n // case.page_size) for n in case.keys]
        ends = [row[n:].tolist() for row, n in zip(given.table, used, strict=True)]
        assert case.cache == "rows" or all(page < 0 or page > 2**20 for end in ends for page in end)


NOTICED = (
    "window one key narrower", "last key dropped", "page table off by one", "K descale of the other head",
    "V descale of the other head", "softcap in octaves", "splits overlap", "heads grouped across", "P in bf16",
)  # fmt: skip


def found(wanted: Callable[[PagedCase], bool] = lambda case: True, cases: int = CASES) -> list[str]:
    """What the gates say of the first cases that are wanted; an error that is raised is none of theirs."""
    drawn = filter(wanted, (draw_paged(1, number, CELLS_OF_A_FAULT) for number in count()))
    verdicts = [run_paged_case(case, "cpu") for case in islice(drawn, cases)]
    return [x for verdict in verdicts for x in verdict.details if not x.startswith("raised")]


WANTED: dict[str, Callable[[PagedCase], bool]] = {
    "softcap in octaves": lambda c: c.softcap > 0,
    "descale that does not grow": lambda c: c.cache == "native pow2",
}


def test_the_cases_that_faults_are_planted_into_pass() -> None:
    assert [found(), *(found(wanted, 10) for wanted in WANTED.values())] == [[], [], []]


@pytest.mark.parametrize("name", NOTICED)
def test_a_broken_decode_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name][0](monkeypatch)
    assert len(found(WANTED[name], 10) if name in WANTED else found()) >= 2


@pytest.mark.parametrize("name", APPENDS)
def test_a_broken_append_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is not what was given, or not in its place."""
    function, mutant = APPENDS[name]
    monkeypatch.setattr(write, function, mutant(getattr(write, function)))
    assert len(found(WANTED.get(name, lambda case: True), 10)) >= 2


def stale_key(clean: Callable[..., Any]) -> Callable[..., Any]:
    """One key past the end of a sequence is seen by it where its page has one."""

    def gathered(call: kvcache.KVCall, s: int, table: torch.Tensor, keys: int) -> Any:
        return clean(call, s, table, keys + 1 if keys % call.k.shape[1] else keys)

    return gathered


def test_garbage_that_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache, "gathered", stale_key(kvcache.gathered))
    said = found()
    assert any("other bytes in free slots" in x for x in said) and any("no number" in x for x in said)


def test_a_sequence_that_reaches_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = kvcache.run

    def mutant(call: kvcache.KVCall) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = clean(call)
        return out + 0 * out.sum(0, keepdim=True), lse

    monkeypatch.setattr("fp8cutlass.api.kvcache.run", mutant)
    assert any("of NaN changes another one" in x for x in found())


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_calls_over_pages_on_a_card(first: int) -> None:
    ran = fuzz.fuzz("cuda", 11, first=first, cases=50, only=fuzz.KVCACHE, say=lambda text: None)
    assert ran.failures == [] and ran.statuses["passed"] >= 10
