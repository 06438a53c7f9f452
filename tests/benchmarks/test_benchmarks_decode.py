"""The benchmark of decode without a card: its operands, what counts as a result, and what each contender is given.

Regressions these catch: a wrong result that looks fast; a contender that gets other pages, lengths, masks or descales
than ours; cold launches that read what the one before has read; a peer that is missing and ends the run.

The card's part is replaced: times are made up, our kernels are emulated, and peers are what their packages document.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode, turns
from benchmarks.decode import SMALL_PAGE, DecodeData, Turns, Way, make, measure
from benchmarks.decode_commands import problems, sources_of
from benchmarks.grid import QUICK
from benchmarks.peers import flashinfer, paged, paged_own
from benchmarks.peers.fa3 import MODULE
from benchmarks.results import FAILED, OK, UNAVAILABLE, WRONG
from benchmarks.steps import PAGE, SKEWED, STEPS, Step, wanted
from fp8cutlass import timing
from fp8cutlass.call import kvcache
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir

STEP = Step("uneven", (130, 40), 8, 2, 64, 2)
ONE = replace(STEP, queries=1)


def over_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: list[torch.Tensor], lengths: list[int], scale: float
) -> torch.Tensor:
    """Causal attention in float32 of (sequences, queries, H, D) over pages (n, page, Hkv, D), by plain indexing."""
    out = torch.zeros(q.shape)
    for s, keys in enumerate(lengths):
        for row in range(q.shape[1]):
            seen = keys - q.shape[1] + row + 1
            kk, vv = (x[pages[s].long()].flatten(0, 1)[:seen].float() for x in (k, v))
            for head in range(q.shape[2]):
                of = head // (q.shape[2] // k.shape[2])
                p = (kk[:, of] @ q[s, row, head].float() * scale).softmax(0)
                out[s, row, head] = p @ vv[:, of]
    return out.bfloat16()


def attended(data: DecodeData, table: torch.Tensor, page: int = PAGE) -> torch.Tensor:
    """The step in float32 from its FP8 cache."""
    step = data.step
    pages = [row[: -(-n // page)] for row, n in zip(table, step.lengths, strict=True)]
    k, v = ((x.float() * data.descale).view(-1, page, *x.shape[2:]) for x in (data.k8, data.v8))
    q = data.q.view(len(pages), step.queries, *data.q.shape[1:])
    return over_pages(q, k, v, pages, list(step.lengths), data.scale).view(data.q.shape)


def test_a_right_result_counts_and_a_wrong_one_does_not() -> None:
    data = make(STEP, cold=False, device="cpu")
    out = attended(data, data.tables[0])
    assert 0.01 < data.error(out, data.tables[0]) < 0.06
    assert data.error(out.flip(0), data.tables[0]) > 0.5
    table = data.small_tables[0]
    assert data.error(attended(data, table, SMALL_PAGE), table, SMALL_PAGE) < 0.06 < data.error(out, table, SMALL_PAGE)
    out[0, 0, 0] = math.nan
    assert data.error(out, data.tables[0]) == math.inf


def test_cold_launches_take_turns_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is in two tables, and each copy is another cache."""
    monkeypatch.setattr(decode, "COLD_BYTES", 4 * STEP.bytes_of(1))
    data = make(STEP, cold=True, device="cpu")
    pages = [int(p) for table in data.tables for row, n in zip(table, (3, 1), strict=True) for p in row[:n]]
    assert len(data.tables) == 4 and sorted(pages) == list(range(16))
    pages = [int(p) for table in data.small_tables for row, n in zip(table, (9, 3), strict=True) for p in row[:n]]
    assert len(pages) == len(set(pages)) == 48 and max(pages) < 64
    asked: list[int] = []

    def launch(table: torch.Tensor) -> torch.Tensor:
        asked.append(table.data_ptr())
        return table

    taken = Turns(Way("x", "fp8", launch, 1), data.tables)
    for _ in range(5):
        taken()
    assert asked == [data.tables[i].data_ptr() for i in (0, 1, 2, 3, 0)]
    assert taken.table.data_ptr() == data.tables[0].data_ptr()
    out = attended(data, data.tables[2])
    assert data.error(out, data.tables[2]) < 0.06 < data.error(out, data.tables[1])


def test_bytes_are_those_of_k_and_v() -> None:
    assert STEP.bytes_of(1) == 2 * 170 * 2 * 64 and STEP.bytes_of(2) == 2 * STEP.bytes_of(1)


def test_the_steps_hold_what_is_compared_and_a_text_chooses_among_them() -> None:
    by_name = {step.name: step for step in STEPS}
    for skewed, as_even in SKEWED.items():
        assert sum(by_name[skewed].lengths) == sum(by_name[as_even].lengths)
        assert len(set(by_name[as_even].lengths)) == 1
    assert len({step.label for step in STEPS}) == len(STEPS) and wanted([]) == list(STEPS)
    assert [step.name for step in wanted(["8 x 32768"])] == ["8 x 32768"] and wanted(["no such step"]) == []
    assert {step.queries for step in wanted(["queries"])} == {4, 16}
    both = problems(STEPS, "both")
    assert [cold for _, cold in both] == sorted((cold for _, cold in both), reverse=True), "hot ones come last"
    assert {cold for _, cold in problems(STEPS, "hot")} == {False} and len(problems(STEPS, "cold")) == len(STEPS)


class Replay:
    """A graph that runs its launch and writes what it gives where the first one lies."""

    def __init__(self, launch: Callable[[], torch.Tensor]) -> None:
        self._launch, self.out = launch, launch()

    def replay(self) -> None:
        self.out.copy_(self._launch())


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """What FlashAttention-3 computes, and what it asks for."""
    lengths = options["cache_seqlens"]
    assert q.shape[0] == k.shape[0] == len(lengths) and lengths.dtype == torch.int32 and options["causal"]
    if q.dtype == torch.float8_e4m3fn:
        names = ("q_descale", "k_descale", "v_descale")
        assert all(options[n].shape == (len(lengths), k.shape[2]) for n in names)
        q, k, v = (x.float() * options[n][0, 0] for x, n in zip((q, k, v), names, strict=True))
    assert options.get("scheduler_metadata", "planned") == "planned"
    used = list(torch.arange(len(lengths))[:, None])  # a sequence's keys lie together, as in one page
    return over_pages(q, k, v, used, lengths.tolist(), options["softmax_scale"])


def planned(
    batch: int, queries: int, most: int, heads: int, kv_heads: int, head_dim: int, lengths: Any, **_: Any
) -> str:
    assert most >= int(lengths.max()) and batch == len(lengths) and heads % kv_heads == 0 and queries and head_dim
    return "planned"


class Wrapper:
    """FlashInfer's, which is planned by lengths and reads page numbers where it keeps them."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD" and backend in ("fa2", "fa3") and workspace.dtype == torch.uint8

    def plan(
        self, ends_q: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, heads: int,
        kv_heads: int, head_dim: int, page: int, **options: Any,
    ) -> None:  # fmt: skip
        assert all(x.dtype == torch.int32 for x in (ends_q, ends, pages, last)) and len(pages) == int(ends[-1])
        self.queries = int(ends_q[1])
        assert options["causal"] == (self.queries > 1) and options["q_data_type"] == torch.bfloat16
        self.lengths = [(int(n) - 1) * page + int(of) for n, of in zip(ends.diff(), last, strict=True)]
        self.ends, self.scale, self.dtype = ends.tolist(), options["sm_scale"], options["kv_data_type"]
        self._paged_kv_indices_buf = pages

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], k_scale: float = 1.0) -> torch.Tensor:
        k, v = cache
        assert k.dtype == v.dtype == self.dtype
        pages = [self._paged_kv_indices_buf[a:b] for a, b in zip(self.ends, self.ends[1:], strict=False)]
        q4 = q.view(len(pages), self.queries, *q.shape[1:])
        return over_pages(q4, k.float() * k_scale, v, pages, self.lengths, self.scale).view(q.shape)


def xqa(
    q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], workspace: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, most: int, bmm1_scale: float, bmm2_scale: float,
) -> torch.Tensor:  # fmt: skip
    assert lengths.dtype == torch.uint32 and most == table.shape[1] * PAGE and not workspace.any()
    counts = lengths.view(torch.int32).tolist()
    used = [row[: -(-n // PAGE)] for row, n in zip(table, counts, strict=True)]
    return over_pages(q[:, None], cache[0], cache[1].float() * bmm2_scale, used, counts, bmm1_scale)[:, 0]


def emulated(
    work: Any, q: torch.Tensor, caches: Any, table: torch.Tensor, used: torch.Tensor, cu_q: torch.Tensor, *,
    scale: float, left: int, right: int,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Our kernel by its specification."""
    if caches.k_token is None:
        descales = tuple(x.expand(len(used), caches.k.shape[2]) for x in (caches.k_descale, caches.v_descale))
    else:
        descales = (caches.k_token, caches.v_page)
    rest = (None, None, scale, left, right, 0.0, 0, False, False)
    return kvcache.run(kvcache.KVCall(q, caches.k, caches.v, *descales, table, used, cu_q, *rest))[0], None


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Target(generated_dir(), "sm90a", 132)

    def capture(launch: Callable[[], torch.Tensor], target_us: float) -> timing.Capture:
        graph = Replay(launch)
        return timing.Capture(graph, 2, graph.out, launch, 10.0)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns, "capture", capture)
    monkeypatch.setattr(
        turns, "interleave", lambda found, *_: [timing.summarise(2, [9.0 + i, 10.0 + i]) for i, _ in enumerate(found)]
    )
    monkeypatch.setattr(decode, "make", lambda step, cold: make(step, cold, "cpu"))
    monkeypatch.setattr(paged_own, "target", lambda device: at)
    monkeypatch.setattr(paged_own.extension, "load", lambda: None)
    monkeypatch.setattr(paged_own.decode, "cut", lambda kernel, *_, **sizes: SimpleNamespace(kernel=kernel))
    monkeypatch.setattr(paged_own.decode, "attend", emulated)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    for cached in (flashinfer._workspace, flashinfer._xqa_workspace):
        cached.cache_clear()
    peer = SimpleNamespace(flash_attn_with_kvcache=flash, get_scheduler_metadata=planned)
    monkeypatch.setitem(sys.modules, MODULE, peer)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa))


OWN = {"ours", "ours_cut", "ours_call", "ours_step", "ours_p16", "ours_hnd", "ours_native", "ours_native_call"}
APART = {"append_nhd", "append_native", "quantise_q"}
FP8 = {"fa3_fp8", "fa3_fp8_call", "flashinfer_fp8"}
BF16 = {"fa3_bf16", "fa3_bf16_call", "flashinfer_bf16", "flashinfer_fa3_bf16"}


@pytest.mark.parametrize("step", [STEP, ONE], ids=["two queries", "one query"])
def test_every_contender_is_run_and_checked(on_the_host: None, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "COLD_BYTES", 2 * step.bytes_of(1))
    rows = measure(step, True, sources_of(False, False, False), QUICK)
    of = {row.contender: row for row in rows}
    refused = {"flashinfer_fa3_fp8"} | ({"xqa_fp8", "xqa_bf16"} if step is STEP else set())
    ran = {name for name, row in of.items() if row.status == OK}
    assert set(of) - ran == refused, [(row.contender, row.reason) for row in rows if row.status != OK]
    assert {row.status for row in rows} == {OK, UNAVAILABLE} and len(rows) == len(of)
    extra = set() if step is STEP else {"xqa_fp8", "xqa_bf16"}
    assert ran == OWN | APART | FP8 | BF16 | extra
    assert all(of[name].error < 0.01 for name in BF16) and all(0.01 < of[name].error < 0.06 for name in OWN | FP8)
    for name, element in [(n, 1) for n in OWN | FP8] + [(n, 2) for n in BF16]:
        assert of[name].tb_s == pytest.approx(step.bytes_of(element) / of[name].median_us * 1e-6)
    assert all(of[name].tb_s is None for name in APART)


def test_a_wrong_result_has_no_time_and_a_peer_that_is_missing_a_reason(
    on_the_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrapper, "run", lambda self, q, cache, k_scale=1.0: q.flip(0))
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", SimpleNamespace())
    rows = {row.contender: row for row in measure(ONE, False, sources_of(False, True, False), QUICK)}
    assert rows["flashinfer_bf16"].status == WRONG and rows["flashinfer_bf16"].median_us is None
    assert "relative L2 error" in rows["flashinfer_bf16"].reason and rows["ours"].status == OK
    assert rows["fa3_fp8"].status == UNAVAILABLE and MODULE in rows["fa3_fp8"].reason
    assert rows["xqa_fp8"].status == FAILED and "append_nhd" not in rows


def test_one_plan_serves_several_tables_or_none(on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If FlashInfer kept its page numbers elsewhere, a cold launch would read another copy's pages."""
    monkeypatch.setattr(decode, "COLD_BYTES", 2 * ONE.bytes_of(1))
    planned_as = Wrapper.plan

    def elsewhere(self: Any, *args: Any, **options: Any) -> None:
        planned_as(self, *args, **options)
        self.__dict__["pages"] = self.__dict__.pop("_paged_kv_indices_buf")

    monkeypatch.setattr(Wrapper, "plan", elsewhere)
    (row,) = measure(ONE, True, {"flashinfer_fp8": flashinfer.FlashInfer("fa2", "fp8")}, QUICK)
    assert row.status == UNAVAILABLE and "one plan cannot serve" in row.reason


def test_versions_stand_for_peers_alone() -> None:
    sources = sources_of(False, False, True)
    peers = {name for name, source in sources.items() if isinstance(source, decode.PagedPeer)}
    assert peers == {name for name in sources if name not in ("ours", "layouts", "append", "candidates")}
    assert all(isinstance(sources[name].version(), str) for name in peers)  # type: ignore[attr-defined]
    assert isinstance(sources["fa3_fp8"], paged.PagedFa3) and "xqa_fp8" not in sources_of(True, False, False)
