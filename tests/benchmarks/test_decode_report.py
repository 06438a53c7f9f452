"""Tables, figure, CSV and command of `decode`.

Regressions these catch: a best peer that is not the fastest; a ratio upside down; a peer of the other precision; a
skewed step that is compared with another number of keys; rows that a CSV does not give back; a wrong row that is drawn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import decode, decode_commands, decode_report, machine
from benchmarks.__main__ import cli
from benchmarks.decode import DecodeTime, row_of
from benchmarks.peers import Own
from benchmarks.plot import PlotError
from benchmarks.results import FAILED, OK, UNAVAILABLE, WRONG, read_records, write_records
from benchmarks.steps import STEPS, Step, even

STAMP = {"card": "NVIDIA H200", "commit": "abc"}
EVEN = even(8, 11776)
SKEWED = next(step for step in STEPS if step.name == "1 x 65536 + 7 x 4096")


def timed(step: Step, name: str, us: float, l2: str = "cold") -> DecodeTime:
    precision = "bf16" if "bf16" in name else "fp8"
    tb_s = step.bytes_of(1 if precision == "fp8" else 2) / us * 1e-6
    return row_of(step, l2, name, precision, OK, median_us=us, min_us=us - 1, tb_s=tb_s, launches=3, replays=10)


ROWS = [
    timed(EVEN, "ours", 50.0), timed(EVEN, "ours_cut", 52.0), timed(EVEN, "ours_call", 54.0),
    timed(EVEN, "ours_step", 99.0), timed(EVEN, "ours_p16", 60.0), timed(EVEN, "ours_hnd", 48.0),
    timed(EVEN, "ours_native", 45.0), timed(EVEN, "xqa_fp8", 75.0), timed(EVEN, "fa3_fp8", 80.0),
    timed(EVEN, "flashinfer_fp8", 77.0), timed(EVEN, "fa3_bf16", 110.0), timed(EVEN, "xqa_bf16", 120.0),
    timed(SKEWED, "ours", 55.0), timed(SKEWED, "xqa_fp8", 150.0), timed(SKEWED, "ours", 54.0, "hot"),
    timed(replace(EVEN, queries=4), "ours", 51.0), timed(EVEN, "append_nhd", 3.0),
    row_of(EVEN, "hot", "fa3_fp8", "fp8", WRONG, "far off"),
    row_of(EVEN, "hot", "flashinfer_fp8", "", UNAVAILABLE, "not there"),
]  # fmt: skip


def line(text: str, begin: str, section: str) -> list[str]:
    """The cells of a line of a section's table."""
    of = text.split(f"### {section}")[1].split("###")[0]
    (found,) = (x for x in of.splitlines() if x.startswith(begin))
    return [x.strip() for x in found.strip("|").split("|")]


def test_ours_stands_beside_the_fastest_of_each_precision() -> None:
    text = decode_report.markdown(STAMP, ROWS)
    assert "on NVIDIA H200" in text and "* commit: abc" in text
    cells = line(text, "| 8 x 11776 | 1 | 128 | cold", "Ours and the fastest peers")
    rate = f"{EVEN.bytes_of(1) / 50.0 * 1e-6:.2f}"
    assert cells[4:9] == ["50.0", rate, "52.0", "54.0", "99.0"]
    assert cells[9] == "xqa_fp8 75.0" and cells[11] == "fa3_bf16 110.0" and cells[13:] == ["1.50", "2.20"]
    assert float(cells[12]) == pytest.approx(EVEN.bytes_of(2) / 110.0 * 1e-6, abs=0.01)


def test_layouts_are_relative_to_native_pages() -> None:
    text = decode_report.markdown(STAMP, ROWS)
    cells = line(text, "| 8 x 11776 | 1 | 128 | cold", "Layouts of pages, our kernel")
    assert cells[4:11] == ["50.0", "60.0", "48.0", "45.0", "0.90", "0.75", "0.94"]


def test_skewed_and_longer_steps_are_held_to_their_base() -> None:
    text = decode_report.markdown(STAMP, ROWS)
    section = "Times of a step over those of an even one, or of one query"
    assert line(text, f"| {SKEWED.name} ", section) == [SKEWED.name, EVEN.name, "cold", "1.10", "2.00", "", ""]
    assert line(text, "| 8 x 11776, 4 queries", section)[1:4] == [EVEN.name, "cold", "1.02"]


def test_what_was_not_timed_is_said_once() -> None:
    missing = row_of(EVEN, "cold", "xqa_bf16", "", UNAVAILABLE, "not there")
    text = decode_report.markdown(STAMP, [*ROWS, missing, replace(missing, l2="hot")])
    assert text.count("* xqa_bf16: not there") == 1
    assert "* fa3_fp8 on 8 x 11776, 1, 128, hot: wrong: far off" in text


def test_a_csv_gives_back_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    with path.open("w", encoding="utf-8") as file:
        write_records(file, STAMP, DecodeTime, ROWS)
    stamp, rows = read_records(path, DecodeTime)
    assert stamp == STAMP and [replace(row, tb_s=None) for row in rows] == [replace(row, tb_s=None) for row in ROWS]
    rates = [[row.tb_s for row in of if row.tb_s is not None] for of in (rows, ROWS)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-5)
    path.write_text(path.read_text().replace(",wrong,", ",fine,"))
    with pytest.raises(ValueError, match="status 'fine'"):
        read_records(path, DecodeTime)
    path.write_text("step,us\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read_records(path, DecodeTime)


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    decode_report.draw(STAMP, ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
    with pytest.raises(PlotError, match="nothing to plot"):
        decode_report.draw(STAMP, [row for row in ROWS if row.median_us is None], tmp_path / "y.png")


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    asked: list[tuple[str, bool]] = []

    def measure(step: Step, cold: bool, sources: object, settings: object) -> list[DecodeTime]:
        asked.append((step.name, cold))
        return [timed(step, "ours", 50.0, "cold" if cold else "hot")]

    monkeypatch.setattr(decode_commands, "need_card", lambda *_: None)
    monkeypatch.setattr(Own, "available", lambda self: None)
    monkeypatch.setattr(machine, "stamp", lambda commit: {"card": "NVIDIA H200", "commit": commit})
    monkeypatch.setattr(decode, "measure", measure)
    return asked


def test_the_command_writes_its_files_and_writes_them_again(on_a_card: list[tuple[str, bool]], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["decode", "--steps", "8 x 8192", "--steps", "1 x 1024", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    names = [step.name for step in STEPS if "8 x 8192" in step.label or "1 x 1024" in step.label]
    assert on_a_card == [(name, cold) for cold in (True, False) for name in names] and len(set(names)) > 1
    table = (tmp_path / "decode.md").read_text()
    (tmp_path / "decode.md").unlink()
    again = CliRunner().invoke(cli, ["decode", "--from", str(tmp_path / "decode.csv")])
    assert again.exit_code == 0 and (tmp_path / "decode.md").read_text() == table and len(on_a_card) == 2 * len(names)


def test_the_page_has_cold_steps_and_links_to_all(tmp_path: Path) -> None:
    csv, at = tmp_path / "results" / "decode.csv", tmp_path / "docs" / "decode_h200.md"
    text = decode_report.page(STAMP | {"torch": "2.11"}, ROWS, csv, at)
    assert "NVIDIA H200, 2.11, commit abc" in text and "](../results/decode.csv)" in text
    assert "](../results/decode.png)" in text and "| cold |" in text and "| hot |" not in text
    assert line(text, "| 8 x 11776 | 1 | 128", "Ours and the fastest peers")[9] == "xqa_fp8 75.0"
    for folder in (csv.parent, at.parent):
        folder.mkdir()
    with csv.open("w", encoding="utf-8") as file:
        write_records(file, STAMP, DecodeTime, ROWS)
    done = CliRunner().invoke(cli, ["decode", "--from", str(csv), "--page", str(at)])
    assert done.exit_code == 0 and at.read_text() == decode_report.page(*read_records(csv, DecodeTime), csv, at)


def test_the_command_says_what_is_amiss(
    on_a_card: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        return CliRunner().invoke(cli, ["decode", "--out", str(tmp_path), *arguments]).exit_code

    assert run("--steps", "no such step") == 2 and run("--page", "x.md") == 2 and not on_a_card
    assert run("--budget", "0") == 1 and len(on_a_card) == 1, "what is left out is not success"
    (tmp_path / "other.csv").write_text("step,us\n1,2\n")
    assert run("--from", str(tmp_path / "other.csv")) == 2
    failed = row_of(EVEN, "cold", "ours", "fp8", FAILED, "no launch")
    monkeypatch.setattr(decode, "measure", lambda *_: [failed])
    assert run("--steps", "1 x 1024", "--l2", "cold") == 1
