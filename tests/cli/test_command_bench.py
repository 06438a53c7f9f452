"""`fp8cutlass bench`: the repository's benchmarks where they are, else the emulator, and never one for the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.__main__ import cli
from fp8cutlass.cli import bench, main
from fp8cutlass.cli.bench import Problem, median_ms

SMALL = (Problem(1, 2, 40, 64, True), Problem(2, 1, 20, 40, False))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROBLEMS", SMALL)
    monkeypatch.setattr(bench, "_card", lambda: False)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return result


def emulated(output: str) -> bool:
    """Whether the emulator was timed, and said to be one."""
    assert ("(1, 2, 40, 64) causal" in output) == ("The CPU emulator" in output) == ("nothing about a card" in output)
    return "The CPU emulator" in output


def test_without_a_card_the_emulator_is_timed() -> None:
    output = run().output
    assert emulated(output) and "where torch can use a card, which it cannot here" in output
    rows = [line for line in output.splitlines() if "sm89_fwd" in line]
    assert len(rows) == len(SMALL)
    assert "_causal_" in rows[0] and "_full_" in rows[1]
    assert all(float(row.split(") ")[1].split()[1]) > 0 for row in rows)


def test_without_the_repository_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "repository", lambda: None)
    for card in (False, True):
        monkeypatch.setattr(bench, "_card", lambda card=card: card)
        output = run().output
        assert emulated(output) and "the repository, which is not here" in output
    output = " ".join(run("grid", code=2).output.split())
    assert not emulated(output) and "not installed with the package" in output and "grid" in output


def test_arguments_go_to_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options as well, and their exit status comes back: here of a machine without a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "fp8cutlass" in json.loads(run("machine").output)
    assert "--all-kernels" in run("grid", "--help").output
    result = run("grid", "--quick", "--set", "history", code=2)
    assert "benchmarks: measuring needs a CUDA device" in result.output and not emulated(result.output)
    result = run("--set", "llm", "--shape", "1,8,512,64", code=2)  # options alone are those of `grid`
    assert "benchmarks: measuring needs a CUDA device" in result.output and not emulated(result.output)
    assert "'nonsense' is not one of" in run("--set", "nonsense", code=2).output
    assert "No such command 'nonsense'" in run("nonsense", code=2).output


def test_with_a_card_the_benchmarks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_card", lambda: True)
    output = run().output
    assert not emulated(output) and all(f"  {name} " in output for name in cli.commands)
    output = run("--emulator").output
    assert emulated(output) and "Kernels are timed" not in output
    assert "takes no further arguments, got grid" in run("--emulator", "grid", code=2).output


def test_help_is_its_own() -> None:
    for option in ("-h", "--help"):
        output = run(option).output
        assert "--emulator" in output and "python -m benchmarks" in output


def test_the_median_leaves_out_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which builds and loads what later calls use."""
    now = iter([10.0, 10.5, 20.0, 20.1, 30.0, 30.3])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(now))
    calls: list[Path] = []
    assert median_ms(lambda: calls.append(Path()), 3) == pytest.approx(300)
    assert len(calls) == 4
