"""The fuzzer: it judges, finds what is planted, and what it prints runs the case again. On a card, random calls.

Regressions these catch: a fuzzer that passes everything, draws other cases on another machine, or swallows an error.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz_check
import pytest
import torch
from fuzz_cases import CELLS, ORDERS, SOURCES, VALUES, Case, draw
from fuzz_check import Verdict, judge, operands_for
from reference import Operands

from fp8cutlass.call import launch
from fp8cutlass.emulator.emulate import Emulation, emulate
from fp8cutlass.manifest import Variant
from tests import fuzz

ROOT = Path(__file__).resolve().parent.parent
CARD_CASES, CARD_BATCHES = 25, 12


def session(first: int, cases: int, seed: int = 1) -> fuzz.Session:
    return fuzz.fuzz("cpu", seed, first=first, cases=cases, say=lambda text: None)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_calls_on_the_emulator(first: int) -> None:
    ran = session(first, 20)
    assert ran.failures == []
    assert ran.statuses["passed"] >= 10, "most calls are served"


def test_the_emulator_that_a_card_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from a case, with its padding, signs and descales, it is what `attention` runs on the CPU, to the bit; and
    every gate of a card passes it."""
    results: list[bool] = []

    def compared(case: Case, variant: Variant, reference: Any, out: torch.Tensor, *rest: Any) -> list[str]:
        lse, amax, stored, _, options = rest
        emulated = fuzz_check._emulated(case, operands[0], variant, options, "cpu")
        results.append(torch.equal(out, emulated.out) and torch.equal(amax, emulated.amax))
        return judge(case, variant, reference, out, lse, amax, stored, emulated, options)

    def kept(*args: Any) -> tuple[Operands, torch.Tensor | None]:
        operands[:] = operands_for(*args)
        return operands[0], operands[1]

    operands: list[Any] = []
    monkeypatch.setattr(fuzz_check, "is_emulated", lambda variant: False)
    monkeypatch.setattr(fuzz_check, "judge", compared)
    monkeypatch.setattr(fuzz_check, "operands_for", kept)
    ran = session(0, 60)
    assert ran.failures == [] and len(results) == ran.statuses["passed"] and all(results)


@pytest.mark.gpu
@pytest.mark.edge(35)
@pytest.mark.parametrize("batch", range(CARD_BATCHES))
def test_random_calls_on_a_card(batch: int) -> None:
    ran = fuzz.fuzz("cuda", 1, first=batch * CARD_CASES, cases=CARD_CASES, say=lambda text: None)
    assert ran.failures == []
    assert ran.statuses["passed"] >= CARD_CASES // 4, "calls are served"


def test_an_lse_is_held_to_what_float32_can_say() -> None:
    """One key, which smoothing takes away: the LSE is its logit, up to 2415, where float32 has steps of 2.4e-4. Half
    of one is more than the 1e-4 that are allowed of smaller ones, on every device."""
    case = draw(20, 13075, CELLS["cuda"])
    assert case.smooth_k and case.seqlen_k == 1
    assert fuzz_check.run_case(case, "cpu").status == "passed"


def test_cases_are_a_function_of_their_number() -> None:
    assert draw(3, 7, CELLS["cpu"]) == draw(3, 7, CELLS["cpu"]) != draw(3, 8, CELLS["cpu"])
    assert draw(4, 7, CELLS["cpu"]) != draw(3, 7, CELLS["cpu"])
    assert random.Random("1/1").randint(0, 10**9) == 531231601, "Python draws other numbers than it did"


def test_everything_is_drawn() -> None:
    """All values of every axis, both sides of every flag, within the bound on the work."""
    cases = [draw(1, number, CELLS["cuda"]) for number in range(600)]
    assert {c.source for c in cases} == set(SOURCES) and {c.values for c in cases} == set(VALUES)
    assert {order for c in cases for order in c.orders} == set(ORDERS)
    assert {c.alignment for c in cases} == {None, "top_left", "bottom_right"}
    assert {c.scaling for c in cases} == {"tensor", "head", "block", "token"}
    assert {c.precision for c in cases} == {"fast", "balanced", "accurate"}
    for flag in ("smooth_k", "hadamard", "lse", "half"):
        assert {getattr(c, flag) for c in cases} == {True, False}
    assert {c.out for c in cases} == {None, "bf16", "fp16", "e4m3"}
    assert any(c.pick is None for c in cases) and any(c.heads > c.kv_heads for c in cases)
    assert any((c.scale or 0) < 0 for c in cases) and any(c.seqlen_q > c.seqlen_k for c in cases)
    assert all(c.batch * c.heads * c.seqlen_q * c.seqlen_k <= CELLS["cuda"] for c in cases)


def off_by_5_percent(*args: object, **options: object) -> Emulation:
    """A V descale that is wrong, the fault that tolerances pass."""
    result = emulate(*args, **options)  # type: ignore[arg-type]
    result.out = (result.out.float() * 1.05).to(result.out.dtype)
    return result


def last_key_lost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **options: object) -> Emulation:
    """The last key repeats the one before: a tail that is off by one."""
    if k.shape[2] > 1:
        k = k.clone()
        k[:, :, -1] = k[:, :, -2]
    return emulate(q, k, v, *args, **options)  # type: ignore[arg-type]


def one_row_of_another_head(*args: object, **options: object) -> Emulation:
    result = emulate(*args, **options)  # type: ignore[arg-type]
    result.out[:, -1, 0] = result.out[:, 0, -1]
    return result


@pytest.mark.parametrize("fault", [off_by_5_percent, last_key_lost, one_row_of_another_head])
def test_a_planted_fault_is_found_and_can_be_run_again(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean emulator passes these cases: the test above."""
    monkeypatch.setattr(launch, "emulate", fault)
    ran = session(0, 20)
    assert len(ran.failures) >= 3, ran.failures
    command = ran.failures[0].split("  #")[0].split()
    assert command[:7] == "python -m tests.fuzz --device cpu --seed 1".split()[:7]
    assert fuzz.judge_case("cpu", 1, int(command[command.index("--case") + 1])).status == "failed"


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("boom"), "failed"), (IndexError(), "failed"), (KeyError("x"), "failed")]
)
def test_an_error_is_a_failure(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(launch, "emulate", fail)
    served = next(n for n in range(20) if fuzz.judge_case("cpu", 1, n).status != "unserved")
    verdict = fuzz.judge_case("cpu", 1, served)
    assert verdict.status == status and type(error).__name__ in verdict.details[0]


def test_a_lost_device_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "run_case", lambda case, device: Verdict("failed", lost=case.number == 2))
    assert session(0, 50).statuses["failed"] == 3


def test_the_command_line(tmp_path: Path) -> None:
    """Two processes, a report, status 0; one case in full; nothing judged is no success."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.fuzz", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    report = tmp_path / "fuzz.json"
    done = run("--count", "8", "--seed", "5", "--jobs", "2", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert sum(found["statuses"].values()) == 8 and found["failures"] == [] and found["seed"] == 5
    assert "8 cases" in done.stdout
    case = run("--seed", "5", "--case", "3")
    assert case.returncode == 0 and case.stdout.startswith("Case(seed=5, number=3")
    assert run("--minutes", "0").returncode == 1
