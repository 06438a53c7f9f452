"""The commands `varlen` and `windows` without a card: what is timed, what counts as a result, arithmetic, files.

Regressions these catch: a wrong result that looks fast; a contender that gets other lengths, masks or descales than
ours; a share of tiles that is not what a kernel visits; a target that is met by what was not measured.

The card's part is replaced: times are made up, and our kernels are emulated.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from test_varlen import expected

from benchmarks import machine, turns, walk, walk_commands, walk_report
from benchmarks.__main__ import cli
from benchmarks.grid import QUICK
from benchmarks.peers import Own, own, ragged
from benchmarks.peers.fa3 import MODULE
from benchmarks.results import FAILED, OK, UNAVAILABLE, WRONG
from benchmarks.walk import EQUAL, LENGTHS, Mix, WalkTime, make_ragged, mixes, row_of
from fp8cutlass import timing
from fp8cutlass.call import ragged as batches
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir

SMALL = Mix("small", (70, 1, 130), 4, 2, 64, True)
SQUARE = Mix(EQUAL, (96, 96), 4, 4, 64, False)
WINDOWED = Mix("300 tokens", (300,), 4, 2, 64, True)
SOURCES = {ragged.OURS: ragged.ours, ragged.DENSE: ragged.dense} | {f"fa3_{p}": ragged.fa3(p) for p in ("fp8", "bf16")}


class Replay:
    """A graph that runs its launch and writes what it gives where the first one lies."""

    def __init__(self, launch: Callable[[], torch.Tensor]) -> None:
        self._launch, self.out = launch, launch()

    def replay(self) -> None:
        self.out.copy_(self._launch())


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, *most: int, **options: Any) -> Any:
    """What FlashAttention-3 computes, and what it asks for."""
    sequences, kv_heads = len(cu_q) - 1, k.shape[1]
    assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k) and most == (int(cu_q.diff().max()),) * 2
    if q.dtype == torch.float8_e4m3fn:
        names = ("q_descale", "k_descale", "v_descale")
        assert all(options[n].shape == (sequences, kv_heads) for n in names)
        q, k, v = (x.float() * options[n][0, 0] for x, n in zip((q, k, v), names, strict=True))
    lengths = cu_q.diff().tolist()
    return expected(q, k, v, lengths, lengths, -1, 0 if options["causal"] else -1)[0].bfloat16()


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Target(generated_dir(), "sm90a", 132)

    def capture(launch: Callable[[], torch.Tensor], target_us: float) -> timing.Capture:
        graph = Replay(launch)
        return timing.Capture(graph, 2, graph.out, launch, 10.0)  # type: ignore[arg-type]

    def emulated(number: int, operands: Any, out: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
        options = {"is_causal": dense[-1].shape.causal, "enable_gqa": True}
        q, k, v = dense[-1].q, dense[-1].k, dense[-1].v
        return lambda: out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))

    dense: list[Any] = []
    made = ragged.make_operands

    def kept(data: Any, *rest: Any) -> Any:
        dense.append(data)
        return made(data, *rest)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns, "capture", capture)
    monkeypatch.setattr(
        turns, "interleave", lambda found, *_: [timing.summarise(2, [9.0 + i, 10.0 + i]) for i, _ in enumerate(found)]
    )
    monkeypatch.setattr(walk, "make_ragged", lambda mix: make_ragged(mix, "cpu"))
    for module in (ragged, own):
        monkeypatch.setattr(module, "target", lambda device: at)
    monkeypatch.setattr(ragged.extension, "load", lambda: None)
    monkeypatch.setattr(ragged, "kernel_launch", lambda call, *_: lambda: batches.run(call)[0])
    monkeypatch.setattr(ragged, "make_operands", kept)
    monkeypatch.setattr(ragged, "launcher", emulated)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(flash_attn_varlen_func=flash))


def test_the_batches_are_those_of_the_lab() -> None:
    found = mixes()
    assert len(found) == 36 and {m.head_dim for m in found} == {64, 128, 256} and {m.causal for m in found} == {0, 1}
    assert {len(LENGTHS[name]) for name in LENGTHS} == {8, 64, 128, 256, 512} and len(mixes([128])) == 12
    assert all(m.heads * m.head_dim == 2048 and set(m.lengths) == {4096} for m in found if m.name == EQUAL)
    assert {(m.heads, m.kv_heads) for m in mixes([128])} == {(16, 16), (32, 8)}
    assert max(LENGTHS["log-normal to 8k"]) <= 8192 < 15 * sorted(LENGTHS["log-normal to 8k"])[32]
    for name, least, most in (("64 x 77..1024", 77, 1024), ("images 128 x 256..1024", 256, 1024)):
        assert least <= min(LENGTHS[name]) < 1.5 * least and 0.9 * most < max(LENGTHS[name]) <= most
    assert LENGTHS["64 x 77..1024"][:3] == (214, 659, 944), "Python draws other numbers than it did"


def test_useful_operations_count_what_a_mask_leaves() -> None:
    full = replace(SMALL, causal=False)
    assert full.flops == 4 * 4 * 64 * (70 * 70 + 1 + 130 * 130) and SMALL.flops == full.flops / 2
    seen = sum(min(i + 1, 17) for n in SMALL.lengths for i in range(n))
    assert replace(SMALL, left=16).flops == pytest.approx(4 * 4 * 64 * seen, rel=0.02)


@pytest.mark.parametrize("mix", [SMALL, replace(SMALL, causal=False), replace(SMALL, left=16)], ids=lambda m: m.mask)
def test_the_reference_sees_what_a_row_sees(mix: Mix) -> None:
    data = make_ragged(mix, "cpu")
    lengths = list(mix.lengths)
    right, _ = expected(data.q, data.k, data.v, lengths, lengths, mix.left, 0 if mix.causal else -1)
    assert data.error(right) < 1e-6
    assert data.error(right.roll(1, 0)) > 0.5 and data.error(right.roll(1, 1)) > 0.5
    assert data.error(torch.full_like(right, torch.nan)) == float("inf")
    wider, _ = expected(data.q, data.k, data.v, lengths, lengths, mix.left + 4 if mix.left > 0 else 9, 3)
    assert data.error(wider) > 0.1, "another mask"


def test_every_contender_is_run_and_checked(on_the_host: None) -> None:
    for mix, count in ((SMALL, 5), (SQUARE, 6)):
        rows = walk.measure(mix, SOURCES, QUICK)
        assert [row.status for row in rows] == [OK] * count, [row.reason for row in rows]
        of = {row.contender: row for row in rows}
        assert (ragged.DENSE in of) == (mix is SQUARE)
        assert of["fa3_bf16"].error < 0.01 < 0.02 < of[ragged.OURS].error < 0.1
        assert "_linear_" in of[ragged.OURS].kernel and 0.02 < of[ragged.CALLER].error < 0.1
        assert all(row.tflops == pytest.approx(mix.flops / row.median_us * 1e-6) for row in rows)
    twin = of[ragged.OURS].kernel.removesuffix("_ragged")
    assert of[ragged.DENSE].kernel == twin, "the dense kernel of the same tile"


def test_windows_stand_beside_the_kernel_without_one(on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "dense", lambda data: [])
    monkeypatch.setattr(ragged, "windowed", lambda data: [])
    rows = walk.measure(WINDOWED, {ragged.OURS: ragged.windows((16, 100))}, QUICK)
    assert [(row.mask, row.status) for row in rows] == [("causal", OK), ("window 16", OK), ("window 100", OK)]
    assert ["_window_" in row.kernel for row in rows] == [False, True, True]


def test_a_wrong_result_has_no_time_and_a_peer_that_is_missing_a_reason(
    on_the_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = flash

    def neighbours(*args: Any, **options: Any) -> torch.Tensor:
        return right(*args, **options).roll(1, 0)

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(flash_attn_varlen_func=neighbours))
    status = {row.contender: row for row in walk.measure(SMALL, SOURCES, QUICK)}
    assert status["fa3_fp8"].status == WRONG and status["fa3_fp8"].median_us is None
    assert "relative L2 error" in status["fa3_fp8"].reason and status[ragged.OURS].status == OK
    monkeypatch.setitem(sys.modules, MODULE, None)
    status = {row.contender: row for row in walk.measure(SMALL, SOURCES, QUICK)}
    assert status["fa3_bf16"].status == UNAVAILABLE and MODULE in status["fa3_bf16"].reason

    def broken(*_: Any) -> Callable[[], torch.Tensor]:
        def launch() -> torch.Tensor:
            raise RuntimeError("no launch\nand a trace")

        return launch

    monkeypatch.setattr(ragged, "kernel_launch", broken)
    (row,) = walk.measure(SMALL, {ragged.OURS: lambda data: ragged.ours(data)[:1]}, QUICK)
    assert (row.status, row.reason) == (FAILED, "no launch")


def test_the_tiles_are_those_that_a_kernel_visits() -> None:
    """By hand: 300 rows in tiles of 128, keys in tiles of 64; and a band that is counted row by row."""
    assert walk.cells(replace(WINDOWED, causal=False), 128, 64) == 3 * 5 * 128 * 64
    assert walk.cells(WINDOWED, 128, 64) == (2 + 4 + 5) * 128 * 64
    assert walk.cells(replace(WINDOWED, left=15), 128, 64) == (2 + 3 + 2) * 128 * 64
    assert walk.cells(SMALL, 128, 64) == (2 + 1 + 2 + 3) * 128 * 64
    long = Mix("16k", (16384,), 32, 8, 128, True, left=1023)
    tiles = [walk.cells(mix, 128, 192) / (128 * 192) / 128 for mix in (long, replace(long, left=-1))]
    assert tiles == pytest.approx([6.461, 43.336], abs=0.01), "an item of the lab's row 5, on average"


def rows_of(ours: float, fa3: float, dense: float) -> list[WalkTime]:
    found = []
    for mix in (SMALL, SQUARE):
        for name, us in (("fp8cutlass", ours), ("fp8cutlass_call", 3 * ours), ("fa3_fp8", fa3), ("fa3_bf16", 2 * fa3)):
            found.append(row_of(mix, name, "fp8", OK, median_us=us, tflops=100.0, cells=1000))
    return [*found, row_of(SQUARE, "fp8cutlass_dense", "fp8", OK, median_us=dense, tflops=99.0)]


def test_the_table_and_the_targets() -> None:
    rows = rows_of(100.0, 151.0, 98.0)
    text = walk_report.varlen_markdown({"card": "NVIDIA H200", "commit": "abc"}, rows)
    assert "on NVIDIA H200" in text and "* commit: abc" in text and "### head_dim 64, causal" in text
    (line,) = (x for x in text.splitlines() if x.startswith(f"| {EQUAL} "))
    assert line == f"| {EQUAL} | 100 |  | 100 | 100 | 1.51 |  | 1.020 | 300.0 | 1.01 |"
    assert "geometric mean of 2: 1.51, from 1.51 to 1.51 (target 1.5)" in text
    assert f"{EQUAL} against dense: at most 1.020 of its time (target 1.03)" in text
    missing = row_of(SMALL, "fa3_fp8", "", UNAVAILABLE, "not installed")
    wrong = row_of(SMALL, "fa3_bf16", "bf16", WRONG, "far off")
    text = walk_report.varlen_markdown({}, [rows[0], missing, missing, wrong])
    assert text.count("* fa3_fp8: not installed") == 1 and "* fa3_bf16 on small, head_dim 64, causal: wrong" in text


def test_a_window_is_held_to_its_share() -> None:
    causal = row_of(WINDOWED, "fp8cutlass", "fp8", OK, median_us=1000.0, cells=4000, tflops=1.0)
    window = row_of(replace(WINDOWED, left=1023), "fp8cutlass", "fp8", OK, median_us=230.0, cells=800, tflops=1.0)
    assert walk_report.share(window, causal) == pytest.approx(1.15)
    text = walk_report.windows_markdown({}, [causal, window])
    assert "| 64, window 1024 | ragged, with its plan | 230.0 | 1000.0 | 0.2000 | 1.150 |  | 1 |" in text
    assert walk_report.share(replace(window, cells=None), causal) is None
    # 300 rows as in the test above: 11 tiles, of which a band of 16 keys visits 7.
    causal = replace(causal, kernel="sm90a_fwd_d64_m128n64w8", cells=11 * 128 * 64)
    band = replace(window, mask="window 16", median_us=770.0)
    assert walk_report.share_of_causal_tiles(band, causal) == pytest.approx(1.21)
    assert walk_report.share_of_causal_tiles(band, replace(causal, kernel="")) is None


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    walk_report.draw_varlen({"card": "NVIDIA H200"}, rows_of(100.0, 151.0, 98.0), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    with pytest.raises(walk_report.PlotError):
        walk_report.draw_varlen({}, [], tmp_path / "y.png")


@pytest.fixture
def commands(on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_commands, "need_card", lambda what: None)
    monkeypatch.setattr(Own, "available", lambda self: None)
    monkeypatch.setattr(machine, "stamp", lambda commit: {"card": "NVIDIA H200", "commit": commit})
    monkeypatch.setattr(walk, "mixes", lambda head_dims: [SMALL, SQUARE])
    monkeypatch.setattr(ragged, "windowed", lambda data: [])


def test_the_commands_write_their_files(commands: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["varlen", "--quick", "--out", str(tmp_path), "--commit", "abc"])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "varlen.csv").read_text().splitlines()
    body = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert "# commit: abc" in lines and len(body) == 11 and tuple(body[0]) == walk.COLUMNS
    assert "Ragged batches on NVIDIA H200" in (tmp_path / "varlen.md").read_text()
    options = ["windows", "--tokens", "200", "--head-dim", "64", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == 0, done.output
    assert "| 64, window 256 |" in (tmp_path / "windows.md").read_text()


def test_no_batch_is_begun_after_the_budget(commands: None, tmp_path: Path) -> None:
    """What was measured is kept, and the status says that it is a part."""
    done = CliRunner().invoke(cli, ["varlen", "--budget", "0", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "1 of 2 batches are left out" in done.output, done.output
    assert "small" in (tmp_path / "varlen.csv").read_text() and EQUAL not in (tmp_path / "varlen.csv").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("command", ["varlen", "windows"])
def test_without_a_card_the_command_says_what_it_needs(command: str) -> None:
    found = CliRunner().invoke(cli, [command])
    assert found.exit_code == 2 and "needs a CUDA device" in found.output and "Traceback" not in found.output


def test_a_prompt_over_pages_stands_beside_the_fastest_dense_kernel() -> None:
    """A share of a slower one would flatter it."""
    mix = Mix("8k", (8192,), 32, 8, 128, True)
    times = {"fp8cutlass_pages": 103.0, "fp8cutlass_dense": 110.0, "fp8cutlass_dense_1": 100.0}
    rows = [replace(row_of(mix, name, "fp8", "ok"), median_us=us, tflops=1.0) for name, us in times.items()]
    text = walk_report.prefill_markdown({}, rows)
    assert "| 128 | 8k | fp8cutlass_pages | 103.0 | 1 | 100.0 | 1.030 |" in text and "dense_1 |" not in text
