"""Legality: named rules, each with the numbers that decided. The kernels hold the same conditions as static_asserts."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.derive import derive
from codegen.rule import Rule
from codegen.rules_sm89 import SM89_RULES
from codegen.rules_sm90 import SM90A_RULES
from codegen.variant import Variant

RULES: dict[str, tuple[Rule, ...]] = {"sm89": SM89_RULES, "sm90a": SM90A_RULES}


@dataclass(frozen=True, kw_only=True)
class Rejection:
    rule: str
    message: str


def check(v: Variant) -> Rejection | None:
    """The first rule of its family that the variant breaks, or None for a legal one."""
    d = derive(v)
    for rule in RULES[v.family]:
        if rule.broken(v, d):
            return Rejection(rule=rule.name, message=rule.explain(v, d))
    return None


def kernel_asserts(family: str) -> list[tuple[str, str]]:
    """(C++ condition, message) for each rule of a family that a compiler can check."""
    return [(r.condition.cpp(), f"{r.name}: {r.why}") for r in RULES[family] if r.condition is not None]
