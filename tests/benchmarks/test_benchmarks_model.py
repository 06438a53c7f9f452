"""`model` on the CPU with tiny sizes: layers, ways to attend, rows, tables and files.

Regressions these catch: a way that attends to other keys than the reference, or forgets the step's token; a share of
attention of another forward; a speedup upside down; layers that are not scaled; a wrong result that gets a time.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from benchmarks import turns
from benchmarks.__main__ import cli
from benchmarks.grid import QUICK
from benchmarks.model import cached, dense, measure, report
from benchmarks.model.llama import Llama
from benchmarks.model.measure import ModelTime, row_of
from benchmarks.model.problems import PROBLEMS, TINY, Problem
from benchmarks.peers.fa3 import MODULE
from benchmarks.plot import PlotError
from benchmarks.results import FAILED, OK, UNAVAILABLE, WRONG, read_records

CPU = torch.device("cpu")


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What FlashAttention-3 computes of (B, S, H, D)."""
    return dense.exact(0, q, k, v, causal=causal)


def flash_with_kvcache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache_seqlens: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, None]:
    assert causal and cache_seqlens.dtype == torch.int32 and bool((cache_seqlens == k.shape[1]).all())
    return flash(q, k, v, causal=True), None


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = SimpleNamespace(flash_attn_func=flash, flash_attn_with_kvcache=flash_with_kvcache)
    monkeypatch.setitem(sys.modules, MODULE, functions)


@pytest.mark.parametrize("problem", TINY.values(), ids=list(TINY))
def test_every_way_computes_the_model(problem: Problem, fa3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    rows = {row.contender: row for row in measure.measure(problem, CPU, QUICK)}
    assert list(rows) == ["without", "sdpa", "fa3_bf16", "ours"]
    assert {row.status for row in rows.values()} == {OK} and all(row.median_us for row in rows.values())
    errors = {name: row.error or 0.0 for name, row in rows.items()}
    assert errors["fa3_bf16"] < 1e-6 and errors["sdpa"] < errors["ours"] < 0.06 and errors["sdpa"] < 0.03
    calls = {name: row.call_error or 0.0 for name, row in rows.items()}
    assert calls["without"] == 0 and calls["fa3_bf16"] < 1e-6 < calls["sdpa"] < 0.01 < calls["ours"] < 0.08
    assert {row.without_us for row in rows.values()} == {rows["without"].median_us}


def test_the_reference_is_attention() -> None:
    q, k, v = (torch.randn(2, n, h, 32, dtype=torch.bfloat16) for n, h in ((5, 4), (9, 2), (9, 2)))
    operands = [x.transpose(1, 2).double() for x in (q, k, v)]
    for causal in (False, True):
        mask = torch.ones(5, 9, dtype=torch.bool).tril(4) if causal else None
        wanted = F.scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(dense.exact(0, q, k, v, causal=causal).double(), wanted, atol=0.01, rtol=0.01)


def test_rows_of_the_reference_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 40, 2, 32, dtype=torch.bfloat16)
    whole = dense.exact(0, q, q, q, causal=True)
    monkeypatch.setattr(dense, "SCORES", 7 * 40)
    assert torch.equal(dense.exact(0, q, q, q, causal=True), whole)


def test_pages_hold_what_the_bf16_caches_hold() -> None:
    caches = cached.Caches(TINY["decode"], CPU)
    k, v = caches.pages().dequantise(caches.table, caches.before, layer=1)
    for found, of in ((k, caches.k), (v, caches.v)):
        wanted = of[1][:, :-1].transpose(1, 2)
        got = found[:, :, : wanted.shape[2]]
        assert float((got - wanted.float()).norm() / wanted.float().norm()) < 0.05


def test_a_result_of_other_attention_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    monkeypatch.setattr(measure, "BACKENDS", {})

    def uncausal(name: str) -> dense.Way:
        return dense.Way(name, "bf16", lambda layer, q, k, v, **_: dense.sdpa_call(q, k, v, False, None))

    def broken() -> dense.Way:
        raise RuntimeError("no such thing\nmore")

    monkeypatch.setattr(dense, "sdpa", uncausal)
    monkeypatch.setattr(dense, "ours", broken)
    rows = {row.contender: row for row in measure.measure(TINY["prefill"], CPU, QUICK)}
    assert rows["sdpa"].status == WRONG and rows["sdpa"].median_us is None
    assert "of a call, the limit is 0.02" in rows["sdpa"].reason and (rows["sdpa"].call_error or 0) > 0.1
    assert rows["ours"].status == FAILED and rows["ours"].reason == "no such thing"
    assert rows["fa3_bf16"].status in (UNAVAILABLE, OK)


def test_calls_are_compared_on_the_operands_of_the_reference() -> None:
    seen: list[float] = []

    def doubled(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: bool) -> torch.Tensor:
        seen.append(float(q.sum()))
        return dense.exact(layer, q, k, v, causal=True) * (2 if layer == 1 else 1)

    def broken(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: bool) -> torch.Tensor:
        raise RuntimeError(f"layer {layer}")

    ways = [dense.Way("doubled", "bf16", doubled), dense.Way("broken", "bf16", broken)]
    attend, found = measure.compared(dense.exact, ways)
    model = Llama(TINY["prefill"], CPU)
    assert torch.equal(model.forward(attend), model.forward(dense.exact))
    assert len(seen) == 2 and found["doubled"] == pytest.approx(1)
    assert str(found["broken"]) == "layer 0"


def test_errors_of_calls_do_not_grow_in_the_language_model() -> None:
    problem = replace(TINY["prefill"], layers=12, of=12, width=256, ffn=512)
    model, drawn = Llama(problem, CPU), torch.Generator().manual_seed(3)

    def noisy(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: bool) -> torch.Tensor:
        out = dense.exact(layer, q, k, v, causal=True)
        return (out * (1 + 0.05 * torch.randn(out.shape, generator=drawn))).to(out.dtype)

    wanted = model.forward(dense.exact).float()
    assert float((model.forward(noisy).float() - wanted).norm() / wanted.norm()) < 0.05


def timed(name: str, problem: str, us: float, **more: Any) -> ModelTime:
    more = {"median_us": us, "min_us": us, "without_us": 60e3, "call_error": 0.02, "error": 0.01} | more
    return row_of(PROBLEMS[problem], name, "bf16", OK, **more)


ROWS = [
    timed("without", "video", 60e3), timed("sdpa_cudnn", "video", 120e3), timed("sdpa_flash", "video", 150e3),
    timed("ours", "video", 100e3, error=0.031), row_of(PROBLEMS["video"], "fa3_bf16", "", UNAVAILABLE, "not there"),
    timed("sdpa_flash", "decode", 90e3), row_of(PROBLEMS["decode"], "ours", "fp8", WRONG, "far off"),
]  # fmt: skip


def test_the_tables() -> None:
    text = report.markdown({"card": "NVIDIA H200"}, ROWS)
    assert "| sdpa_cudnn | bf16 | 120.00 | 2400.00 | 50% | 1.00 | 2.00% | 1.00% |" in text
    assert "| ours | bf16 | 100.00 | 2000.00 | 40% | 1.20 | 2.00% | 3.10% |" in text
    assert "| without | bf16 | 60.00 | 1200.00 |  |  |  |  |" in text
    assert "2 of 40 layers timed, 1 x 32760 tokens" in text and "32 x 1 tokens against 4096 keys" in text
    assert "* fa3_bf16: not there" in text and "* ours, decode: wrong: far off" in text


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw({"card": "NVIDIA H200"}, ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match="nothing to plot"):
        report.draw({}, [replace(row, median_us=None) for row in ROWS], tmp_path / "x.png")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    done = CliRunner().invoke(cli, ["model", "--tiny", "--only", "decode", "--no-peers", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    _, rows = read_records(tmp_path / "model.csv", ModelTime)
    assert [row.contender for row in rows] == ["without", "sdpa", "ours"]
    table = (tmp_path / "model.md").read_text()
    (tmp_path / "model.md").unlink()
    again = CliRunner().invoke(cli, ["model", "--from", str(tmp_path / "model.csv")])
    assert again.exit_code == 0 and (tmp_path / "model.md").read_text() == table
    refused = CliRunner().invoke(cli, ["model", "--tiny"])
    assert refused.exit_code == 2 and "--out" in refused.output


def test_the_sizes_are_those_of_the_models() -> None:
    video, prefill, decode = PROBLEMS.values()
    assert video.head_dim == prefill.head_dim == 128 and video.tokens == video.keys == 32760
    per_block = 8 * video.width**2 + 2 * video.width * video.ffn
    assert 13e9 < video.of * per_block < 15e9
    per_layer = 2 * decode.width**2 + 2 * decode.width * decode.kv_heads * 128 + 3 * decode.width * decode.ffn
    assert 7.5e9 < decode.of * per_layer + 2 * decode.vocabulary * decode.width < 8.5e9
