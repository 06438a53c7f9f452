"""The cost model of a variant's family. It ranks where no measurement exists."""

from __future__ import annotations

from codegen import model_sm89, model_sm90
from codegen.arch import Card
from codegen.cost import Cost, Shape
from codegen.variant import Variant

_OF_FAMILY = {"sm89": model_sm89.cost, "sm90a": model_sm90.cost}


def cost(v: Variant, shape: Shape, card: Card) -> Cost:
    return _OF_FAMILY[v.family](v, shape, card)
