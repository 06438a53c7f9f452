"""The benchmark command without a card: shapes, arithmetic, files, tables; and the checks that keep a wrong result from
looking fast."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from benchmarks import data, evidence, grid, machine, plot, report, results
from benchmarks.__main__ import cli
from benchmarks.peers import PEERS, Contender, Refused, own
from benchmarks.results import FAILED, OK, UNAVAILABLE, WRONG, Row
from benchmarks.shapes import GRID_HEAD_DIMS, GRID_SEQLENS, HISTORY, Shape, held_out, select, square
from fp8cutlass import timing
from fp8cutlass.choose.target import Target
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.quant.v_layout import unpack_v

HELD_OUT = next(shape for shape in select("named") if held_out(shape))
KERNEL = "sm90a_fwd_d64_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"


def row(shape: Shape, contender: str, us: float, **more: object) -> Row:
    precision = "bf16" if contender.endswith("bf16") else "fp8"
    values: dict[str, object] = {"launches": 7, "replays": 20, "median_us": us, "min_us": 0.9 * us, "spread": 0.125}
    values |= {"error": 0.03125, "clock_mhz": 1755.0, "power_w": 690.5}
    if precision == "fp8":
        values["quantise_us"] = us / 4
    return Row(shape, contender, precision, OK, **(values | more))  # type: ignore[arg-type]


def grid_rows(us: dict[str, float]) -> list[Row]:
    return [row(shape, name, time) for shape in select("grid") for name, time in us.items()]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "grid.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = results.Writer(file, {"card": "NVIDIA H200", "commit": "abc", "nvcc": "13.0, V13.0.88"})
        writer.write(grid_rows({"fp8cutlass": 100.0, "fa3_fp8": 150.0, "cudnn_fp8": 200.0, "fa3_bf16": 120.0}))
    return path


# Shapes


def test_the_grid_is_36_cells_of_equal_work_beside_the_historical_one() -> None:
    cells = [shape for shape in select("grid") if shape.in_grid]
    assert len(cells) == len(set(cells)) == 36
    assert {shape.batch * shape.seqlen_k for shape in cells} == {16384}
    assert {shape.heads * shape.head_dim for shape in cells} == {2048}
    assert {(s.head_dim, s.causal, s.seqlen_k) for s in cells} == {
        (d, c, s) for d in (64, 128, 256) for c in (False, True) for s in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert [shape for shape in select("grid") if not shape.in_grid] == [HISTORY] == [square(1, 8, 512, 64, False)]


def test_useful_operations_count_a_causal_problem_as_half() -> None:
    full, causal = square(2, 3, 1024, 128, False), square(2, 3, 1024, 128, True)
    assert full.flops == 4 * 2 * 3 * 1024 * 1024 * 128 == 2 * causal.flops
    assert Shape(64, False, 1, 4096, 2, 8, 4).flops == 4 * 2 * 8 * 4096 * 64  # query heads count
    assert full.tflops(1000.0) == pytest.approx(full.flops / 1e-3 / 1e12)


def test_filters_narrow_a_set_and_none_of_them_means_all() -> None:
    assert select("grid", head_dims=[128], seqlens=[512, 1024], masks=["causal"]) == [
        square(32, 16, 512, 128, True),
        square(16, 16, 1024, 128, True),
    ]
    assert len(select("grid", masks=["full"])) == 19
    assert set(select("short")) < set(select("grid"))


# Times, ratios, targets


def test_a_timing_is_the_median_of_its_replays() -> None:
    found = timing.summarise(5, [4.0, 1.0, 2.0, 100.0, 3.0])
    assert (found.launches, found.replays, found.median_us, found.min_us) == (5, 5, 3.0, 1.0)
    assert found.spread == pytest.approx(33.0)


def test_geometric_mean() -> None:
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert report.geometric_mean([1.7]) == pytest.approx(1.7)
    for wrong in ([], [1.0, 0.0], [1.0, -2.0]):
        with pytest.raises(ValueError):
            report.geometric_mean(wrong)


def test_the_ratio_is_against_the_better_fp8_peer_that_ran() -> None:
    cell = {r.contender: r for r in grid_rows({"fp8cutlass": 100.0, "fa3_fp8": 150.0, "cudnn_fp8": 130.0})[:3]}
    assert report.ratio(cell) == pytest.approx(1.3)
    assert report.ratio({name: cell[name] for name in ("fp8cutlass", "fa3_fp8")}) == pytest.approx(1.5)
    assert report.ratio({"fp8cutlass": cell["fp8cutlass"]}) is None
    assert report.ratio({"fa3_fp8": cell["fa3_fp8"]}) is None


def test_rows_that_are_wrong_or_of_other_kernels_take_no_part() -> None:
    shape = square(32, 32, 512, 64, False)
    rows = [row(shape, "fp8cutlass", 10.0), row(shape, "fp8cutlass", 5.0, chosen=False)]
    rows += [dataclasses.replace(row(shape, "fa3_fp8", 1.0), status=WRONG), row(shape, "cudnn_fp8", 20.0)]
    cell = report.cells(rows)[shape]
    assert cell["fp8cutlass"].median_us == 10.0
    assert report.ratio(cell) == pytest.approx(2.0)


@pytest.mark.parametrize("head_dim", GRID_HEAD_DIMS)
def test_a_target_needs_mean_and_minimum_and_every_cell(head_dim: int) -> None:
    mean, minimum = report.TARGETS[head_dim]
    mine = [shape for shape in select("grid") if shape.in_grid and shape.head_dim == head_dim]
    assert len(mine) == 2 * len(GRID_SEQLENS)

    def verdict(ratios: list[float], peers: tuple[str, ...] = report.FP8_PEERS) -> report.Verdict:
        rows = []
        for shape, value in zip(mine, ratios, strict=True):
            rows += [row(shape, "fp8cutlass", 100.0), *(row(shape, peer, 100.0 * value) for peer in peers)]
        (found,) = report.verdicts(rows)
        return found

    good = verdict([1.01 * mean] * 12)
    assert good.met and good.complete and good.mean == pytest.approx(1.01 * mean)
    assert not verdict([0.99 * mean] * 12).met
    one_slow = verdict([0.99 * minimum] + [2 * mean] * 11)
    assert not one_slow.met and one_slow.mean > mean and one_slow.worst == mine[0]
    one_peer = verdict([2 * mean] * 12, peers=("fa3_fp8",))
    assert not one_peer.complete and not one_peer.met


def test_a_part_of_the_grid_does_not_meet_a_target() -> None:
    rows = [r for r in grid_rows({"fp8cutlass": 1.0, "fa3_fp8": 9.0, "cudnn_fp8": 9.0}) if r.shape.seqlen_k < 16384]
    assert report.verdicts(rows) and not any(verdict.met for verdict in report.verdicts(rows))


# Files


def test_rows_survive_the_csv(tmp_path: Path) -> None:
    shape = Shape(192, True, 1, 4096, 2, 8, 4)
    rows = [
        row(shape, "fp8cutlass", 12.5, kernel=KERNEL, chosen=False),
        row(square(1, 8, 512, 64, False), "fa3_bf16", 9.0625),
        Row(shape, "cudnn_fp8", "fp8", UNAVAILABLE, 'no "cudnn", here'),
        Row(shape, "fa3_fp8", "fp8", WRONG, "# too far", error=math.inf),
    ]
    path = tmp_path / "some.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = results.Writer(file, {"card": "NVIDIA\n H200", "command": "a: b"})
        for one in rows:  # as a run writes them
            writer.write([one])
    stamp, read = results.read(path)
    assert stamp == {"card": "NVIDIA H200", "command": "a: b"}
    assert read == rows


def test_another_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="columns"):
        results.read(path)
    assert CliRunner().invoke(cli, ["table", str(path)]).exit_code == 2


def test_table_from_a_csv(measured: Path) -> None:
    found = CliRunner().invoke(cli, ["table", str(measured)])
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert "## Attention on NVIDIA H200" in lines and "* commit: abc" in lines
    assert sum(line.startswith("### head_dim") for line in lines) == 6
    assert lines.count("| **ours / better FP8 peer** |" + " 1.50 |" * 6) == 6
    assert lines.count("| ours / best bf16 |" + " 1.20 |" * 6) == 6
    assert lines.count("| ours, quantisation included / best bf16 |" + " 0.96 |" * 6) == 6  # 120 / (100 + 25)
    # The work of a full cell is 4 * tokens * seqlen * width; 25 us of quantisation come to the kernel's 100.
    kernel, whole = 4 * 16384 * 512 * 2048 / 100e-6 / 1e12, 4 * 16384 * 512 * 2048 / 125e-6 / 1e12
    assert any(line.startswith(f"| fp8cutlass | {kernel:.0f} |") for line in lines)
    assert any(line.startswith(f"| fp8cutlass, quantisation included | {whole:.0f} |") for line in lines)
    states = {line.split(" | ")[0].strip("| "): line.split("|")[-2].strip() for line in lines if " | 12 | " in line}
    assert states == {"64": "missed", "128": "met", "256": "met"}
    assert "(1, 8, 512, 64) full: 100.00 us, target 6 us: missed" in lines


def test_table_says_what_did_not_count() -> None:
    shape = square(32, 32, 512, 64, False)
    rows = [
        dataclasses.replace(row(shape, "fa3_fp8", 1.0), status=WRONG, reason="relative L2 error 0.9"),
        Row(shape, "cudnn_fp8", "fp8", FAILED, "no engine"),
    ]
    text = report.markdown({}, rows)
    assert "fa3_fp8: wrong on (32, 32, 512, 64) full: relative L2 error 0.9" in text
    assert "cudnn_fp8: failed on (32, 32, 512, 64) full: no engine" in text


def test_plot_from_a_csv(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figure.png"
    found = CliRunner().invoke(cli, ["plot", str(measured), "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_plot_says_what_it_lacks(measured: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(plot.PlotError, match="no shape of the grid"):
        plot.draw({}, [row(HISTORY, "fp8cutlass", 6.0)], tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = CliRunner().invoke(cli, ["plot", str(measured)])
    assert found.exit_code == 2 and "needs matplotlib" in found.output


def test_evidence_for_the_generator(tmp_path: Path) -> None:
    shape = square(32, 32, 512, 64, False)
    stamp = {"card": "NVIDIA H200", "commit": "abc", "nvcc": "13.0, V13.0.88"}
    rows = [
        row(shape, "fp8cutlass", 20.0, kernel=KERNEL),
        row(shape, "fp8cutlass", 10.0, kernel=KERNEL),  # a later run
        row(shape, "fp8cutlass", 10.0, kernel=KERNEL.replace("bf16", "fp16")),
        dataclasses.replace(row(shape, "fp8cutlass", 1.0, kernel=KERNEL), status=WRONG),
        row(shape, "fa3_fp8", 1.0),
        row(HELD_OUT, "fp8cutlass", 1.0, kernel=KERNEL),
    ]
    out = io.StringIO()
    evidence.write(out, evidence.records(stamp, rows))
    (found,) = csv.DictReader(io.StringIO(out.getvalue()))
    assert tuple(found) == evidence.COLUMNS
    assert (found["tile"], found["stages"], found["schedule"], found["cluster"]) == (
        "m128n192w8",
        "3",
        "pingpong",
        "solo",
    )
    assert (found["head_dim"], found["seqlen_k"], found["batch"], found["causal"]) == ("64", "512", "32", "false")
    assert (found["softmax"], found["us"], found["clock_mhz"], found["toolchain"]) == (
        "linear",
        "10.000",
        "1755",
        "nvcc 13.0",
    )


def test_evidence_names_what_is_held_out(tmp_path: Path) -> None:
    """On stderr, so that what is written stays what the generator reads."""
    shape, path = square(32, 32, 512, 64, False), tmp_path / "measured.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        results.Writer(file, {"card": "NVIDIA H200"}).write(
            [row(x, "fp8cutlass", 20.0, kernel=KERNEL) for x in (shape, HELD_OUT)]
        )
    found = CliRunner().invoke(cli, ["evidence", str(path)])
    assert found.exit_code == 0, found.output
    assert len(list(csv.DictReader(io.StringIO(found.stdout)))) == 1
    assert found.stderr == f"held out, left out: {HELD_OUT.label}\n"


def test_a_whole_call_stands_beside_the_kernel_alone() -> None:
    """Measured in one piece, on any shape, and against the bf16 kernels of the run."""
    shape = Shape(128, True, 4096, 4096, 1, 32, 8)
    rows = [row(shape, "fp8cutlass", 100.0), row(shape, report.CALL, 160.0), row(shape, "fa3_bf16", 240.0)]
    rows.append(row(shape, report.SAGE, 200.0))
    (line,) = (line for line in report.markdown({}, rows).splitlines() if line.startswith(f"| {shape.label} |"))
    assert line.split(" | ")[1:] == [
        *("100.00", "", "", "240.00", "", "", "200.00", "160.00", "", "2.40", "1.50", "1.25 |")
    ]
    in_grid = [dataclasses.replace(r, shape=square(32, 16, 512, 128, True)) for r in rows]
    lines = report.markdown({}, in_grid).splitlines()
    assert "| a whole call of ours, us | 160.0 |" in lines
    assert "| a whole call of ours / best bf16 | 1.50 |" in lines
    assert "| a whole call of ours / sage_call | 1.25 |" in lines


def test_precisions_stand_beside_the_fast_kernel() -> None:
    """With how much longer they take; where they were not measured there is no trace of them."""
    shape = square(4, 16, 4096, 128, True)
    times = {"fp8cutlass": 100.0, "fp8cutlass_accurate": 130.0, "fp8cutlass_high": 170.0, "fp8cutlass_call_high": 230.0}
    rows = [row(shape, name, us) for name, us in times.items()]
    lines = report.markdown({}, rows).splitlines()
    assert "| fp8cutlass_high, us | 170.0 |" in lines and "| fp8cutlass_call_high, us | 230.0 |" in lines
    assert "| fp8cutlass_accurate / fp8cutlass, times its time | 1.30 |" in lines
    other = [dataclasses.replace(r, shape=Shape(128, True, 4096, 4096, 1, 32, 8)) for r in rows]
    lines = report.markdown({}, other).splitlines()
    line = next(i for i, text in enumerate(lines) if text.startswith(f"| {other[0].shape.label} |"))
    titles, cells = ([cell.strip() for cell in lines[i].strip("|").split("|")] for i in (line - 2, line))
    found = dict(zip(titles, cells, strict=True))
    assert {name: found[name] for name in times} == {name: f"{us:.2f}" for name, us in times.items()}
    assert found["fp8cutlass_high / fp8cutlass, times its time"] == "1.70"
    assert not any("high" in text for text in report.markdown({}, rows[:1]).splitlines())


def test_a_long_launch_is_replayed_less_often() -> None:
    """Or a problem of 256k keys would take minutes; a median needs three."""
    settings = grid.Settings(target_us=4000.0, replays=20, most_us=600_000.0)
    assert [settings.replays_of(us) for us in (0.0, 4000.0, 30_000.0, 60_000.0, 10e6)] == [20, 20, 20, 10, 3]


# The command without a card


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize(
    "command",
    [("grid",), ("accuracy",), ("regret",), ("overhead",), ("pack",), ("launch", "--head-dim", "64")],
    ids=lambda c: c[0],
)
def test_what_needs_a_card_says_so(command: tuple[str, ...]) -> None:
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 2
    assert "needs a CUDA device" in found.output and "Traceback" not in found.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-peers", "--no-own"],
        ["--no-own", "--all-kernels"],
        ["--no-peers", "--peer", "fa3_fp8"],
        ["--precision", "high", "--all-kernels"],
        ["--precision", "high", "--kernel", KERNEL],
        ["--precision", "high", "--no-own"],
    ],
)
def test_contradicting_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli, ["grid", *arguments]).exit_code == 2


def test_stamp_names_what_ran() -> None:
    stamp = machine.stamp("1234")
    assert stamp["commit"] == "1234" and stamp["torch"] == torch.__version__
    assert all(stamp.values())


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("", "unknown"),
    ],
)
def test_a_folder_for_each_card(name: str, slug: str) -> None:
    assert machine.card_slug(name) == slug


# What is measured


@pytest.mark.parametrize(
    "shape", [square(2, 4, 200, 64, False), square(2, 4, 200, 64, True), Shape(64, False, 5, 300, 1, 8, 2)]
)
def test_the_reference_is_attention(shape: Shape) -> None:
    made = data.make_data(shape, "cpu")
    q, k, v = made.q.float(), made.k.float(), made.v.float()
    right = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)
    assert made.error(right) < 1e-5
    assert made.error(right / 2, descale=2.0) < 1e-5
    assert made.error(right * 1.25) == pytest.approx(0.25, rel=1e-3)
    for batch, head in made.pairs:  # each sampled head is looked at
        spoiled = right.clone()
        spoiled[batch, head, -1] = torch.nan
        assert made.error(spoiled) == math.inf


class FakeGraph:
    """Replays on the host."""

    def __init__(self, launch: Callable[[], torch.Tensor], out: torch.Tensor) -> None:
        self._launch, self._out = launch, out

    def replay(self) -> None:
        result = self._launch()
        if isinstance(self._out, torch.Tensor) and result is not self._out:
            self._out.copy_(result)


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `grid.measure` on CPU tensors; the times are made up, everything else is real."""

    def capture(launch: Callable[[], torch.Tensor], target_us: float) -> timing.Capture:
        out = launch()
        return timing.Capture(FakeGraph(launch, out), 2, out, launch)  # type: ignore[arg-type]

    def interleave(captures: list[timing.Capture], replays: int, sample: object = None) -> list[timing.Timing]:
        return [timing.summarise(item.launches, [5.0] * replays) for item in captures]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(grid, "capture", capture)
    monkeypatch.setattr(grid, "interleave", interleave)
    monkeypatch.setattr(grid, "make_data", lambda shape: data.make_data(shape, "cpu"))


class FakePeer:
    precision = "fp8"

    def __init__(self, name: str, prepare: Callable[[data.Data], list[Contender]]) -> None:
        self.name, self.prepare = name, prepare

    def available(self) -> str | None:
        return "not installed" if self.name == "absent" else None

    def version(self) -> str:
        return "0"


def test_only_right_results_are_timed(on_the_host: None) -> None:
    def attention(made: data.Data) -> torch.Tensor:
        return F.scaled_dot_product_attention(made.q.float(), made.k.float(), made.v.float())

    def right(made: data.Data) -> list[Contender]:
        return [Contender("right", "fp8", lambda: attention(made), lambda: made.q.clone())]

    def seq_major(made: data.Data) -> list[Contender]:
        return [
            Contender(
                "seq_major",
                "fp8",
                lambda: attention(made).transpose(1, 2).contiguous() / 4,
                None,
                "bshd",
                out_descale=4.0,
            )
        ]

    def off(made: data.Data) -> list[Contender]:
        return [Contender("off", "fp8", lambda: attention(made) * 1.2)]

    def lazy(made: data.Data) -> list[Contender]:
        """Right the first time, then it writes nothing."""
        out = attention(made)
        return [Contender("lazy", "fp8", lambda: out)]

    def broken(made: data.Data) -> list[Contender]:
        def launch() -> torch.Tensor:
            raise RuntimeError("no engine\nand a trace")

        return [Contender("broken", "fp8", launch)]

    def unserved(made: data.Data) -> list[Contender]:
        raise Refused("head_dim 64")

    def unprepared(made: data.Data) -> list[Contender]:
        raise ValueError("no plan")

    prepare = {f.__name__: f for f in (right, seq_major, off, lazy, broken, unserved, unprepared)}
    peers = [FakePeer(name, f) for name, f in prepare.items()] + [FakePeer("absent", right)]
    (rows,) = grid.run([square(1, 2, 100, 64, False)], peers, grid.QUICK)
    found = {r.contender: r for r in rows}
    assert {name: r.status for name, r in found.items()} == {
        "right": OK,
        "seq_major": OK,
        "off": WRONG,
        "lazy": WRONG,
        "broken": FAILED,
        "unserved": UNAVAILABLE,
        "unprepared": FAILED,
        "absent": UNAVAILABLE,
    }
    assert {name for name, r in found.items() if r.median_us is not None} == {"right", "seq_major"}
    assert found["right"].quantise_us == 5.0 and found["seq_major"].quantise_us is None
    assert found["off"].error == pytest.approx(0.2, rel=0.05) and found["lazy"].error == math.inf
    assert [found[name].reason for name in ("broken", "unserved", "absent")] == [
        "no engine",
        "head_dim 64",
        "not installed",
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_our_operands_are_what_the_kernels_read(
    on_the_host: None, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """The emulator stands for the kernels: a wrong descale, block or packing is a wrong result."""
    shape = square(1, 2, 320, 64, causal)
    at = Target(generated_dir(), "sm90a", 132)
    variants = load_manifest(at.directory).variants

    def launcher(number: int, operands: own.Operands, out: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
        fp8 = torch.float8_e4m3fn
        q, k, v = operands.q.view(fp8), operands.k.view(fp8), unpack_v(operands.v.view(fp8), shape.seqlen_k)
        descales = (operands.q_descale, operands.k_descale, operands.v_descale)

        def launch() -> torch.Tensor:
            result = emulate(q, k, v, *descales, variant=variants[number], scale=scale, scaling="block")
            return out.copy_(result.out)

        return launch

    monkeypatch.setattr(own, "target", lambda device: at)
    monkeypatch.setattr(own, "launcher", launcher)
    peer = own.Own(every=True)
    monkeypatch.setattr(peer, "available", lambda: None)
    (rows,) = grid.run([shape], [peer], grid.QUICK)
    assert {(r.status, r.reason) for r in rows} == {(OK, "")}
    assert [r.chosen for r in rows] == [True] + [False] * (len(rows) - 1)
    serving = {
        v.id
        for v in variants
        if (v.family, v.kind, v.head_dim, v.causal, v.dtype, v.out) == ("sm90a", "fwd", 64, causal, "e4m3", "bf16")
        and "block" in v.scalings
    }
    assert len(rows) == len(serving) > 1 and {r.kernel for r in rows} == serving
    assert [r.quantise_us for r in rows] == [5.0] + [None] * (len(rows) - 1)


@pytest.mark.parametrize(
    ("precision", "softmax"), [("fast", "linear"), ("balanced", "quadratic"), ("accurate", "exp2"), ("high", "exp2x2")]
)
def test_a_precision_is_asked_of_the_table_and_of_the_call(
    precision: str, softmax: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def attention(q: torch.Tensor, *operands: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options["precision"])
        return q

    monkeypatch.setattr(own, "target", lambda device: Target(generated_dir(), "sm90a", 132))
    monkeypatch.setattr(own, "attention", attention)
    monkeypatch.setattr(own, "launcher", lambda *arguments: lambda: None)
    peer = own.Own(asked=precision, call=True)
    kernel, call = peer.prepare(data.make_data(square(1, 2, 128, 64, False), "cpu"))
    assert f"_{softmax}_" in kernel.kernel and call.kernel == kernel.kernel
    call.launch()
    assert asked == [precision]
    assert [kernel.name, call.name, peer.name] == [
        report.at_precision(name, precision) for name in (report.OWN, report.CALL, report.OWN)
    ]
    assert kernel.name in (report.OWN, *report.OTHERS) and call.name in report.CALLS


def test_the_peers_are_the_contenders_of_the_tables() -> None:
    assert ("fp8cutlass", *PEERS) == report.CONTENDERS
    assert {name for name, peer in PEERS.items() if peer.precision == "fp8"} == set(report.FP8_PEERS)
    assert set(plot.COLOURS) == set(report.CONTENDERS)


def test_sageattention_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: it is not installed where these tests run."""
    asked: list[dict[str, object]] = []

    def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options)
        if q.shape[3] > 128:
            raise ValueError("Unsupported head_dim: 192")
        causal = bool(options["is_causal"])
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    peer = PEERS["sage_call"]
    monkeypatch.setitem(sys.modules, "sageattention", None)
    assert "sageattention cannot be imported" in str(peer.available())
    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn))
    assert peer.available() is None
    made = data.make_data(Shape(64, True, 40, 40, 1, 4, 2), "cpu")
    (contender,) = peer.prepare(made)
    assert made.error(contender.launch()) < 0.01 and contender.quantise is None
    assert asked[0] == {"tensor_layout": "HND", "is_causal": True, "sm_scale": 0.125}
    with pytest.raises(Refused, match="Unsupported head_dim: 192"):
        peer.prepare(data.make_data(square(1, 1, 16, 192, False), "cpu"))
    with pytest.raises(Refused, match="equal lengths"):
        peer.prepare(data.make_data(Shape(64, True, 8, 16, 1, 1, 1), "cpu"))
