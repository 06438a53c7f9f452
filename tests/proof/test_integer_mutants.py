"""The z-test accepts the emulator of 8-bit integers and refuses every kernel that breaks one of their rules.

Regressions these catch: a deviation that grew until a lost sign, a descale of other keys or a sum that
wraps fits inside.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from integers import MUTANTS, PRECISIONS, Problem, problem

RUNS = [pytest.param(p, m, id=f"{p}-{m.__name__}") for p in PRECISIONS for m in MUTANTS[p]]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_clean_emulator_lives(precision: str) -> None:
    p = problem(precision)
    assert p.refusals(p.clean) == []


@pytest.mark.parametrize(("precision", "mutant"), RUNS)
def test_mutant_dies(precision: str, mutant: Callable[[Problem], torch.Tensor]) -> None:
    p = problem(precision)
    out = mutant(p)
    assert not torch.equal(out, p.clean), "the mutant changes nothing"
    assert p.refusals(out), f"{mutant.__name__} survives: {p.z(out)}"
