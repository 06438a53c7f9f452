"""What follows from the axes of a variant, by the formulas of its family."""

from __future__ import annotations

from codegen import derive_sm89, derive_sm90
from codegen.derived import Derived
from codegen.variant import Variant

_OF_FAMILY = {"sm89": derive_sm89.derive, "sm90a": derive_sm90.derive}


def derive(v: Variant) -> Derived:
    return _OF_FAMILY[v.family](v)
