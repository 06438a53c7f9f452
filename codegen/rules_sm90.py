"""The rules of the sm90a family, in the order in which they are asked."""

from __future__ import annotations

from typing import cast

from codegen.axes import Out, Scaling, Schedule, Softmax, Tile
from codegen.derive_sm90 import ROWS_PER_WARPGROUP, WIDE_HEAD_DIM, Sm90Derived
from codegen.derived import Derived
from codegen.expr import lift
from codegen.rule import (
    E4M3_OUT_TOKEN,
    E5M2_OUT,
    LINEAR_E5M2,
    LINEAR_RANGE,
    LINEAR_TOKEN,
    REGISTERS,
    SCORE_REGS,
    TILE_M,
    TILE_N,
    TWO_TERMS_E5M2,
    TWO_TERMS_OUT,
    WARPS,
    Rule,
    refused,
    smem_rule,
)
from codegen.scaling import KEY_BLOCK
from codegen.variant import Variant

HEAD_DIM_CHOICES = (64, 96, 128, 192, 256)  # rows that TMA swizzles over 64 or 128 bytes
SPLIT_ROWS = (64, 128)  # a split serves problems with few rows
# The head_dim from which the few registers that `quadratic` takes beside `linear` make ptxas serialise the products of
# column parts (C7511).
QUADRATIC_COLUMNS = 256

# What the estimate admits and nvcc 13.0 was seen to spill (None: any): accumulators of wgmma are whole blocks of
# neighbouring registers, and at the limit the blocks leave gaps; `quadratic` takes no fewer registers than the `linear`
# that stands here. The gates find what is missing. Since the LSE
# sums left the hot path only the one of head_dim 192 spills; the others wait for somebody to time them.
SPILLS: tuple[tuple[int, Tile, Softmax, Schedule, Out | None], ...] = (
    (96, Tile(m=128, n=256, warps=8), Softmax.LINEAR, Schedule.PINGPONG, Out.E4M3),
    (128, Tile(m=64, n=128, warps=4), Softmax.EXP2, Schedule.OVERLAP, None),
    (128, Tile(m=128, n=192, warps=8), Softmax.LINEAR, Schedule.PINGPONG, Out.E4M3),
    (128, Tile(m=128, n=64, warps=8), Softmax.EXP2, Schedule.PINGPONG, None),
    (192, Tile(m=128, n=192, warps=8), Softmax.LINEAR, Schedule.COLUMNS, None),
    (256, Tile(m=128, n=128, warps=8), Softmax.EXP2, Schedule.SERIAL, None),
)


def _merge(d: Derived) -> tuple[int, int]:
    """Bytes that the CTAs of a cluster exchange, and bytes that they have for it."""
    sm90 = cast(Sm90Derived, d)
    return sm90.merge_bytes, sm90.stream_bytes


def _split_refused(v: Variant) -> bool:
    offered = v.tile_m in SPLIT_ROWS and not v.kind.diagnostic and v.schedule.serial and v.terms == 1
    return v.cluster.ctas > 1 and not offered


def _columns_offered(v: Variant) -> bool:
    room = v.softmax.by_code and (not v.softmax.bent or v.head_dim < QUADRATIC_COLUMNS)
    return v.head_dim > WIDE_HEAD_DIM and room and v.warpgroups == 2


SM90A_RULES = (
    LINEAR_RANGE,
    LINEAR_E5M2,
    LINEAR_TOKEN,
    Rule(
        name="E5M2-TOKEN",
        why="e5m2 reaches attention from caches and gradients that carry one scale a tensor, head or block",
        refuses=lambda v, d: not v.dtype.made and v.scaling.per_key,
        explain=lambda v, d: refused(
            f"{v.scaling} scaling of {v.dtype} operands is", (s for s in Scaling if not s.per_key)
        ),
        of_choice=True,
    ),
    E5M2_OUT,
    E4M3_OUT_TOKEN,
    TWO_TERMS_E5M2,
    TWO_TERMS_OUT,
    Rule(
        name="HEAD-DIM",
        why="TMA writes rows of 64 or of 128 bytes without bank conflicts; only 96 is padded to one of them",
        refuses=lambda v, d: v.head_dim not in HEAD_DIM_CHOICES,
        explain=lambda v, d: f"head_dim {v.head_dim} is none of {', '.join(map(str, HEAD_DIM_CHOICES))}",
    ),
    Rule(
        name="WARPGROUP-ROWS",
        why="a warpgroup of four warps owns the 64 rows of its matrix instructions",
        condition=TILE_M.equals(WARPS * (ROWS_PER_WARPGROUP // 4)),
        explain=lambda v, d: f"{v.tile_m} rows for {v.warps} warps, which own {16 * v.warps}",
    ),
    Rule(
        name="KEY-STEPS",
        why="V lies in shared memory in rows of 64 or 128 keys, and one matrix instruction has at most 256 columns",
        condition=(TILE_N % 64).equals(0) & (TILE_N <= 256),
        explain=lambda v, d: f"tile_n {v.tile_n} is no multiple of 64 up to 256",
    ),
    Rule(
        name="EXP2-KEYS",
        why=f"FP8 operands come with descales for {KEY_BLOCK} keys, and what takes them must not straddle two",
        condition=SCORE_REGS.equals(2) | (lift(KEY_BLOCK) % TILE_N).equals(0),
        explain=lambda v, d: f"exp2 softmax serves blocks of {KEY_BLOCK} keys, which {v.tile_n} does not divide",
    ),
    Rule(
        name="PINGPONG-ALONE",
        why="warpgroups that take turns are at least two",
        refuses=lambda v, d: v.schedule.turns and v.warpgroups < 2,
        explain=lambda v, d: f"{v.warpgroups} warpgroup has nobody to take turns with",
    ),
    Rule(
        name="WIDE-PARTS",
        why=f"beyond head_dim {WIDE_HEAD_DIM} P V is made in column parts, which not every schedule has",
        refuses=lambda v, d: v.head_dim > WIDE_HEAD_DIM and v.schedule.overlaps,
        explain=lambda v, d: f"{v.schedule} has no registers for a product of head_dim {v.head_dim} beside O",
    ),
    Rule(
        name="COLUMNS-WIDE",
        why=(
            f"up to head_dim {WIDE_HEAD_DIM} O leaves registers for P V in one piece; float32 scores leave none for "
            "parts, and what a warpgroup waits for, a second one fills"
        ),
        refuses=lambda v, d: v.schedule.columns and not _columns_offered(v),
        explain=lambda v, d: (
            f"column parts are for two warpgroups, head_dim > {WIDE_HEAD_DIM} and softmax linear, or quadratic below "
            f"head_dim {QUADRATIC_COLUMNS}"
        ),
    ),
    Rule(
        name="HALVED-SLOTS",
        why="a tile in halves takes two slots of K at a time, and one fewer are there than of V",
        refuses=lambda v, d: cast(Sm90Derived, d).key_slots < cast(Sm90Derived, d).halves,
        explain=lambda v, d: f"{v.stages} stages are too few for tiles of {v.tile_n} keys in halves",
    ),
    Rule(
        name="SPLIT-TILE",
        why="a split serves problems with too few rows for the card, and its CTAs do not take turns",
        refuses=lambda v, d: _split_refused(v),
        explain=lambda v, d: (
            f"offered to forward kernels with {' or '.join(map(str, SPLIT_ROWS))} rows, "
            f"schedule {' or '.join(s for s in Schedule if s.serial)} and one term of P"
        ),
    ),
    smem_rule("sm90a", "sm_90a"),
    Rule(
        name="MERGE-BYTES",
        why="what the CTAs of a cluster exchange lies where the stages of K and V were",
        refuses=lambda v, d: _merge(d)[0] > _merge(d)[1],
        explain=lambda v, d: "{:,} bytes to merge > {:,} of all stages".format(*_merge(d)),
    ),
    REGISTERS,
    Rule(
        name="SPILLS",
        why="the compiler was seen to spill it",
        refuses=lambda v, d: any(
            (v.head_dim, v.tile, Softmax.LINEAR if v.softmax.by_code else v.softmax, v.schedule) == seen[:4]
            and seen[4] in (None, v.out)
            for seen in SPILLS
        ),
        explain=lambda v, d: f"about {d.registers} registers a thread fit, but the blocks of accumulators do not",
    ),
)
