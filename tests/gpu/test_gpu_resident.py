"""Kernels that keep a head's K and V in shared memory: the bits of the variant with tiles of 128 keys on packed
operands, whatever these hold and however they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import attend_source, built_manifest
from residents import kept, made

from fp8cutlass.choose.resident import reference
from fp8cutlass.manifest import Resident, Variant

MANIFEST = built_manifest()
RESIDENTS = MANIFEST.residents
CASES = [
    (r, v)
    for r in RESIDENTS
    for causal in (False, True)
    if (v := reference(MANIFEST, r.head_dim, r.source, causal=causal)) is not None
]
IDS = [f"{r.id}-{v.mask}" for r, v in CASES]


def assert_same_bits(resident: Resident, variant: Variant, operands: list[torch.Tensor], **options: Any) -> None:
    packed = attend_source(variant, *operands, leave_q=False, **options)
    for _ in range(2):
        found = kept(resident, variant, operands, **options)
        for a, b in zip(found, packed, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("resident", "variant"), CASES, ids=IDS)
class TestBits:
    @pytest.mark.parametrize("part", [1.0, 0.77, 0.51, 0.0], ids=["all", "most", "half", "one"])
    def test_lengths(self, resident: Resident, variant: Variant, part: float) -> None:
        """Whole tiles and what is left of them; one key."""
        keys = max(1, int(part * resident.keys))
        for rows in (keys, 1, 130):
            assert_same_bits(resident, variant, made(resident, 2, 3, 3, rows, keys), causal_offset=keys - rows)

    def test_many_items(self, resident: Resident, variant: Variant) -> None:
        """More than CTAs at a time, so that shared memory is used again; heads that are shared by several."""
        assert_same_bits(resident, variant, made(resident, 90, 8, 8, 70, resident.keys // 2 + 5))
        assert_same_bits(resident, variant, made(resident, 60, 12, 4, 66, resident.keys))

    def test_heads_that_are_left(self, resident: Resident, variant: Variant) -> None:
        """A few more than CTAs: these are cut, the others whole."""
        assert_same_bits(resident, variant, made(resident, 69, 4, 4, 300, resident.keys - 9))
        assert_same_bits(resident, variant, made(resident, 35, 8, 4, 300, resident.keys - 9))

    def test_a_head_cut_over_ctas(self, resident: Resident, variant: Variant) -> None:
        keys = resident.keys - 3
        assert_same_bits(resident, variant, made(resident, 1, 6, 2, 1000, keys), causal_offset=keys - 1000)

    def test_layouts_and_columns(self, resident: Resident, variant: Variant) -> None:
        """Sequences before heads, heads that are expanded, and rows narrower than the kernel's."""
        q, k, v = made(resident, 2, 4, 4, 90, resident.keys, resident.head_dim - 24)
        swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert_same_bits(resident, variant, [swapped[0], k, swapped[2]])
        assert_same_bits(resident, variant, [q, swapped[1], v[:, :1].expand(-1, 4, -1, -1)])

    def test_values_that_are_seldom(self, resident: Resident, variant: Variant) -> None:
        """Zeros, infinities, NaN, numbers near the ends of the type; a scale that turns signs, and large logits."""
        q, k, v = made(resident, 1, 2, 2, 70, resident.keys)
        for x, at in ((q, 3), (k, 9), (v, 11)):
            x[0, 0, at, 5], x[0, 0, at + 1, 7], x[0, 1, at] = torch.inf, torch.nan, 0
            x[0, 1, at + 20 : at + 30] *= 1e-30 if x.dtype == torch.bfloat16 else 1e-6
        assert_same_bits(resident, variant, [q, k, v], scale=-0.3)
        assert_same_bits(resident, variant, [q, k.zero_(), v], scale=0.1)
        assert_same_bits(resident, variant, made(resident, 1, 2, 2, 70, resident.keys), scale=40.0)

    def test_without_lse(self, resident: Resident, variant: Variant) -> None:
        operands = made(resident, 2, 2, 2, 100, resident.keys)
        (expected, *_) = attend_source(variant, *operands, leave_q=False)
        assert torch.equal(kept(resident, variant, operands, return_lse=False)[0], expected)

    def test_rows_that_see_no_key(self, resident: Resident, variant: Variant) -> None:
        assert_same_bits(resident, variant, made(resident, 1, 2, 2, 90, resident.keys), causal_offset=-40)


def test_there_are_kernels_to_test() -> None:
    """Of a list without them every test above would pass."""
    assert {r.head_dim for r in RESIDENTS} >= {64} and CASES
