"""Typed conditions: one object that Python evaluates for the ledger and C++ gets as a static_assert.

A symbol has a Python value (looked up in a dict) and a C++ spelling. The operators: + * %, the comparisons <= >= > and
`equals`, `|` (or) and `&` (and).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

Env = Mapping[str, int]


@dataclass(frozen=True)
class Expr:
    """Base: build with the operators below; `value(env)` is int or bool, `cpp()` and `python()` are its spellings."""

    @cached_property
    def value(self) -> Callable[[Env], int]:
        """Compiled, as the points of the matrix take hundreds of thousands of evaluations."""
        compiled: Callable[[Env], int] = eval(f"lambda env: {self.python()}", {})
        return compiled

    def python(self) -> str:
        raise NotImplementedError

    def cpp(self) -> str:
        raise NotImplementedError

    def __bool__(self) -> bool:
        # `a <= x <= b`, `and`, `or` and `not` would silently keep a part of a condition.
        raise TypeError("a condition has no truth value in Python: use & and |, and two comparisons instead of a chain")

    def __add__(self, other: Expr | int) -> Expr:
        return Binary("+", self, lift(other))

    def __mul__(self, other: Expr | int) -> Expr:
        return Binary("*", self, lift(other))

    def __mod__(self, other: Expr | int) -> Expr:
        return Binary("%", self, lift(other))

    def __le__(self, other: Expr | int) -> Expr:
        return Binary("<=", self, lift(other))

    def __ge__(self, other: Expr | int) -> Expr:
        return Binary(">=", self, lift(other))

    def __gt__(self, other: Expr | int) -> Expr:
        return Binary(">", self, lift(other))

    def equals(self, other: Expr | int) -> Expr:
        return Binary("==", self, lift(other))

    def __or__(self, other: Expr) -> Expr:
        return Binary("||", self, other)

    def __and__(self, other: Expr) -> Expr:
        return Binary("&&", self, other)


@dataclass(frozen=True)
class Symbol(Expr):
    name: str
    spelling: str

    def python(self) -> str:
        return f"env[{self.name!r}]"

    def cpp(self) -> str:
        return self.spelling


@dataclass(frozen=True)
class Number(Expr):
    number: int

    def python(self) -> str:
        return str(self.number)

    def cpp(self) -> str:
        return str(self.number)


_IN_PYTHON = {"||": "or", "&&": "and"}  # of two conditions, which are bool; other operators are spelled alike


@dataclass(frozen=True)
class Binary(Expr):
    operator: str
    left: Expr
    right: Expr

    def python(self) -> str:
        return f"({self.left.python()} {_IN_PYTHON.get(self.operator, self.operator)} {self.right.python()})"

    def cpp(self) -> str:
        def side(e: Expr) -> str:
            return f"({e.cpp()})" if isinstance(e, Binary) else e.cpp()

        return f"{side(self.left)} {self.operator} {side(self.right)}"


def lift(value: Expr | int) -> Expr:
    return value if isinstance(value, Expr) else Number(value)
