"""Operand types: one record each, whose facts are those of torch, and which all code reads.

Catches a record that was copied and not changed, and a product of types that no instruction multiplies.
"""

import pytest
import torch

from codegen.axes import Number, Operand
from fp8cutlass.manifest import generated_dir, load_manifest


def of(number: Number) -> torch.dtype:
    dtype = getattr(torch, number.torch)
    assert isinstance(dtype, torch.dtype)
    return dtype


@pytest.mark.parametrize("number", list(Number))
def test_facts_are_those_of_torch(number: Number) -> None:
    facts = torch.iinfo(of(number)) if number.integer else torch.finfo(of(number))
    assert (number.limit, 8 * number.bytes) == (facts.max, facts.bits)
    assert torch.tensor([number.ones], dtype=torch.int64).view(torch.uint8)[:4].view(of(number)).tolist() == [1] * 4


@pytest.mark.parametrize("operand", list(Operand))
def test_p_and_v_meet_in_one_product(operand: Operand) -> None:
    """Its two operands may differ in type; what sums them may not."""
    assert operand.p.sums == operand.v.sums


def test_the_manifest_names_the_numbers_of_each_operand() -> None:
    operands = load_manifest(generated_dir()).operands
    assert operands == {str(o): {"qk": o.qk, "p": o.p, "v": o.v} for o in Operand}
