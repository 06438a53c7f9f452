"""The lines at the end of a session say what ran, and nothing that did not.

Regressions these catch: a mutant counted as killed that was skipped, deselected or tried in one case of several; a
failure that a passing phase hides.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from outcomes import mutants_line, outcomes


def report(test: str, mutant: str = "zeros", reason: str = "") -> Any:
    """A report of one test of a mutant that has two cases; there are three mutants."""
    longrepr = ("test.py", 1, reason) if reason else None
    return SimpleNamespace(nodeid=test, user_properties=[("mutant", [mutant, 2, 3])], longrepr=longrepr)


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        ({}, None),
        ({"passed": [SimpleNamespace(nodeid="other", user_properties=[], longrepr=None)]}, None),
        ({"passed": [report("a"), report("b")]}, "mutants killed: 1 of 3; not run in full: 2"),
        ({"passed": [report("a")]}, "mutants killed: 0 of 3; not run in full: 3"),
        (
            {"passed": [report("a")], "skipped": [report("b", reason="no card")]},
            "mutants killed: 0 of 3; not run in full: 3",
        ),
        (
            {"passed": [report("a")], "failed": [report("b")]},
            "mutants killed: 0 of 3; not killed: zeros; not run in full: 2",
        ),
        (
            {"passed": [report("a"), report("b")], "error": [report("b")]},
            "mutants killed: 0 of 3; not killed: zeros; not run in full: 2",
        ),
        (
            {"passed": [report(f"{m}{case}", m) for m in "xyz" for case in (1, 2)]},
            "mutants killed: 3 of 3",
        ),
    ],
)
def test_the_line_of_the_mutants(stats: dict[str, list[Any]], line: str | None) -> None:
    assert mutants_line(stats) == line


def test_the_worst_phase_of_a_test_counts() -> None:
    stats = {"passed": [report("a"), report("b")], "error": [report("a")], "skipped": [report("c", reason="no card")]}
    found = outcomes(stats, "mutant")[("zeros", 2, 3)]
    assert {(x.test, x.status, x.reason) for x in found} == {
        ("a", "failed", ""),
        ("b", "passed", ""),
        ("c", "skipped", "no card"),
    }
    assert outcomes(stats, "edge") == {}
