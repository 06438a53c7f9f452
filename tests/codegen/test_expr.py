"""Conditions say the same in Python and in C++: random expressions, evaluated by both, one compilation for all.

Regressions these catch: a missing parenthesis in the C++ text, an operator that is spelled or evaluated differently, a
condition of which Python would silently use only a part.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from compilers import run_cpp

from codegen.expr import Binary, Expr, Number, Symbol, lift

X, Y, Z = Symbol("x", "kX"), Symbol("y", "int(sizeof(Y))"), Symbol("z", "z")
ENVIRONMENTS = [dict(zip("xyz", values, strict=True)) for values in itertools.product((1, 3, 32, 101_376), repeat=3)]
EXPRESSIONS = 60


def number_expression(source: random.Random, depth: int) -> Expr:
    kind = source.randrange(5) if depth else source.randrange(2)
    if kind == 0:
        return source.choice((X, Y, Z))
    if kind == 1:
        return Number(source.choice((1, 2, 7, 128)))
    left = number_expression(source, depth - 1)
    if kind == 2:
        return left + number_expression(source, depth - 1)
    if kind == 3:
        return left * source.choice((1, 2, 3))  # small: the C++ side is a 32-bit int
    return left % source.choice((X, Y, Z, Number(5)))  # never zero


def condition(source: random.Random, depth: int) -> Expr:
    if depth and source.random() < 0.6:
        left, right = condition(source, depth - 1), condition(source, depth - 1)
        return left | right if source.random() < 0.5 else left & right
    left, right = number_expression(source, 2), number_expression(source, 2)
    return source.choice((left <= right, left >= right, left > right, left.equals(right)))


def test_python_and_cpp_agree(tmp_path: Path) -> None:
    source = random.Random(0)
    expressions = [number_expression(source, 3) for _ in range(EXPRESSIONS)]
    expressions += [condition(source, 2) for _ in range(EXPRESSIONS)]
    blocks = []
    for env in ENVIRONMENTS:
        values = ",".join(f"int({e.cpp()})" for e in expressions)
        blocks.append(
            f"{{ constexpr int kX = {env['x']}; struct Y {{ char bytes[{env['y']}]; }}; const int z = {env['z']};"
            f' const int all[] = {{{values}}}; for (int value : all) std::printf("%d\\n", value); }}'
        )
    got = [int(line) for line in run_cpp(blocks, tmp_path).split()]
    want = [int(e.value(env)) for env in ENVIRONMENTS for e in expressions]
    assert len(set(want)) > 20 and {0, 1} <= set(want)
    assert got == want


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (X + 1, "kX + 1"),
        ((X + 1) * 2, "(kX + 1) * 2"),
        ((X % 16).equals(0) & (X >= 16), "((kX % 16) == 0) && (kX >= 16)"),
        ((X > 1) | (X <= Y), "(kX > 1) || (kX <= int(sizeof(Y)))"),
        (lift(128) % X, "128 % kX"),
    ],
)
def test_spelling(expression: Expr, text: str) -> None:
    assert expression.cpp() == text


def test_lift_keeps_expressions() -> None:
    assert lift(X) is X
    assert lift(3) == Number(3)
    assert X + 3 == Binary("+", X, Number(3))


def test_an_unknown_symbol_is_an_error() -> None:
    with pytest.raises(KeyError, match="x"):
        (X + 1).value({"y": 1})


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda: 16 <= X <= 32, id="chained comparison"),
        pytest.param(lambda: (X >= 16) and (X <= 32), id="and"),
        pytest.param(lambda: (X >= 16) or (X <= 32), id="or"),
        pytest.param(lambda: not X.equals(0), id="not"),
    ],
)
def test_python_cannot_take_a_part_of_a_condition(misuse: object) -> None:
    """Each of these would evaluate the truth of an Expr, and drop a half of the condition without a word."""
    assert callable(misuse)
    with pytest.raises(TypeError):
        misuse()
