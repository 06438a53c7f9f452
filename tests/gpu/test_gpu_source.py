"""Kernels that quantise Q by themselves, and get K and V while they run: the bits of those that get all of it
quantised, whatever the operands hold."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from compilers import ROOT
from gpu import attend_source, built_variants, out_descale_for
from reference import randn

import fp8cutlass
from codegen.pack import packs_of
from codegen.profiles import of_profile
from codegen.select import select
from fp8cutlass.call import memo as eager
from fp8cutlass.manifest import Variant, generated_dir, load_manifest
from fp8cutlass.native import attend

VARIANTS = built_variants("fwd", quantises_q=True)
BLOCK = {"q": "token", "k": "block", "v": "block"}


def halves(
    variant: Variant, dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int, width: int
) -> list[torch.Tensor]:
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [randn(1, *x, width, seed=s, device="cuda").to(dtype) for s, x in enumerate(shapes)]


def of_blocks(head_dim: int, *, causal: bool | None = None) -> Variant:
    """The first kernel whose K and V can be handed over."""
    found = (v for v in VARIANTS if v.head_dim == head_dim and v.scaling == "block")
    return next(v for v in found if causal in (None, v.causal))


def assert_same_bits(variant: Variant, operands: list[torch.Tensor], **options: Any) -> None:
    """All packed before; Q left to the kernel; and K and V handed over while it runs, as often as it takes to find
    counters that the call before has not put back."""
    options["out_descale"] = out_descale_for(variant)
    packed = attend_source(variant, *operands, leave_q=False, **options)
    others = [-x for x in operands]
    for hand_over in (False, True, True, False, True):
        attend_source(variant, *others, leave_q=False, **options)  # what memory keeps of it is not what is wanted
        left = attend_source(variant, *operands, leave_q=True, hand_over=hand_over, **options)
        for a, b in zip(left, packed, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), hand_over
    (alone,) = attend_source(variant, *operands, hand_over=True, return_lse=False, return_amax=False, **options)
    assert torch.equal(alone.view(torch.uint8), packed[0].view(torch.uint8))


def packed_by(variant: Variant, operands: list[torch.Tensor], **options: Any) -> list[str]:
    """Which of the two kernels that pack a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend_source(variant, *operands, **options)
        torch.cuda.synchronize()
    launched = " ".join(e.key for e in profile.key_averages())
    names = {"deliver": r"pack_d\w+_deliver", "pack": r"pack_d\d+_n\d+_(bf16|fp16)[<I]"}
    return [name for name, pattern in names.items() if re.search(pattern, launched)]


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
        for smooth_k in (False, True):  # smoothed keys are not handed over
            assert_same_bits(variant, operands, smooth_k=smooth_k)

    def test_unrolled_tiles(self, variant: Variant) -> None:
        """More items than CTAs, as heads arrive one by one."""
        for _, most in variant.unrolled:
            operands = halves(variant, torch.bfloat16, 240, 120, 133, most - 3, variant.head_dim)
            assert_same_bits(variant, operands)

    def test_rows_that_are_not_finite(self, variant: Variant) -> None:
        """fp16, a negative scale, and rows of zeros, denormals, NaN, infinities, and nothing else."""
        q, k, v = halves(variant, torch.float16, 2, 2, variant.tile_m + 5, 300, variant.head_dim)
        q[0, 0, 1] = 0
        q[0, 0, 2] *= 1e-7
        q[0, 0, 3, 5], q[0, 0, 4, 6], q[0, 0, 5, 7] = math.nan, math.inf, -math.inf
        q[0, 1, 0], q[0, 1, 1], q[0, 1, -1, ::2] = math.nan, math.inf, 60_000
        for x in (k, v):
            x[0, 0, 3, 5], x[0, 1, 290, 6], x[0, 1, 40, 7], x[0, 0, 150:] = math.nan, math.inf, -math.inf, 0
        assert_same_bits(variant, [q, k, v], scale=-0.07)


@pytest.mark.gpu
class TestWhichWay:
    def test_rows_that_are_all_the_same(self) -> None:
        """No tensor map can say so: they are made dense before."""
        variant = VARIANTS[0]
        q, k, v = halves(variant, torch.bfloat16, 2, 2, 1, 300, variant.head_dim)
        assert_same_bits(variant, [q.expand(1, 2, 200, variant.head_dim), k, v])

    @pytest.mark.parametrize("head_dim", attend.HANDED_OVER)
    def test_keys_that_are_expanded(self, head_dim: int) -> None:
        """Heads that share memory are handed over one by one; rows that do are packed before."""
        variant = of_blocks(head_dim)
        q, k, v = halves(variant, torch.bfloat16, 8, 1, 300, 700, head_dim)
        assert_same_bits(variant, [q, k.expand(1, 8, -1, -1), v.expand(1, 8, -1, -1)])
        assert_same_bits(variant, [q, k, v[:, :, :1].expand(1, 1, 700, head_dim)])

    @pytest.mark.parametrize("head_dim", attend.HANDED_OVER)
    def test_keys_are_handed_over(self, head_dim: int) -> None:
        """By the kernel that is there for it, and by that alone."""
        variant = of_blocks(head_dim)
        operands = halves(variant, torch.bfloat16, 40, 40, 600, 600, head_dim)
        attend_source(variant, *operands)
        for hand_over, smooth_k, name in ((True, False, "deliver"), (False, False, "pack"), (True, True, "pack")):
            assert packed_by(variant, operands, hand_over=hand_over, smooth_k=smooth_k) == [name]

    def test_many_streams_at_once(self) -> None:
        """Each has its own counters, and neither waits for the other's heads."""
        variant = of_blocks(64, causal=False)
        operands = halves(variant, torch.bfloat16, 300, 300, 300, 300, 64)
        (expected, *_) = attend_source(variant, *operands, leave_q=False)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(attend_source(variant, *operands, hand_over=True)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in found)

    def test_handovers_in_a_graph(self) -> None:
        """Two in one capture, replayed on other data, with eager ones on the same stream between."""
        variant = of_blocks(64, causal=True)
        first, second = (halves(variant, torch.bfloat16, 300, 300, n, n, 64) for n in (200, 333))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        attend_source(variant, *first, hand_over=True)  # nothing is set up while a stream is captured
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            made = [attend_source(variant, *x, hand_over=True)[0] for x in (first, second)]
        for turn in range(5):
            for x in (*first, *second):
                x.copy_(x.roll(1, dims=2))
            expected = [attend_source(variant, *x, leave_q=False)[0] for x in (first, second)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
                eager_one = attend_source(variant, *second, hand_over=True)[0]
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            for a, b in zip([*made, eager_one], [*expected, expected[1]], strict=True):
                assert torch.equal(a, b), turn

    def test_more_heads_than_counters(self) -> None:
        """They are packed before, whatever was asked for."""
        variant = of_blocks(64)
        heads = attend.HAND_OVER_HEADS + 1
        operands = halves(variant, torch.bfloat16, heads, heads, 70, 70, 64)
        for some, name in ((operands, "pack"), ([x[:, 1:] for x in operands], "deliver")):
            assert_same_bits(variant, some)
            assert packed_by(variant, some, hand_over=True) == [name]

    def test_threads_on_one_stream(self) -> None:
        """They share its counters, and a thread's two launches are not torn apart."""
        variant = of_blocks(128, causal=True)
        operands = halves(variant, torch.bfloat16, 200, 200, 200, 200, 128)
        (expected, *_) = attend_source(variant, *operands, leave_q=False)
        torch.cuda.synchronize()

        def calls(number: int) -> list[torch.Tensor]:
            return [attend_source(variant, *operands, hand_over=(i + number) % 4 != 0)[0] for i in range(25)]

        with ThreadPoolExecutor(8) as pool:
            found = [x for made in pool.map(calls, range(8)) for x in made]
        torch.cuda.synchronize()
        assert len(found) == 200 and all(torch.equal(x, expected) for x in found)

    def test_attention_takes_the_faster_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Above the limits Q is left to the kernel, below it is packed; the result is the same."""
        seen: list[tuple[float, ...]] = []
        made = attend.constants

        def constants(fields: tuple[str, ...], **values: float) -> torch.Tensor:
            seen.append((values["leave_q"], values["hand_over"]))
            return made(fields, **values)

        monkeypatch.setattr(attend, "constants", constants)
        eager.forget()
        for rows, left, handed in ((1024, True, False), (1000, False, False), (6144, True, True)):
            q = randn(4, 16, rows, 64, seed=0, device="cuda").to(torch.bfloat16)
            fp8cutlass.attention(q, q, q)
            assert set(seen) == {(left, handed)}
            seen.clear()
            said = fp8cutlass.explain(q, q, q)
            assert ("by the attention kernel" in said) is left and ("packed head by head" in said) is handed


class TestRule:
    @staticmethod
    def shipped() -> list[Variant]:
        return [v for v in load_manifest(generated_dir()).variants if v.family == "sm90a" and v.kind == "fwd"]

    def variant(self) -> Variant:
        return next(v for v in self.shipped() if v.quantises_q and (v.head_dim, v.tile_m) == (128, 128))

    def way(
        self,
        q: tuple[int, ...],
        k: tuple[int, ...],
        *,
        variant: Variant | None = None,
        granularity: dict[str, str] = BLOCK,
        smooth_k: bool = False,
        hadamard: bool = False,
    ) -> attend.Way:
        return attend.faster_way(variant or self.variant(), granularity, q, k, smooth_k=smooth_k, hadamard=hadamard)

    def test_few_rows_keys_or_items_are_packed(self) -> None:
        shape, few = (4, 16, 4096, 128), (4, 2, 4096, 128)
        assert self.way(shape, few) == (True, False)
        assert self.way(shape, (4, 4, 1000, 128)) == (False, False)
        assert self.way((64, 16, 1000, 128), few) == (False, False)
        assert self.way((1, 16, 1024, 128), (1, 16, 1024, 128)) == (False, False)  # 128 items
        assert self.way((64, 16, 256, 128), (64, 16, 256, 128)) == (True, True)
        assert self.way((64, 16, 255, 128), (64, 16, 300, 128)) == (False, False)
        narrow = next(v for v in self.shipped() if v.quantises_q and v.head_dim == 96)
        assert self.way((64, 32, 256, 96), (64, 32, 256, 96), variant=narrow) == (False, False)
        assert self.way((64, 32, 1024, 96), (64, 32, 1024, 96), variant=narrow) == (True, False)

    def test_what_is_not_handed_over_is_not_left_earlier(self) -> None:
        shape, coarse = (64, 16, 512, 128), {"q": "token", "k": "token", "v": "channel"}
        assert self.way(shape, shape) == (True, True)
        assert self.way(shape, shape, smooth_k=True) == self.way(shape, shape, granularity=coarse) == (False, False)
        long = (64, 16, 1024, 128)
        assert self.way(long, long, smooth_k=True) == (True, False)
        assert self.way(long, long, hadamard=True) == (False, False)

    def test_only_rows_with_a_scale_each(self) -> None:
        """A scale for a head is known when the last row is; a rotation needs the whole row at once."""
        by_row, by_head, v = {"q": "token"}, {"q": "head"}, self.variant()
        assert attend.takes_source(v, by_row, hadamard=False)
        assert not attend.takes_source(v, by_head, hadamard=False)
        assert not attend.takes_source(v, by_row, hadamard=True)

    def test_blocks_alone_are_handed_over(self) -> None:
        block, v = BLOCK, self.variant()
        assert attend.takes_handover(v, block, smooth_k=False, hadamard=False)
        assert not attend.takes_handover(v, block, smooth_k=True, hadamard=False)
        assert not attend.takes_handover(v, block, smooth_k=False, hadamard=True)
        assert not attend.takes_handover(v, block | {"v": "channel"}, smooth_k=False, hadamard=False)
        assert not attend.takes_handover(v, block | {"k": "head"}, smooth_k=False, hadamard=False)
        narrow = next(v for v in self.shipped() if v.head_dim == 96 and v.quantises_q)
        assert not attend.takes_handover(narrow, block, smooth_k=False, hadamard=False)

    def test_large_keys_are_handed_over(self) -> None:
        for large, small in (
            ((16, 16, 512, 128), (15, 16, 512, 128)),
            ((3, 16, 4096, 128), (2, 16, 4096, 128)),  # few heads
            ((64, 32, 512, 128), (64, 33, 512, 128)),  # more than there are counters
        ):
            assert self.way(large, large).hand_over and not self.way(small, small).hand_over

    def test_the_extension_has_as_many_counters(self) -> None:
        header = (ROOT / "csrc" / "counters.h").read_text()
        assert f"constexpr int kReadyHeads = {attend.HAND_OVER_HEADS};" in header

    def test_the_generator_hands_over_the_same_head_dims(self) -> None:
        packs = packs_of(of_profile(select().emitted, "release"))
        assert {p.head_dim for p in packs if p.delivers} == set(attend.HANDED_OVER)

    def test_who_can(self) -> None:
        """Where the tile in 16 bits fits beside a second Q: at head_dim 64 to 128 all kernels but those of clusters."""
        for v in self.shipped():
            assert v.quantises_q == (v.head_dim <= 128 and v.cluster == "solo" and v.dtype == "e4m3"), v.id
