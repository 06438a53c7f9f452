"""The cycle model of sm90a: against times that were measured, and what must hold whatever the constants are.

Regressions these catch: a constant changed so that the ranking follows noise, tiles past the diagonal that are paid
for, a split that costs nothing, waves that are not whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from codegen.arch import CARDS
from codegen.axes import Cluster, Mask, Schedule, Softmax, Tile
from codegen.cost import Shape
from codegen.families.warpgroup.cost import LAUNCH_US, cost
from codegen.variant import parse_id

H200 = CARDS["H200"]
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16_384, 2_048  # batch * seqlen, heads * head_dim
CLOSE = 0.15

# TFLOPS on an H200 at each of SEQLENS (causal: half the products counted), of earlier kernels with these tiles and
# schedules that were written by hand.
MEASURED = [
    ("d128_m128n192w8", "pingpong", False, (956, 1084, 1190, 1210, 1257, 1241)),
    ("d128_m128n128w8", "overlap", False, (906, 918, 988, 1010, 1037, 1020)),
    ("d128_m128n192w8", "overlap", False, (857, 1001, 1148, 1183, 1282, 1281)),
    ("d64_m128n256w8", "pingpong", False, (690, 854, 919, 948, 952, 952)),
    ("d64_m128n256w8", "overlap", False, (720, 840, 917, 954, 958, 990)),
    ("d64_m192n192w12", "overlap", False, (603, 677, 866, 895, 993, 1011)),
    ("d64_m192n192w12", "pingpong", False, (628, 717, 874, 916, 1006, 1034)),
    ("d128_m128n192w8", "pingpong", True, (558, 766, 874, 918, 1050, 1063)),
    ("d128_m128n128w8", "overlap", True, (552, 666, 787, 859, 939, 954)),
    ("d128_m128n192w8", "overlap", True, (472, 654, 835, 950, 1070, 1114)),
    ("d64_m128n256w8", "pingpong", True, (397, 547, 699, 809, 860, 907)),
    ("d64_m128n256w8", "overlap", True, (383, 551, 696, 793, 860, 898)),
    ("d64_m192n192w12", "overlap", True, (358, 482, 671, 770, 837, 901)),
    ("d64_m192n192w12", "pingpong", True, (369, 502, 695, 794, 862, 928)),
]

BASE = parse_id("sm90a_fwd_d128_m128n128w8_s2_block_full_e4m3_bf16_linear_overlap_solo")
SHAPE = Shape(batch_heads=132, seqlen_q=1024, seqlen_k=1024, causal=False)


@pytest.mark.parametrize(("kernel", "schedule", "causal", "tflops"), MEASURED)
def test_the_model_meets_what_was_measured(kernel: str, schedule: str, causal: bool, tflops: tuple[float, ...]) -> None:
    mask = "causal" if causal else "full"
    v = parse_id(f"sm90a_fwd_{kernel}_s2_block_{mask}_e4m3_bf16_linear_{schedule}_solo")
    for seqlen, rate in zip(SEQLENS, tflops, strict=True):
        heads = TOKENS // seqlen * WIDTH // v.head_dim
        shape = Shape(batch_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, causal=causal)
        flop = 4 * heads * seqlen * seqlen * v.head_dim / (2 if causal else 1)
        modelled = cost(v, shape, H200).us - LAUNCH_US  # launches were back to back
        assert abs(math.log(modelled * rate * 1e6 / flop)) < CLOSE, (seqlen, modelled, flop / rate / 1e6)


def us(shape: Shape = SHAPE, **changes: Any) -> float:
    return cost(replace(BASE, **changes), shape, H200).us


def test_waves_are_whole() -> None:
    full = replace(SHAPE, batch_heads=33)  # 33 heads of 8 tiles: 264 items, two for each of 132 SMs
    one_more = replace(SHAPE, batch_heads=34)
    assert cost(BASE, full, H200).waves == 2 and cost(BASE, one_more, H200).waves == 3
    assert us(shape=one_more) > us(shape=full)


def test_keys_past_a_whole_tile_cost_a_tile() -> None:
    def at(keys: int) -> float:
        return us(shape=replace(SHAPE, seqlen_k=keys))

    assert at(1024) < at(1025) == at(1152)


def test_a_causal_mask_saves_less_than_half() -> None:
    causal = us(shape=replace(SHAPE, causal=True), mask=Mask.CAUSAL)
    assert 0.5 * us() < causal < us()


def test_a_split_pays_where_there_are_few_items_and_costs_where_there_are_many() -> None:
    few = Shape(batch_heads=8, seqlen_q=128, seqlen_k=16_384, causal=False)
    assert us(shape=few, cluster=Cluster.SPLIT4) < us(shape=few, cluster=Cluster.SPLIT2) < us(shape=few)
    assert us(cluster=Cluster.SPLIT2) > us()


def test_exponentials_and_scales_of_keys_cost() -> None:
    assert us(softmax=Softmax.EXP2X2) > us(softmax=Softmax.EXP2) > us()
    token = parse_id(BASE.id.replace("_block_", "_token_").replace("_linear_", "_exp2_"))
    assert cost(token, SHAPE, H200).us > us(softmax=Softmax.EXP2)


def test_one_warpgroup_alone_overlaps_nothing_unless_it_is_scheduled_to() -> None:
    alone = {"tile": Tile(m=64, n=128, warps=4)}
    assert us(**alone, schedule=Schedule.SERIAL) > us(**alone, schedule=Schedule.OVERLAP)
