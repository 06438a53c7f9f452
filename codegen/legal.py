"""Legality: named rules, each with the numbers that decided. The kernels hold the same conditions as static_asserts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from codegen.axes import Scaling
from codegen.derived import Derived
from codegen.families import FAMILIES, derive
from codegen.rule import Numbers, Rule
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True)
class Rejection:
    rule: str
    message: str


def check(v: Variant) -> Rejection | None:
    """The first rule of its family that the variant breaks, or None for a legal one."""
    family = FAMILIES[v.family]
    if (problem := v.problem) not in _OF_PROBLEM:
        _OF_PROBLEM[problem] = _first_broken(v, family.rules_of_choice)
    return _OF_PROBLEM[problem] or _first_broken(v, family.other_rules)


# What the leading rules say of a problem, which is the same for all of its rivals: most points fall there, unmeasured.
_OF_PROBLEM: dict[tuple[object, ...], Rejection | None] = {}


class _Later:
    """What is derived of a variant, once a rule asks for any of it: most points are rejected without."""

    def __init__(self, v: Variant) -> None:
        self._v = v

    def __getattr__(self, name: str) -> object:
        derived = derive(self._v)
        self.__dict__.update(vars(derived))
        return getattr(derived, name)


def _first_broken(v: Variant, rules: Iterable[Rule]) -> Rejection | None:
    d = cast(Derived, _Later(v))
    numbers = Numbers(v, d)
    for rule in rules:
        if rule.broken(v, d, numbers):
            return Rejection(rule=rule.name, message=rule.explain(v, d))
    return None


def kernel_asserts(v: Variant) -> list[tuple[str, str]]:
    """(C++ condition, message) for each rule that a variant is asked and a compiler can check."""
    rules = (r for r in FAMILIES[v.family].rules if r.condition is not None and r.among(v))
    return [(r.condition.cpp(), f"{r.name}: {r.why}") for r in rules if r.condition is not None]


def served(v: Variant) -> tuple[Scaling, ...]:
    """The scaling modes of calls that the kernel computes: one of `block` reads its descales by steps."""
    return tuple(
        s for s in Scaling if s is v.scaling or (s.coarse and v.scaling is Scaling.BLOCK and v.dtype.groups == 1)
    )
