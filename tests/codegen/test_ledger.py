"""The ledger: every declared point is emitted or rejected, and its rows are exact.

Regressions these catch: a point that falls out of the sum, a row that claims points which another rule rejected or
which are emitted, a count that does not match the row, a committed ledger of another generator.
"""

from __future__ import annotations

import itertools
import re

import pytest

from codegen.ledger import counts, group, render, why
from codegen.legal import check
from codegen.matrix import MATRICES, Matrix
from codegen.select import problem_class, select
from codegen.variant import Variant, axis_text

SELECTION = select()
DECLARED = {v.id: v for matrix in MATRICES for v in matrix.points}
ROW = re.compile(r" *(?P<count>[\d,]+)  (?P<where>everything|\w+=\S+(?: \w+=\S+)*): (?P<message>.+)")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def points_of(where: str, matrix: Matrix) -> set[str]:
    """The ids that a row's `where` stands for: a full product of the named values and of whole axes."""
    named = {} if where == "everything" else dict(part.split("=") for part in where.split(" "))
    assert set(named) <= set(Matrix.AXES), where
    axes = []
    for axis in Matrix.AXES:
        values = getattr(matrix, axis)
        kept = list(values)
        if axis in named:
            texts = named[axis].split("|")
            kept = [x for x in values if axis_text(x) in texts]
            assert len(kept) == len(texts), f"{where}: a value that {axis} does not have"
        axes.append(kept)
    return {
        Variant(family=matrix.family, kind=matrix.kind, **dict(zip(Matrix.AXES, values, strict=True))).id
        for values in itertools.product(*axes)
    }


def test_declared_is_emitted_and_rejected() -> None:
    emitted = {v.id for v in SELECTION.emitted}
    rejected = {v.id for v, _ in SELECTION.rejected}
    assert len(emitted) == len(SELECTION.emitted) and len(rejected) == len(SELECTION.rejected)
    assert not emitted & rejected
    assert emitted | rejected == set(DECLARED)
    assert SELECTION.declared == len(DECLARED) == len(emitted) + len(rejected)


def test_nothing_illegal_is_emitted() -> None:
    assert [(v.id, check(v)) for v in SELECTION.emitted if check(v) is not None] == []


def test_a_rejection_says_what_the_rules_say() -> None:
    for v, rejection in SELECTION.rejected:
        broken = check(v)
        if broken is None:
            assert rejection.rule == "OUTRANKED", v.id
        else:
            assert rejection == broken, v.id


def test_no_problem_is_outranked_as_a_whole() -> None:
    """Where a legal kernel exists, one is emitted: OUTRANKED never leaves a hole."""
    emitted = {problem_class(v) for v in SELECTION.emitted}
    assert {problem_class(v) for v, r in SELECTION.rejected if r.rule == "OUTRANKED"} <= emitted


def test_emitted_is_sorted_by_id() -> None:
    ids = [v.id for v in SELECTION.emitted]
    assert ids == sorted(ids)


@pytest.mark.parametrize("matrix", MATRICES, ids=lambda m: m.name)
def test_every_rejected_point_is_in_exactly_one_row(matrix: Matrix) -> None:
    own = [(v, r) for v, r in SELECTION.rejected if matrix.is_of(v)]
    covered: dict[str, tuple[str, str]] = {}
    for rule, where, message, count in group(own, matrix):
        points = points_of(where, matrix)
        assert len(points) == count, where
        assert not points & covered.keys(), f"{where}: in two rows"
        covered |= dict.fromkeys(points, (rule, message))
    assert covered == {v.id: (r.rule, r.message) for v, r in own}


def test_duplicate_points_are_an_error() -> None:
    """Rather than endless recursion, or a row that counts a point twice."""
    first = SELECTION.rejected[0]
    with pytest.raises(ValueError, match="duplicate"):
        group([first, first], MATRICES[0])


def test_the_text_adds_up() -> None:
    text = render(SELECTION)
    total = re.search(r"^# declared ([\d,]+) = emitted ([\d,]+) \+ rejected ([\d,]+)$", text, re.M)
    assert total is not None
    assert [number(x) for x in total.groups()] == [
        *(SELECTION.declared, len(SELECTION.emitted), len(SELECTION.rejected))
    ]
    by_rule: dict[str, int] = dict.fromkeys(counts(SELECTION), 0)
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(MATRICES)
    for matrix, section in zip(MATRICES, sections, strict=True):
        head, *rules = section.split("\n### ")
        match = re.match(r"(.+): declared ([\d,]+) = emitted ([\d,]+) \+ rejected ([\d,]+)", head)
        assert match is not None
        declared, emitted, rejected = (number(x) for x in match.groups()[1:])
        assert match[1] == matrix.name and declared == matrix.size == emitted + rejected
        for part in rules:
            title, *lines = part.strip().splitlines()
            name, count, reason = re.fullmatch(r"(\S+) \(([\d,]+)\): (.+)", title).groups()  # type: ignore[union-attr]
            rows = [ROW.fullmatch(line) for line in lines]
            assert None not in rows, part
            assert reason == why(matrix.family, name)
            assert sum(number(row["count"]) for row in rows if row) == number(count)
            by_rule[name] += number(count)
            rejected -= number(count)
        assert rejected == 0, f"{matrix.name}: rules do not add up to the rejected points"
    assert by_rule == dict(counts(SELECTION))
