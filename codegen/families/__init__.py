"""The families of kernels. A new one is a folder beside this file and an entry here."""

from __future__ import annotations

from codegen.arch import TARGETS, Card
from codegen.derived import Derived
from codegen.families.base import Family
from codegen.families.warp import WARP
from codegen.families.warpgroup import WARPGROUP
from codegen.variant import Variant

FAMILIES = {family.name: family for family in (WARP, WARPGROUP)}


def derive(v: Variant) -> Derived:
    """What follows from a variant, by the formulas of its family."""
    return FAMILIES[v.family].derive(v)


def families_of(target: str) -> tuple[Family, ...]:
    """The families that serve a target, in order of preference."""
    return tuple(FAMILIES[name] for name in TARGETS[target].families)


def family_of(target: str) -> Family:
    """The family that is made for a target."""
    return families_of(target)[0]


def model_card(target: str) -> Card:
    """The card that stands for a target in the cost model."""
    return family_of(target).card
