"""The accuracy table: what it measures is what `attention` does, and each of its gates can fail.

Regressions these catch: a z-test against other operands than the kernel's, a gate that nothing misses, a failure that
does not reach the exit status, a row that vanishes where an argument is missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fp8cutlass import attention
from fp8cutlass.accuracy import measure, standard
from fp8cutlass.accuracy.command import PRECISIONS, accuracy
from fp8cutlass.accuracy.inputs import INPUTS, biased_keys, normal
from fp8cutlass.accuracy.measure import Figures, Row, exact, judge, kernels_of, table
from fp8cutlass.accuracy.measures import max_error, rmse
from fp8cutlass.accuracy.operands import operands_of
from fp8cutlass.accuracy.page import page
from fp8cutlass.accuracy.reference import attention64
from fp8cutlass.accuracy.report import CSV_TITLES, line, read_csv, record, write_csv
from fp8cutlass.accuracy.standard import COLUMNS, HIGH_ERROR, LARGE, MODES, RMSE_LIMIT, SCALINGS, SMALL, STATED, Mode
from fp8cutlass.accuracy.ztest import FLOOR, LIMITS, ZTest
from fp8cutlass.dtypes import INTEGER
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import generated_dir, load_manifest

ROOT = Path(__file__).resolve().parents[2]
TINY = (1, 2, 96, 64)
PLAIN = [mode for mode in MODES if not mode.peer and not mode.transforms]
FP8 = [mode for mode in MODES if not mode.precision]  # and the peer
FP8_PRECISIONS = tuple(precision for precision in PRECISIONS if precision not in INTEGER)
GOOD = ZTest(elements=10**6, columns=64, rms=0.9, max=5.0, row_rms=1.3, mean=0.001)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table on a problem that takes a moment, in the place of its small shape; FP8 costs there what it costs."""
    columns = tuple((inputs, TINY) for inputs in ("randn", "outlier"))
    modes = [dataclasses.replace(mode, figures=(0.07, 0.2)) for mode in MODES]
    monkeypatch.setattr(standard, "COLUMNS", columns)
    monkeypatch.setattr(measure, "COLUMNS", columns)
    monkeypatch.setattr(measure, "ON_CARDS", ())
    monkeypatch.setattr(measure, "SMALL", TINY)
    monkeypatch.setattr(measure, "MODES", modes)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(accuracy, [*arguments])


def test_the_small_table_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--quick` measures on the CPU, every figure finite: every mode, those that leave Q and K alone and those of
    integers at every precision. The others run the same kernels: each at one precision, and each precision serves
    three of them."""
    changed = [mode for mode in FP8 if mode.transforms]
    monkeypatch.setattr(measure, "MODES", [mode for mode in MODES if mode not in changed])
    rows = list(table("cpu", PRECISIONS, quick=True))
    for number, precision in enumerate(FP8_PRECISIONS):
        monkeypatch.setattr(measure, "MODES", changed[number :: len(FP8_PRECISIONS)])
        rows += table("cpu", (precision,), quick=True)
    assert [line(row) for row in rows if row.status == "FAIL"] == []
    measured = [row for row in rows if row.status == "pass"]
    wanted = {(inputs, mode.name) for inputs, shape in COLUMNS if shape == SMALL for mode in MODES}
    assert {(row.inputs, row.mode) for row in measured} == wanted
    for inputs in ("randn", "outlier"):
        kernels = {row.kernel for row in measured if row.inputs == inputs}
        assert sum(name.endswith("_linear") for name in kernels) == 1  # by blocks; token has exp2 alone
        assert sum(name.endswith("_exp2") for name in kernels) == 2
        assert sum(name.endswith("_exp2x2") for name in kernels) == 2
        for precision, softmax in (("int8", "codes"), ("int8_full", "bytes")):
            (kernel,) = {x.kernel for x in measured if (x.inputs, x.precision) == (inputs, precision)}
            assert kernel.endswith("_" + softmax) and kernel in kernels
    # At 4 scalings, of which token has one less; the peer, the transforms, the integers.
    assert len(measured) == len(rows) == 2 * (3 * 3 + 2 + 1 + 3 * 4 + 2)
    for row in measured:
        values = dataclasses.asdict(row.figures)
        z, own_error = values.pop("z"), values.pop("own_error")
        assert all(math.isfinite(x) for x in values.values())
        assert (z is not None) == (own_error is not None) == (row.mode in [mode.name for mode in PLAIN])
        if own_error is not None and row.inputs == "randn":
            assert (own_error <= HIGH_ERROR) == (row.precision == "high")


@pytest.mark.parametrize("precision", FP8_PRECISIONS)
@pytest.mark.parametrize("mode", PLAIN, ids=lambda mode: mode.name)
def test_the_operands_of_the_z_test_are_those_of_the_kernel(mode: Mode, precision: str) -> None:
    """Bit for bit: attention's result is the emulator's on the operands that the z-test dequantises."""
    q, k, v = normal((1, 2, 300, 64))
    ((_, served, name),) = kernels_of(mode, [precision], (q, k, v))
    assert served
    variant = load_manifest(generated_dir()).find(name)
    scaling = mode.arguments["scaling"]
    x = operands_of(variant, q, k, v, scaling)
    want = emulate(*x.fp8, *x.descales, variant=variant, scale=0.125, scaling=scaling).out
    assert torch.equal(attention(q, k, v, precision=precision, **mode.arguments), want)


def test_the_figures_are_documented() -> None:
    """docs/evidence/accuracy.md has the figures of every mode, in their order."""
    text = (ROOT / "docs" / "evidence" / "accuracy.md").read_text()
    table = text[text.index("## What the user loses") : text.index("### 8-bit integers")]
    rows = [line.strip("|").split("|")[1:] for line in table.splitlines() if "| ." in line]
    assert [tuple(float(cell) for cell in row) for row in rows] == [mode.figures for mode in MODES]


def test_head_by_head_is_the_whole() -> None:
    q, k, v = normal((2, 3, 40, 64))
    assert torch.allclose(exact(q, k, v), attention64(q, k, v, 0.125).out, rtol=1e-12, atol=1e-14)


def test_measures_by_hand() -> None:
    out, want = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 5.0]])
    assert rmse(out, want) == pytest.approx(math.sqrt(5 / 4)) and max_error(out, want) == 2.0


def test_inputs_are_what_they_are_called() -> None:
    """And the same at every call; the bias of K is one vector a head."""
    for make in INPUTS.values():
        assert all(torch.equal(x, y) for x, y in zip(make(TINY), make(TINY), strict=True))
    plain, spiked, biased = (make((1, 4, 2048, 64)) for make in INPUTS.values())
    for x, y in zip(plain, spiked, strict=True):
        assert abs(float((x != y).float().mean()) / 0.001 - 1) < 0.15 and float((x - y).abs().max()) > 25
    assert torch.equal(biased[0], plain[0]) and torch.equal(biased[2], plain[2])
    bias = biased[1].float() - plain[1].float()
    assert float(bias.std(2).max()) < 0.07 and 7 < float(bias.mean(2).std()) < 9  # rounding to bf16; N(0, 64)


def test_smoothing_by_hand_takes_the_bias_away() -> None:
    """What the figures of the smoothed modes rest on: softmax does not see a vector that all keys share."""
    q, k, v = biased_keys((1, 2, 512, 128))
    want = exact(q, k, v)
    smooth = (k.float() - k.float().mean(2, keepdim=True)).bfloat16()
    loss = [measure.relative_l2(attention(q, keys, v), want) for keys in (k, smooth)]
    assert loss[0] > 0.15 and loss[1] < 0.06


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"relative_l2": 0.0661}, "relative L2"),
        ({"relative_l2": math.nan}, "relative L2"),
        ({"z": dataclasses.replace(GOOD, rms=1.11)}, "rms"),
        ({"z": dataclasses.replace(GOOD, rms=0.19)}, "rms"),
        ({"z": dataclasses.replace(GOOD, rms=math.nan)}, "rms"),
        ({"z": dataclasses.replace(GOOD, max=7.1)}, "max"),
        ({"z": dataclasses.replace(GOOD, row_rms=1.81)}, "row_rms"),
        ({"z": dataclasses.replace(GOOD, mean=-0.031)}, "mean"),
    ],
)
def test_every_gate_can_fail(changes: dict[str, Any], word: str) -> None:
    figures = Figures(0.05, 1e-3, 1e-2, 0.99, 4e-3, GOOD)
    assert judge(figures, 0.066, "randn") == ()
    missed = judge(dataclasses.replace(figures, **changes), 0.066, "randn")
    assert len(missed) >= 1 and all(word in text for text in missed)


@pytest.mark.parametrize("own_error", [0.0051, math.nan])
def test_the_error_of_a_kernel_is_gated_where_that_is_promised(own_error: float) -> None:
    figures = Figures(0.05, 1e-3, 1e-2, 0.99, own_error, GOOD)
    (missed,) = judge(figures, 0.066, "randn", "high")
    assert "own error" in missed
    assert judge(figures, 0.066, "randn", "accurate") == judge(figures, 0.066, "outlier", "high") == ()


def test_the_floor_is_for_normal_inputs() -> None:
    """With a row of one hot key P is exact, and so is the result."""
    figures = Figures(0.05, 1e-3, 1e-2, 0.99, 4e-3, dataclasses.replace(GOOD, rms=0.19))
    assert judge(figures, 0.066, "outlier") == ()


def test_gates_widen_for_few_elements_only() -> None:
    assert GOOD.limits() == LIMITS and FLOOR == 0.2
    few = dataclasses.replace(GOOD, elements=1000, columns=32).limits()
    assert few["mean"] == pytest.approx(4 / math.sqrt(1000)) and 1.8 < few["row_rms"] < 2.0
    assert few["rms"] == LIMITS["rms"] and few["max"] == LIMITS["max"]


def test_modes_of_arguments_that_attention_lacks_are_skipped_by_name(tiny: None, monkeypatch: Any) -> None:
    """And run as soon as it has them."""
    ((_, _, kernel),) = kernels_of(PLAIN[2], ["fast"], normal(TINY))
    monkeypatch.setattr(measure, "MODES", [Mode("soft", {"scaling": "block", "softness": 3}, (0.07, 0.2))])
    result = run("--quick")
    assert "attention has no argument softness" in result.output
    assert result.exit_code == 1 and "no kernel was measured" in result.output

    def soft(*operands: torch.Tensor, scaling: str, softness: int, **options: Any) -> torch.Tensor:
        assert softness == 3
        return attention(*operands, scaling=scaling, **options)

    monkeypatch.setattr(standard, "attention", soft)
    monkeypatch.setattr(measure, "attention", soft)
    monkeypatch.setattr(measure, "supports", lambda *x, softness, **options: (True, f"{kernel} (for the test)"))
    result = run("--quick", "--precision", "fast")
    assert result.exit_code == 0 and "2 rows passed, 0 failed, 0 skipped" in result.output


def test_the_command_writes_what_it_prints(tiny: None, tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    result = run("--quick", "--precision", "accurate", "--csv", str(target))
    assert result.exit_code == 0, result.output
    with target.open() as file:
        stamp, rows = read_csv(file)
    assert stamp["device"] == "the CPU emulator" and stamp["torch"] == torch.__version__
    printed = result.output.splitlines()
    assert len(rows) == len(printed) - 2 == 2 * len(FP8)  # without titles and summary
    for row, text in zip(rows, printed[1:], strict=False):
        assert row["mode"] in text and row["status"] in text
        assert (row["relative_l2"] != "") == (row["status"] == "pass")
        if row["mode"] in [mode.name for mode in PLAIN]:
            assert f"{float(row['z_rms']):.2f}" in text and row["kernel"].endswith("_exp2")


def test_a_missed_gate_is_the_exit_status(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descale that is 20% off: relative L2 misses its gate, and the z-test its own."""
    monkeypatch.setattr(measure, "attention", lambda *x, **options: attention(*x, **options) * 1.2)
    result = run("--quick", "--precision", "fast")
    assert result.exit_code == 1
    failed = [text for text in result.output.splitlines() if "FAIL" in text]
    assert len([text for text in failed if "z rms" in text]) == 2 * len(PLAIN)
    assert all("relative L2" in text for text in failed[: len(FP8) - 1])


def test_a_kernel_that_is_not_there_is_skipped_with_the_reason(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "supports", lambda *x, **options: (False, "NOT-BUILT: not in this profile"))
    result = run("--quick")
    assert result.exit_code == 1 and "skip: NOT-BUILT: not in this profile" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card_is_a_usage_error() -> None:
    result = run("--device", "cuda")
    assert result.exit_code == 2 and "no CUDA device" in result.output


@pytest.mark.gpu
def test_the_table_on_the_card() -> None:
    """Every row that the built profile serves, large shapes too."""
    rows: list[Row] = list(table("cuda", PRECISIONS))
    assert [line(row) for row in rows if row.status == "FAIL"] == []
    assert any(row.status == "pass" and row.kernel != "torch" for row in rows)


def test_two_devices_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every row of either table, with the figures of the row of the same names, and none where there is
    none; a missed gate is seen."""
    monkeypatch.setattr(measure, "MODES", PLAIN)
    first, second = (record(row) for row in itertools.islice(table("cpu", ("fast",), quick=True), 2))
    only_there = second | {"shape": "(2,8,4096,128)", "relative_l2": "0.25", "own_error": "", "status": "FAIL"}
    stamps = {"device": "the CPU emulator"}, {"device": "NVIDIA H200", "commit": "abc"}
    text = page((stamps[0], [first, second]), (stamps[1], [first, only_there]), ("[a](a.csv)", "[b](b.csv)"))
    assert '* "there": NVIDIA H200 (commit abc), [b](b.csv)' in text.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    here, there = cells[0].index("rel L2"), cells[0].index("rel L2") + 1
    figures = [f"{float(row['relative_l2']):.4f}" for row in (first, second)]
    assert [(row[here], row[there]) for row in cells[2:]] == [
        (figures[0], figures[0]),
        (figures[1], ""),
        ("", "0.2500 FAIL"),
    ]
    assert cells[4][1] == "(2,8,4096,128)" and len({len(row) for row in cells}) == 1
    assert cells[3][-2] == f"{float(second['own_error']):.2e}" and cells[4][-1] == ""


def test_a_table_is_read_back_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    records = [dict.fromkeys(CSV_TITLES, "") | {"mode": "block, smooth K", "status": "pass"}]
    with path.open("w", newline="") as file:
        write_csv(file, {"device": "NVIDIA H200", "commit": "abc"}, records)
    with path.open() as file:
        assert read_csv(file) == ({"device": "NVIDIA H200", "commit": "abc"}, records)
    path.write_text("what,us\nattention,1\n")
    result = run("--quick", "--beside", str(path), str(tmp_path / "page.md"))
    assert result.exit_code == 2 and "is no accuracy table: it has no column inputs" in result.output
    assert "randn" not in result.output, "it was measured first"


def test_a_page_is_made_of_files_without_measuring(tiny: None, tmp_path: Path) -> None:
    """What is measured into a file and rendered from it is what is measured and rendered at once."""
    csv_file, pages = tmp_path / "a.csv", [tmp_path / "1.md", tmp_path / "2.md"]
    other = str(ROOT / "benchmarks" / "results" / "h200" / "accuracy.csv")
    options = ["--precision", "accurate", "--quick", "--csv", str(csv_file)]
    assert run(*options, "--beside", other, str(pages[0])).exit_code == 0
    result = run("--from", str(csv_file), "--beside", other, str(pages[1]))
    assert result.exit_code == 0 and result.output == f"{2 * len(FP8)} rows passed, 0 failed, 0 skipped\n"
    assert pages[0].read_text() == pages[1].read_text() and "[a.csv](a.csv)" in pages[1].read_text()
    for option in (["--quick"], ["--device", "cpu"], ["--csv", str(csv_file)], ["--precision", "high"]):
        result = run("--from", str(csv_file), *option)
        assert result.exit_code == 2 and f"leave out {option[0]}" in result.output


def test_the_committed_page_is_made_of_the_committed_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or a new accuracy.csv is committed and the page goes on showing the old one."""
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    here, there = (f"benchmarks/results/{device}/accuracy.csv" for device in ("emulator", "h200"))
    result = run("--from", here, "--beside", there, "docs/evidence/accuracy_h200.md")
    assert result.exit_code == 0, result.output
    assert (
        Path("docs/evidence/accuracy_h200.md").read_text()
        == (ROOT / "docs" / "evidence" / "accuracy_h200.md").read_text()
    ), f"run `python -m fp8cutlass.accuracy --from {here} --beside {there} docs/evidence/accuracy_h200.md`"


def test_the_stated_rmse_is_asked_of_modes_that_rotate_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """At (2, 8, 4096, 128) alone, and beside the gate of (1, 4, 4096, 128)."""
    asked = {mode.name for mode in MODES if mode.rmse_limit(STATED) == RMSE_LIMIT == 9.5e-3}
    assert asked == {*INTEGER, *(f"{scaling}, {name}" for scaling in SCALINGS for name in ("Hadamard", "both"))}
    assert all(m.rmse_limit(LARGE) == math.inf for m in MODES)
    assert all(m.figure("outlier", STATED) == m.figure("outlier", LARGE) for m in MODES)
    figures = Figures(0.04, 9.4e-3, 1e-2, 0.99, None, None)
    assert judge(figures, 0.05, "outlier", "fast", RMSE_LIMIT) == ()
    for value in (9.6e-3, math.nan):
        (missed,) = judge(dataclasses.replace(figures, rmse=value), 0.05, "outlier", "fast", RMSE_LIMIT)
        assert missed.startswith("RMSE")
    shapes: list[tuple[int, ...]] = []

    def operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        shapes.append(shape)
        return (torch.zeros(0),) * 3

    monkeypatch.setattr(measure, "MODES", [])
    monkeypatch.setattr(measure, "INPUTS", dict.fromkeys(INPUTS, operands))
    monkeypatch.setattr(measure, "exact", lambda q, k, v: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: x)
    always = [shape for _, shape in COLUMNS]
    for device, quick, expected in (
        ("cpu", False, always),
        ("cuda", False, [*always, STATED]),
        ("cuda", True, [SMALL, SMALL]),
    ):
        assert list(table(device, ("fast",), quick=quick)) == [] and shapes == expected
        shapes.clear()


def test_the_row_gate_of_two_terms_is_wider_for_outliers() -> None:
    """There a core's cut of the scores moves rows, by so much; every other figure is held as elsewhere."""
    rows = dataclasses.replace(GOOD, row_rms=2.1)
    figures = Figures(0.05, 1e-3, 1e-2, 0.99, 1e-3, rows)
    assert judge(figures, 0.1, "outlier", "high") == ()
    assert judge(figures, 0.1, "randn", "high") and judge(figures, 0.1, "outlier", "accurate")
    assert judge(figures, 0.1, "K bias", "high")
    assert judge(dataclasses.replace(figures, z=dataclasses.replace(rows, row_rms=2.6)), 0.1, "outlier", "high")
    assert judge(dataclasses.replace(figures, z=dataclasses.replace(rows, max=8.0)), 0.1, "outlier", "high")
