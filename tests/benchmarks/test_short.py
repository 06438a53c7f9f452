"""The tables of short sequences, without a card.

Regressions these catch: a ratio taken the wrong way round or against another peer than the fastest, a target said to be
met where cells are missing or one of them is too slow, a floor that forgets an operand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import short
from benchmarks.__main__ import cli
from benchmarks.report import CALL
from benchmarks.results import FAILED, OK, Row, Writer
from benchmarks.shapes import Shape

STAMP = {"card": "NVIDIA H200", short.COPY: "4"}


def rows(shape: Shape, ours: float, cudnn: float, flash: float) -> list[Row]:
    return [
        Row(shape, name, precision, OK, median_us=us)
        for name, precision, us in ((CALL, "fp8", ours), ("cudnn_bf16", "bf16", cudnn), ("fa3_bf16", "bf16", flash))
    ]


def cell(shape: Shape) -> list[Row]:
    """Ours at 1.2 times the floor; the best peer takes twice as long."""
    us = 1.2 * short.floor_us(shape, STAMP)
    return rows(shape, us, 3 * us, 2 * us)


def test_the_floor_is_all_four_tensors_once() -> None:
    shape = Shape(64, False, 4096, 77, 2, 16, 8)
    moved = 2 * 2 * 64 * (2 * 16 * 4096 + 2 * 8 * 77)
    assert short.floor_us(shape, STAMP) == pytest.approx(moved / 4e12 * 1e6)
    assert math.isnan(short.floor_us(shape, {}))


def test_a_ratio_is_that_of_the_fastest_peer() -> None:
    shape = short.FIRST_CELL
    assert short.ratios(rows(shape, 100.0, 170.0, 150.0)) == {shape: 1.5}
    assert short.ratios(rows(shape, 100.0, 170.0, 150.0)[1:]) == {}  # nothing of ours


def test_targets_are_met_by_all_cells_and_missed_by_one() -> None:
    every = [row for shape in short.batches() for row in cell(shape)]
    assert len(short.batches()) == 32 and short.FIRST_CELL in short.batches()
    assert [met for *_, met in short.verdict(STAMP, every)] == [True] * 4
    slow = [replace(row, median_us=3 * row.median_us) if row.contender == CALL else row for row in every[:3]]
    verdicts = short.verdict(STAMP, [*slow, *every[3:]])
    assert [met for *_, met in verdicts] == [False, True, True, False]  # one cell: the least, and its floor
    assert verdicts[0][1] == pytest.approx(2 / 3) and verdicts[3][1] == pytest.approx(3.6)


def test_without_all_cells_nothing_is_met() -> None:
    every = [row for shape in short.batches()[1:] for row in cell(shape) if shape != short.FIRST_CELL]
    assert [met for *_, met in short.verdict(STAMP, every)] == [False] * 4


def test_the_command_writes_tables_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    failed = Row(short.singles()[0], "fa2_bf16", "bf16", FAILED, "out of memory")
    with path.open("w") as file:
        Writer(file, STAMP).write([*cell(short.FIRST_CELL), failed])
    found = CliRunner().invoke(cli, ["short", "--from", str(path)])
    assert found.exit_code == 1  # something failed
    text = path.with_suffix(".md").read_text()
    assert "| 64 full |  |  |  |  |  | 2.00 |  |  |" in text
    assert "| (32, 32, 512, 64) full | 80.5 | 161.1 | 241.6 |" in text.replace("|  |", "|")
    assert text.splitlines()[-1] == "* fa2_bf16 on (1, 12, 197, 64) full: failed: out of memory"


def test_without_a_card_the_command_says_what_it_needs() -> None:
    found = CliRunner().invoke(cli, ["short"])
    assert found.exit_code == 2 and "needs a CUDA device" in found.output
