"""The table of edge cases claims what ran and nothing else.

Regressions these catch: a case counted as passed whose tests were skipped, deselected, in another file or not there; a
mark with a number that is no case.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import edges
import pytest
from edge_cases import CASES, Case
from edges import STATES, EdgeCases, declared, line, numbers_of, state, table
from outcomes import Outcome

PLACES = {"test_a.py::test_x", "test_b.py"}
X, Y = "tests/test_a.py::test_x[1]", "tests/test_b.py::test_y"


def ran(*pairs: tuple[str, str], gpu: bool = False) -> list[Outcome]:
    return [Outcome(test, status, "Skipped: needs a card", {"gpu": True} if gpu else {}) for test, status in pairs]


@pytest.mark.parametrize(
    ("places", "tests", "expected"),
    [
        ((), [], "no test"),
        (PLACES, [], "not run"),
        (PLACES, ran((X, "passed"), (Y, "passed")), "passed"),
        (PLACES, ran((X, "passed")), "in part"),
        (PLACES, ran((X, "passed"), (Y, "skipped")), "in part"),
        (PLACES, ran((X, "skipped"), (Y, "skipped")), "skipped"),
        (PLACES, ran((X, "passed"), (Y, "failed")), "failed"),
        (PLACES, ran((X, "skipped"), (Y, "failed")), "failed"),
    ],
)
def test_what_a_case_is_called(places: Iterable[str], tests: list[Outcome], expected: str) -> None:
    assert state(Case("text"), set(places), tests) == expected


def test_what_is_open_or_not_asked_for_is_not_whole() -> None:
    tests = ran((X, "passed"), (Y, "passed"))
    assert state(Case("text", "the rest"), PLACES, tests) == "in part"
    assert state(Case("text"), PLACES, tests, selected=True) == "in part"


def test_the_line() -> None:
    assert line(dict.fromkeys(CASES, "not run"), {}) is None
    states = dict(zip(CASES, (*STATES, "skipped"), strict=False))
    found: Any = {3: ran((X, "skipped"), gpu=True), 7: ran((X, "skipped"))}
    assert line(states, found) == (
        "edge cases: 1 passed, 1 passed in part, 1 skipped for want of a GPU, 1 skipped for another reason, 1 failed, "
        "1 without a test, 1 not run"
    )


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "CASES", {1: Case("a | b", "the rest"), 2: Case("c")})
    tests = {1: ran((X, "passed"), (X.replace("1", "2"), "skipped"))}
    text = table({1: "in part", 2: "no test"}, tests, {1: PLACES}, selected=False)
    assert text.splitlines()[2:] == [
        "| 1 | a \\| b | in part | test_a.py::test_x (1 passed, 1 skipped) | needs a card; no test: the rest; not run: "
        "test_b.py |",
        "| 2 | c | no test |  |  |",
    ]


def test_files_that_were_left_out_count_as_skipped(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card nothing in tests/gpu is collected; the table must not say that nobody tests these cases."""
    monkeypatch.setattr(edges, "CASES", {1: Case("a"), 2: Case("b"), 3: Case("c")})
    monkeypatch.setattr(edges, "declared", lambda: {1: PLACES, 2: {"test_b.py::test_y"}, 3: {"test_a.py::test_x"}})
    plugin = EdgeCases(pytestconfig, [Path("tests/gpu/test_b.py")])
    plugin.target = str(tmp_path / "table.md")
    (first, _) = plugin.summary({1: ran((X, "passed"))}, selected=False)
    assert first == (
        "edge cases: 0 passed, 1 passed in part, 1 skipped for want of a GPU, 0 failed, 0 without a test, 1 not run"
    )
    assert "| b | skipped | test_b.py::test_y (1 skipped) | needs an NVIDIA card |" in Path(plugin.target).read_text()
    (first, _) = plugin.summary({1: ran((X, "passed"))}, selected=True)
    assert "0 skipped for want of a GPU" in first and "2 not run" in first


def test_marks_are_found_in_sources(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\nROWS = [pytest.param(1, marks=pytest.mark.edge(7))]\n"
        "@pytest.mark.gpu\n@pytest.mark.edge(5, 6)\ndef test_x():\n    pass\n"
    )
    (tmp_path / "helper.py").write_text("import pytest\nEDGE = pytest.mark.edge(9)\n")
    assert declared(tmp_path) == {5: {"test_a.py::test_x"}, 6: {"test_a.py::test_x"}, 7: {"test_a.py"}}


def test_the_cases_are_numbered_and_every_mark_is_one() -> None:
    assert list(CASES) == list(range(1, 61)) and len({case.text for case in CASES.values()}) == 60
    assert set(declared()) <= set(CASES)


@pytest.mark.parametrize("arguments", [(61,), (0, 5), (), ("5",)])
def test_a_mark_of_no_case_is_an_error(arguments: tuple[Any, ...]) -> None:
    marks = [SimpleNamespace(args=arguments)]
    item: Any = SimpleNamespace(nodeid="test", iter_markers=lambda name: marks)
    with pytest.raises(pytest.UsageError, match="no case"):
        numbers_of(item)


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({}, ["tests"], False),
        ({}, ["tests/test_a.py::test_x"], True),
        ({"keyword": "x"}, ["tests"], True),
        ({"markexpr": "not gpu"}, ["tests"], True),
        ({"maxfail": 1}, ["tests"], True),
    ],
)
def test_a_selection_is_noticed(options: dict[str, Any], arguments: list[str], expected: bool) -> None:
    config: Any = SimpleNamespace(args=arguments, getoption=lambda name, default=None: options.get(name, default))
    assert EdgeCases(config).selects() == expected


def test_a_session_writes_what_it_ran(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: Any) -> None:
    """From reports to the file; an interrupted session is a selection."""
    plugin = EdgeCases(pytestconfig)
    plugin.target = str(tmp_path / "table.md")
    monkeypatch.setattr(plugin, "selects", lambda: False)
    report = SimpleNamespace(
        nodeid="tests/proof/test_edges.py::test_lengths[1]", user_properties=[("edge", 3)], longrepr=None
    )
    for status, expected in ((0, 1), (2, 0)):
        written: list[str] = []
        reporter = SimpleNamespace(stats={"passed": [report]}, write_line=written.append)
        monkeypatch.setattr(edges, "declared", lambda: {3: {"test_edges.py::test_lengths"}})
        plugin.pytest_terminal_summary(reporter, status)
        assert written[0].startswith(f"edge cases: {expected} passed, {1 - expected} passed in part, 0 skipped")
        text = Path(plugin.target).read_text()
        assert ("Only some tests" in text) == (status == 2)
        assert "test_edges.py::test_lengths (1 passed)" in text and text.count("no test |") == 59
