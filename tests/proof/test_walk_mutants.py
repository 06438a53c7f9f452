"""Broken walks are noticed: by the gates of the fuzzer, and by the test that each mutant names.

Regressions these catch: a gate or a test of ragged batches and windows that a defect passes; a clean walk that they
refuse; a header whose faults no property of the host test sees.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import ROOT, nvcc
from fuzz_varlen_check import run_ragged_case
from walk_mutants import CASES, HEADER_FAULTS, MUTANTS, HeaderFault, WalkMutant

WALK = ROOT / "include" / "fp8cutlass" / "walk"
names = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)


@pytest.mark.parametrize("case", CASES, ids=["full", "causal", "window", "used", "fp8"])
def test_the_clean_walk_lives(case: Any) -> None:
    verdict = run_ragged_case(case, "cpu")
    assert verdict.status == "passed", verdict.details


@names
def test_the_gates_refuse_a_broken_walk(mutant: WalkMutant) -> None:
    with torch.no_grad(), mutant.plant():
        verdict = run_ragged_case(mutant.case, "cpu")
    assert verdict.status == "failed" and not verdict.details[0].startswith("raised"), f"{mutant.name} survives"


@names
def test_a_named_test_notices_a_broken_walk(mutant: WalkMutant) -> None:
    """Unbroken, it passes as a test of tests/api/test_varlen.py."""
    with mutant.plant(), pytest.raises(AssertionError):
        mutant.killer()


def broken(fault: HeaderFault, folder: Path) -> list[str]:
    """What walk_test says of headers with a fault."""
    include = folder / "include"
    shutil.copytree(ROOT / "include", include)
    path = include / "fp8cutlass" / "walk" / fault.header
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.header} has {text.count(fault.old)} times {fault.old!r}"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    program = folder / "walk_test"
    source = ROOT / "tests" / "host" / "walk_test.cpp"
    built = nvcc("-x", "c++", "-cudart", "none", source, "-o", program, include=include)
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True).stdout.splitlines()


def test_header_faults_are_noticed(tmp_path: Path) -> None:
    """Each by the property that it names; the clean headers pass (tests/native/test_walk_host.py)."""
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda n: broken(HEADER_FAULTS[n], tmp_path / str(n)), range(len(HEADER_FAULTS))))
    for fault, lines in zip(HEADER_FAULTS, said, strict=True):
        failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
        assert any(text.startswith(fault.kills) for text in failed), f"{fault.name} survives: {lines}"
