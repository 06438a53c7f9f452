"""Kernels that quantise Q by themselves: the bits of those that get it quantised, whatever the rows hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu import attend_source, built_variants
from reference import randn

import fp8cutlass
from fp8cutlass import attend, eager
from fp8cutlass.manifest import Variant, generated_dir, load_manifest

VARIANTS = built_variants("fwd", quantises_q=True)


def halves(
    variant: Variant, dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int, width: int
) -> list[torch.Tensor]:
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [randn(1, *x, width, seed=s, device="cuda").to(dtype) for s, x in enumerate(shapes)]


def assert_same_bits(variant: Variant, operands: list[torch.Tensor], **options: Any) -> None:
    """With Q left to the kernel and with Q packed before, and once more with Q left to it."""
    if variant.out == "e4m3":
        options["out_descale"] = torch.tensor([0.02], device="cuda")
    left, packed, again = (attend_source(variant, *operands, leave_q=x, **options) for x in (True, False, True))
    for a, b, c in zip(left, packed, again, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(a.view(torch.uint8), c.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.id)
class TestSameBits:
    def test_tails_and_groups(self, variant: Variant) -> None:
        """Rows and keys past the last tile, two heads a KV head, memory in the order (B, S, H, D)."""
        q, k, v = halves(variant, torch.bfloat16, 6, 3, 2 * variant.tile_m + 37, 391, variant.head_dim)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(variant, [q, k, v], causal_offset=391 - q.shape[2])

    def test_more_items_than_sms(self, variant: Variant) -> None:
        """Both buffers of Q are used again and again; a narrower head_dim leaves columns that nobody loads."""
        operands = halves(variant, torch.bfloat16, 700, 350, 70, 3 * variant.tile_n + 6, variant.head_dim - 8)
        assert_same_bits(variant, operands, smooth_k=variant.causal)

    def test_rows_that_are_not_finite(self, variant: Variant) -> None:
        """fp16, a negative scale, and rows of zeros, denormals, NaN, infinities, and nothing else."""
        q, k, v = halves(variant, torch.float16, 2, 2, variant.tile_m + 5, 300, variant.head_dim)
        q[0, 0, 1] = 0
        q[0, 0, 2] *= 1e-7
        q[0, 0, 3, 5], q[0, 0, 4, 6], q[0, 0, 5, 7] = math.nan, math.inf, -math.inf
        q[0, 1, 0], q[0, 1, 1], q[0, 1, -1, ::2] = math.nan, math.inf, 60_000
        assert_same_bits(variant, [q, k, v], scale=-0.07)


@pytest.mark.gpu
class TestWhichWay:
    def test_rows_that_are_all_the_same(self) -> None:
        """No tensor map can say so: they are made dense before."""
        variant = VARIANTS[0]
        q, k, v = halves(variant, torch.bfloat16, 2, 2, 1, 300, variant.head_dim)
        assert_same_bits(variant, [q.expand(1, 2, 200, variant.head_dim), k, v])

    def test_attention_takes_the_faster_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Above the limits Q is left to the kernel, below it is packed; the result is the same."""
        seen: list[bool] = []
        constants = attend._constants
        monkeypatch.setattr(attend, "_constants", lambda *x: (seen.append(bool(x[-1])), constants(*x))[1])
        eager.forget()
        for rows, left in ((1024, True), (1000, False)):
            q = randn(2, 16, rows, 64, seed=0, device="cuda").to(torch.bfloat16)
            fp8cutlass.attention(q, q, q)
            assert set(seen) == {left}
            seen.clear()
            assert ("by the attention kernel" in fp8cutlass.explain(q, q, q)) is left


class TestRule:
    @staticmethod
    def shipped() -> list[Variant]:
        return [v for v in load_manifest(generated_dir()).variants if v.family == "sm90a" and v.kind == "fwd"]

    def variant(self) -> Variant:
        return next(v for v in self.shipped() if v.quantises_q and (v.head_dim, v.tile_m) == (128, 128))

    def test_few_rows_keys_or_items_are_packed(self) -> None:
        shape, v = (4, 16, 4096, 128), self.variant()
        assert attend.leaves_q(v, shape, 4096)
        assert not attend.leaves_q(v, shape, 512)
        assert not attend.leaves_q(v, (64, 16, 512, 128), 4096)
        assert not attend.leaves_q(v, (1, 16, 1024, 128), 1024)  # 128 items

    def test_only_rows_with_a_scale_each(self) -> None:
        """A scale for a head is known when the last row is; a rotation needs the whole row at once."""
        by_row, by_head, v = {"q": "token"}, {"q": "head"}, self.variant()
        assert attend.takes_source(v, by_row, hadamard=False)
        assert not attend.takes_source(v, by_head, hadamard=False)
        assert not attend.takes_source(v, by_row, hadamard=True)

    def test_who_can(self) -> None:
        """Where the tile in 16 bits fits beside a second Q: at head_dim 64 to 128 all kernels but those of clusters."""
        for v in self.shipped():
            assert v.quantises_q == (v.head_dim <= 128 and v.cluster == "solo" and v.dtype == "e4m3"), v.id
