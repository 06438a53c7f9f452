"""``pytest --edge-table FILE``: what became of each edge case in this session, and one line that sums it up.

A case is what its tests were: *passed* only if every test that claims it in the sources ran here, none was skipped and
nothing of it is open; *in part* if some passed; *not run* if a test exists and this session left it out.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from edge_cases import CASES, Case
from outcomes import Outcome, outcomes

FOLDER = Path(__file__).resolve().parent
NO_CARD = "Skipped: needs an NVIDIA card"
STATES = ("passed", "in part", "skipped", "failed", "not run", "no test")


def numbers_of(item: pytest.Item) -> list[int]:
    """The cases that a test claims; UsageError for a number that is none."""
    numbers = [number for mark in item.iter_markers("edge") for number in mark.args]
    unknown = [number for number in numbers if number not in CASES]
    if unknown or any(not mark.args for mark in item.iter_markers("edge")):
        raise pytest.UsageError(f"{item.nodeid}: edge{tuple(unknown)} is no case of tests/edge_cases.py")
    return numbers


def declared(folder: Path = FOLDER) -> dict[int, set[str]]:
    """What claims each case in the sources, whatever was selected: ``test_x.py::test_y``, or ``test_x.py`` where a mark
    stands outside of functions, on a parameter or a module."""
    found: dict[int, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "edge(" in text else ():
            place = f"{path.name}::{node.name}" if isinstance(node, ast.FunctionDef) else path.name
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "edge":
                    for argument in call.args:
                        if isinstance(argument, ast.Constant):
                            found.setdefault(argument.value, set()).add(place)
    return found


def left_out(places: set[str], tests: list[Outcome]) -> list[str]:
    """The places that claim a case and of which nothing ran."""
    functions = {_function(test) for test in tests}
    reached = functions | {name.split("::")[0] for name in functions}
    return sorted(places - reached)


def state(case: Case, places: set[str], tests: list[Outcome], *, selected: bool = False) -> str:
    """One of STATES. ``places`` claim the case, ``tests`` ran; ``selected`` says that not all tests were asked for."""
    if not places:
        return "no test"
    counts = Counter(test.status for test in tests)
    if counts["failed"]:
        return "failed"
    if not counts["passed"]:
        return "skipped" if counts["skipped"] else "not run"
    whole = not (counts["skipped"] or case.open or selected or left_out(places, tests))
    return "passed" if whole else "in part"


def line(states: dict[int, str], ran: dict[Any, list[Outcome]]) -> str | None:
    """The summary; None when no test of a case ran or was skipped."""
    if not ran:
        return None
    count = Counter(states.values())
    for_gpu = sum(
        all("gpu" in test.properties for test in ran[number]) for number, what in states.items() if what == "skipped"
    )
    parts = [f"{count['passed']} passed", f"{count['in part']} passed in part", f"{for_gpu} skipped for want of a GPU"]
    if count["skipped"] > for_gpu:
        parts.append(f"{count['skipped'] - for_gpu} skipped for another reason")
    parts += [f"{count['failed']} failed", f"{count['no test']} without a test"]
    if count["not run"]:
        parts.append(f"{count['not run']} not run")
    return "edge cases: " + ", ".join(parts)


def table(
    states: dict[int, str], ran: dict[Any, list[Outcome]], places: dict[int, set[str]], *, selected: bool = False
) -> str:
    """Markdown: a row a case, with the tests behind it and what is missing."""
    rows = ["| # | case | outcome | tests | missing |", "|---|---|---|---|---|"]
    if selected:
        rows.insert(0, "Only some tests were asked for: no case is whole.\n")
    for number, case in CASES.items():
        tests = ran.get(number, [])
        by_function: dict[str, Counter[str]] = {}
        for test in tests:
            by_function.setdefault(_function(test), Counter())[test.status] += 1
        shown = [
            f"{name} ({', '.join(f'{n} {status}' for status, n in sorted(counts.items()))})"
            for name, counts in sorted(by_function.items())
        ]
        missing = sorted({test.reason.removeprefix("Skipped: ") for test in tests if test.status == "skipped"})
        missing += [f"no test: {case.open}"] if case.open else []
        missing += [f"not run: {place}" for place in left_out(places.get(number, set()), tests)]
        cells = (str(number), case.text, states[number], "; ".join(shown), "; ".join(missing))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _function(test: Outcome) -> str:
    """``test_x.py::test_y`` of a parametrised test's id."""
    return test.test.split("[")[0].split("/")[-1]


class EdgeCases:
    """The plugin that tests/conftest.py registers."""

    def __init__(self, config: pytest.Config, left_out: Sequence[Path] = ()) -> None:
        """left_out: files that were not collected, because all of their tests need a card."""
        self.config = config
        self.left_out = {path.name for path in left_out}
        self.target: str | None = config.getoption("--edge-table")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Give the reports of a test the cases that it claims."""
        item.user_properties += [("edge", number) for number in numbers_of(item)]
        if item.get_closest_marker("gpu"):
            item.user_properties.append(("gpu", True))

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Write the table where one was asked for, and the line."""
        complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        for text in self.summary(outcomes(terminalreporter.stats, "edge"), selected=self.selects() or not complete):
            terminalreporter.write_line(text)

    def selects(self) -> bool:
        """Whether options ask for some tests of a file only, or may stop before the last."""
        names = ("keyword", "markexpr", "lf", "deselect", "maxfail", "stepwise")
        return any(self.config.getoption(name, None) for name in names) or any("::" in x for x in self.config.args)

    def with_left_out(self, ran: dict[Any, list[Outcome]], places: dict[int, set[str]]) -> dict[Any, list[Outcome]]:
        """What ran, and as skipped what claims a case in a file that was left out."""
        found = {number: list(tests) for number, tests in ran.items()}
        for number, claimed in places.items():
            for place in sorted(claimed):
                if place.split("::")[0] in self.left_out:
                    found.setdefault(number, []).append(Outcome(place, "skipped", NO_CARD, {"gpu": True}))
        return found

    def summary(self, ran: dict[Any, list[Outcome]], *, selected: bool) -> Iterator[str]:
        """The lines to print; writes the table."""
        places = declared()
        if not selected:
            ran = self.with_left_out(ran, places)
        states = {
            number: state(case, places.get(number, set()), ran.get(number, []), selected=selected)
            for number, case in CASES.items()
        }
        summed = line(states, ran)
        if summed is not None:
            yield summed
        if self.target is not None:
            Path(self.target).write_text(table(states, ran, places, selected=selected), encoding="utf-8")
            yield f"edge cases: table written to {self.target}"
