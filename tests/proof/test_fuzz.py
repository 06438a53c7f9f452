"""The fuzzer: it judges, finds what is planted, and what it prints runs the case again. On a card, random calls.

Regressions these catch: a fuzzer that passes everything, draws other cases on another machine, or swallows an error.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_check
import fuzz_judge
import fuzz_varlen_check
import pytest
import torch
from fuzz_cases import CELLS, ORDERS, SOURCES, VALUES, Case, draw
from fuzz_check import operands_for
from fuzz_judge import Expected, Verdict, judge
from fuzz_varlen import DESCALES, KEYS, LENGTHS, RaggedCase, draw_ragged
from gpu import built_manifest, built_variants
from reference import Operands
from tensor_core import cut_products

from fp8cutlass.call import launch, ragged
from fp8cutlass.choose.target import Target
from fp8cutlass.emulator.emulate import Emulation, emulate
from fp8cutlass.manifest import INTEGER, Variant, generated_dir
from tests import fuzz

ROOT = Path(__file__).resolve().parents[2]
CARD_CASES, CARD_BATCHES = 25, 12


def session(first: int, cases: int, only: str = fuzz.ATTENTION) -> fuzz.Session:
    return fuzz.fuzz("cpu", 1, first=first, cases=cases, only=only, say=lambda text: None)


@pytest.mark.parametrize("only", fuzz.CALLS)
@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_calls_on_the_emulator(first: int, only: str) -> None:
    ran = session(first, 20, only)
    assert ran.failures == []
    assert ran.statuses["passed"] >= 10, "most calls are served"


def test_the_emulator_that_a_card_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from a case, with its padding, signs and descales, it is what `attention` runs on the CPU, to the bit; and
    every gate of a card passes it."""
    results: list[bool] = []

    def compared(case: Case, variant: Variant, reference: Any, out: torch.Tensor, *rest: Any) -> list[str]:
        lse, amax, stored, _, options, seen, v_descale = rest
        emulated = fuzz_check._emulated(case, operands[0], variant, options, "cpu")
        results.append(torch.equal(out, emulated.out) and torch.equal(amax, emulated.amax))
        return judge(case, variant, reference, out, lse, amax, stored, emulated, options, seen, v_descale)

    def kept(*args: Any) -> tuple[Operands, torch.Tensor | None]:
        operands[:] = operands_for(*args)
        return operands[0], operands[1]

    operands: list[Any] = []
    for module in (fuzz_check, fuzz_judge):
        monkeypatch.setattr(module, "is_emulated", lambda variant: False)
    monkeypatch.setattr(fuzz_check, "judge", compared)
    monkeypatch.setattr(fuzz_check, "operands_for", kept)
    ran = session(0, 60)
    assert ran.failures == [] and len(results) == ran.statuses["passed"] and all(results)


def test_the_gates_of_a_card_pass_the_ragged_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their emulation, tile for tile, with scores cut as the tensor core does: against float64, and against itself."""
    at, emulated = Target(generated_dir(), "sm90a", 132), ragged.emulate_sequence
    kernels: set[str] = set()

    def choose(case: Any, inputs: Any, *_: Any) -> Variant:
        return ragged.choose(at, fuzz_varlen_check._ragged_call(case, inputs))[0]

    def as_on_a_card(call: Any, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with cut_products(two_terms=False):
            return emulated(call, *tensors, ragged.choose(at, call)[0])

    def compared(case: Case, variant: Variant, reference: Any, out: torch.Tensor, *rest: Any, **seen: Any) -> list[str]:
        lse, amax, stored, _, options = rest
        kernels.add(variant.mask)
        same = Expected(out, torch.zeros(()) if lse is None else lse, out.abs().amax())
        return judge(case, variant, reference, out, lse, amax, stored, same, options, **seen)

    monkeypatch.setattr(ragged, "emulate_sequence", as_on_a_card)
    monkeypatch.setattr(fuzz_varlen_check, "_kernel", choose)
    monkeypatch.setattr(fuzz_varlen_check, "judge", compared)
    monkeypatch.setattr(fuzz_judge, "is_emulated", lambda variant: False)
    ran = session(0, 40, fuzz.VARLEN)
    assert ran.failures == [] and ran.statuses["passed"] == 40 and kernels == {"full", "causal", "window"}


@pytest.mark.gpu
@pytest.mark.edge(35)
@pytest.mark.parametrize("only", fuzz.CALLS)
@pytest.mark.parametrize("batch", range(CARD_BATCHES))
def test_random_calls_on_a_card(batch: int, only: str) -> None:
    if only == fuzz.VARLEN and not built_variants("ragged"):
        pytest.skip("no kernel of ragged batches is built for this card")
    ran = fuzz.fuzz("cuda", 1, first=batch * CARD_CASES, cases=CARD_CASES, only=only, say=lambda text: None)
    assert ran.failures == []
    least = CARD_CASES // (4 if built_manifest().profile == "release" else 10)  # others lack kernels for some calls
    assert ran.statuses["passed"] >= least, "calls are served"


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
    windows = [c.window for c in cases if c.window is not None]
    assert {(left < 0, right < 0) for left, right in windows} == {(x, y) for x in (False, True) for y in (False, True)}
    assert {c.scaling for c in cases} == {"tensor", "head", "block", "token"}
    assert {c.precision for c in cases} == {"fast", "balanced", "accurate", *INTEGER}
    for flag in ("smooth_k", "hadamard", "lse", "half"):
        assert {getattr(c, flag) for c in cases} == {True, False}
    assert {c.out for c in cases} == {None, "bf16", "fp16", "e4m3"}
    assert any(c.pick is None for c in cases) and any(c.heads > c.kv_heads for c in cases)
    assert any((c.scale or 0) < 0 for c in cases) and any(c.seqlen_q > c.seqlen_k for c in cases)
    assert all(c.batch * c.heads * c.seqlen_q * c.seqlen_k <= CELLS["cuda"] for c in cases)


def test_ragged_batches_of_every_kind_are_drawn() -> None:
    """Lengths, windows, what of a sequence is used, padding, NaN, types; within the bound on the work."""
    cases = [draw_ragged(1, number, CELLS["cuda"]) for number in range(600)]
    assert draw_ragged(1, 7, 1 << 16) == draw_ragged(1, 7, 1 << 16) != draw_ragged(2, 7, 1 << 16)
    assert {c.source for c in cases} == {"bf16", "fp16", "e4m3"} and {c.out for c in cases} == {None, "bf16", "fp16"}
    assert {value for c in cases for value in c.values} == set(VALUES) and {c.descales for c in cases} == set(DESCALES)
    assert len(LENGTHS) == 6 and len(set(KEYS)) == 4 and {c.alignment for c in cases} == {"top_left", "bottom_right"}

    def drawn(holds: Callable[[RaggedCase], bool]) -> int:
        return sum(map(holds, cases))

    assert drawn(lambda c: c.ends == (-1, -1)) > 60 and drawn(lambda c: c.ends == (-1, 0)) > 60
    assert drawn(lambda c: min(c.ends) >= 0) > 60 and drawn(lambda c: c.ends[0] < 0 < c.ends[1]) > 10
    assert drawn(lambda c: max(c.window) > max(c.keys)) > 60, "wider than any sequence"
    assert drawn(lambda c: 0 in c.rows and 1 in c.keys) > 20 and drawn(lambda c: 0 in c.keys) > 60
    assert drawn(lambda c: len(c.rows) > 1 and len(set(c.rows)) == 1) > 60 and drawn(lambda c: max(c.rows) > 900) > 20
    assert drawn(lambda c: c.used_rows is not None) > 60 and drawn(lambda c: c.used_keys is not None) > 60
    assert drawn(lambda c: c.poisoned >= 0) > 60 and drawn(lambda c: c.before > 0) > 60 < drawn(lambda c: c.behind > 0)
    assert drawn(lambda c: c.heads > c.kv_heads) > 60 and drawn(lambda c: c.rows != c.keys) > 60
    assert all(c.heads * sum(m * n for m, n in zip(c.rows, c.keys, strict=True)) <= CELLS["cuda"] for c in cases)


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
    assert command[:9] == "python -m tests.fuzz --device cpu --seed 1 --call attention".split()[:9]
    assert fuzz.judge_case("cpu", 1, int(command[command.index("--case") + 1])).status == "failed"


def descales_of_other_lanes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Emulation:
    """K's integers with the descales of the keys of another lane."""
    q_descale, k_descale, v_descale = rest
    k_descale = k_descale.roll(1, 2) if k.dtype == torch.int8 else k_descale
    return emulate(q, k, v, q_descale, k_descale, v_descale, **options)


def descales_of_other_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
) -> Emulation:
    """V's integers with the descales of the keys behind them."""
    q_descale, k_descale, v_descale = rest
    v_descale = v_descale.roll(1, 2) if v.dtype == torch.int8 else v_descale
    return emulate(q, k, v, q_descale, k_descale, v_descale, **options)


@pytest.mark.parametrize(
    ("fault", "precision"), [(descales_of_other_lanes, "int8"), (descales_of_other_tokens, "int8_full")]
)
def test_a_fault_of_integers_is_found(fault: object, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [n for n in range(400) if draw(1, n, CELLS["cpu"]).precision == precision][:8]
    assert len(numbers) == 8 and all(fuzz.judge_case("cpu", 1, n).status == "passed" for n in numbers)
    monkeypatch.setattr(launch, "emulate", fault)
    assert sum(fuzz.judge_case("cpu", 1, n).status == "failed" for n in numbers) >= 3


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
    for name in ("run_case", "run_ragged_case", "run_paged_case", "run_masked_case"):
        monkeypatch.setattr(fuzz, name, lambda case, device: Verdict("failed", lost=case.number == 2))
    assert [session(0, 50, only).statuses["failed"] for only in fuzz.CALLS] == [3, 3, 3, 3]


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cases one is of a ragged batch, by each of the ways of LIMITS, one of pages and one of masks. The line
    that runs it again says so."""
    monkeypatch.setattr(fuzz, "run_case", lambda case, device: Verdict("failed" if case.number == 4 else "passed"))
    monkeypatch.setattr(
        fuzz, "run_paged_case", lambda case, device: Verdict("failed" if case.number == 5 else "passed")
    )
    monkeypatch.setattr(fuzz, "run_ragged_case", lambda case, device: Verdict("failed"))
    monkeypatch.setattr(
        fuzz, "run_masked_case", lambda case, device: Verdict("failed" if case.number == 6 else "passed")
    )
    ran = fuzz.fuzz("cpu", 1, cases=12, say=lambda text: None)
    assert [text.split("  #")[0].split()[7:] for text in ran.failures] == [
        ["--call", call, "--case", str(number)]
        for call, number in (
            ("varlen", 3),
            ("attention", 4),
            ("kvcache", 5),
            ("masks", 6),
            ("varlen", 7),
            ("varlen", 11),
        )
    ]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, a report, status 0; one case in full; nothing judged is no success."""

    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fuzz", *options])
        return fuzz.main(), capsys.readouterr().out

    report = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "tests.fuzz", "--count", "8", "--seed", "5", "--jobs", "2", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert sum(found["statuses"].values()) == 8 and found["failures"] == [] and found["seed"] == 5
    assert "8 cases" in done.stdout
    begins = {"varlen": "RaggedCase(", "kvcache": "PagedCase(", "masks": "MaskedCase(call=Case("}
    for options, begin in (((), "Case("), *((("--call", call), begin) for call, begin in begins.items())):
        status, said = run("--seed", "5", "--case", "3", *options)
        assert status == 0 and said.startswith(f"{begin}seed=5, number=3")
    assert run("--minutes", "0")[0] == 1
