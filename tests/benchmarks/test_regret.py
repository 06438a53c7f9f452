"""How far the choice is from the best: what counts as a choice, who is told apart, and when enough is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from test_benchmarks import row

from benchmarks import regret, results
from benchmarks.__main__ import cli
from benchmarks.regret import Choice, groups, judge, markdown, met, share, tuned
from benchmarks.results import FAILED, WRONG, Row
from benchmarks.shapes import Shape, held_out, select, square

CELL = square(32, 16, 512, 128, False)  # of the grid, which the table is decided on
HELD = next(shape for shape in select("named") if held_out(shape))
FREE = next(shape for n in range(700, 800) if not held_out(shape := square(1, 5, n, 64, False)))  # in no set


def timed(shape: Shape, chosen: float, *others: float) -> list[Row]:
    """Rows of a shape: the chosen kernel's, then its rivals'."""
    rows = [row(shape, "fp8cutlass", chosen, kernel="chosen")]
    return rows + [row(shape, "fp8cutlass", us, kernel=f"rival{i}", chosen=False) for i, us in enumerate(others)]


def test_the_loss_is_against_the_best_of_the_run() -> None:
    (choice,) = judge([*timed(CELL, 103.0, 110.0, 100.0), row(CELL, "fa3_fp8", 1.0)])
    assert (choice.chosen, choice.best, choice.rivals) == ("chosen", "rival1", 3)
    assert choice.loss == pytest.approx(1.03) and choice.close
    (choice,) = judge(timed(CELL, 103.2, 100.0))
    assert not choice.close
    (choice,) = judge(timed(CELL, 99.0, 100.0))
    assert choice.loss == 1 and choice.best == "chosen"


def test_a_chosen_kernel_that_failed_has_lost() -> None:
    """A wrong result is not fast, whoever gave it."""
    broken = Row(CELL, "fp8cutlass", "fp8", FAILED, "no", kernel="chosen")
    (choice,) = judge([broken, *timed(CELL, 9.0, 10.0)[1:]])
    assert choice.loss == float("inf") and not met([choice])
    fast = Row(CELL, "fp8cutlass", "fp8", WRONG, "far off", kernel="rival", chosen=False, median_us=1.0)
    (choice,) = judge([*timed(CELL, 10.0, 10.1), fast])
    assert choice.loss == 1
    assert "rival: wrong on (32, 16, 512, 128) full: far off" in markdown({}, [*timed(CELL, 10.0, 10.1), fast])


def test_groups_tell_what_was_known() -> None:
    choices = judge([*timed(CELL, 1, 2), *timed(HELD, 1, 2), *timed(FREE, 1, 2)])
    names = {name: [choice.shape for choice in group] for name, group in groups(choices).items()}
    assert names == {
        "all shapes": [CELL, HELD, FREE],
        "tuned on": [CELL],
        "not tuned on": [HELD, FREE],
        "held out by their hash": [HELD],
    }


def test_a_shape_with_one_kernel_is_no_success() -> None:
    alone = judge(timed(CELL, 1.0))
    assert not met(alone) and not met([])
    assert "1 shapes have one kernel and do not count" in markdown({}, timed(CELL, 1.0))
    assert met(judge([*timed(CELL, 1.0), *timed(HELD, 1.0, 2.0)]))


def test_95_of_a_hundred_in_every_group() -> None:
    def choices(shape: Shape, good: int, bad: int) -> list[Choice]:
        return [Choice(shape, "a", 1.0, "a", 1.0, 2)] * good + [Choice(shape, "a", 1.2, "b", 1.0, 2)] * bad

    assert share(choices(CELL, 95, 5)) == 0.95
    assert met(choices(CELL, 95, 5)) and not met(choices(CELL, 94, 6))
    # A good mean over all does not hide what was not tuned on.
    assert not met(choices(CELL, 990, 0) + choices(FREE, 9, 1))
    assert met(choices(CELL, 990, 0) + choices(FREE, 19, 1))


def test_losers_are_listed_the_worst_first() -> None:
    text = markdown({"card": "NVIDIA H200"}, [*timed(CELL, 11, 10), *timed(HELD, 15, 10), *timed(FREE, 10.2, 10)])
    lines = text.splitlines()
    assert "| all shapes | 3 | 1 | 33.3% | 1.189 | 1.500 | 2.0 |" in lines
    assert "asked for: 95% in every group: missed" in lines
    losers = lines[lines.index("### not close") + 4 :]
    assert [line.split(" | ")[0].strip("| ") for line in losers if line] == [HELD.label, CELL.label]
    assert "| held out | chosen<br>rival0 |" in losers[0] and "| tuned on |" in losers[1]


def test_a_run_is_judged_again_from_its_file(tmp_path: Path) -> None:
    for chosen, code in ((10.0, 0), (12.0, 1)):
        path = tmp_path / "run.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            results.Writer(file, {"card": "NVIDIA H200"}).write(timed(FREE, chosen, 10.1))
        found = CliRunner().invoke(cli, ["regret", "--from", str(path)])
        assert found.exit_code == code, found.output
        assert f"in every group: {'missed' if code else 'met'}" in found.output


def test_cells_of_the_table_were_tuned_on() -> None:
    assert all(map(tuned, select("cells")))
    assert not any(tuned(shape) for shape in select("named") if held_out(shape))
    assert regret.CLOSE == 1.03 and regret.SHARE == 0.95
