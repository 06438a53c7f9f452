"""The rules of the sm90a family, in the order in which they are asked."""

from __future__ import annotations

from typing import cast

from codegen import tuned
from codegen.axes import Schedule
from codegen.derived import Derived
from codegen.expr import lift
from codegen.families.warpgroup.derive import ROWS_PER_WARPGROUP, SMEM_PER_BLOCK, WIDE_HEAD_DIM, WarpgroupDerived
from codegen.rule import (
    E4M3_OUT_TOKEN,
    E5M2_OUT,
    E5M2_TOKEN,
    EXACT_SCORES,
    INTEGER_OUT,
    INTEGER_P,
    INTEGER_SCALING,
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
    head_dim_rule,
    smem_rule,
)
from codegen.scaling import KEY_BLOCK
from codegen.variant import LISTED_KEYS, Variant

HEAD_DIM_CHOICES = (64, 96, 128, 192, 256)  # rows that TMA swizzles over 64 or 128 bytes
SPLIT_ROWS = (64, 128)  # a split serves problems with few rows
# The head_dim from which the few registers that `quadratic` takes beside `linear` make ptxas serialise the products of
# column parts (C7511).
QUADRATIC_COLUMNS = 256


def _merge(d: Derived) -> tuple[int, int]:
    """Bytes that the CTAs of a cluster exchange, and bytes that they have for it."""
    sm90 = cast(WarpgroupDerived, d)
    return sm90.merge_bytes, sm90.stream_bytes


def _split_refused(v: Variant) -> bool:
    offered = v.tile_m in SPLIT_ROWS and not v.kind.diagnostic and v.schedule.serial and v.terms == 1
    return v.cluster.ctas > 1 and not offered


def _columns_offered(v: Variant) -> bool:
    room = v.softmax.narrow and (not v.softmax.bent or v.head_dim < QUADRATIC_COLUMNS)
    return v.head_dim > WIDE_HEAD_DIM and room and v.warpgroups == 2


PAIR_HEAD_DIM = 64
INTEGER_HEAD_DIMS = (64, 128)
INTEGER_HEAD_DIM = Rule(
    name="INTEGER-HEAD-DIM",
    why="s32 scores take twice the registers of f16 ones, and for wider heads O takes half of them",
    refuses=lambda v, d: v.dtype.qk.integer and v.head_dim not in INTEGER_HEAD_DIMS,
    explain=lambda v, d: f"{v.dtype} operands are offered for head_dim {' and '.join(map(str, INTEGER_HEAD_DIMS))}",
    of_choice=True,
)

INTEGER_V = Rule(
    name="INTEGER-V",
    why="u8 P takes an exponential a score, which leaves no more speed than bf16 attention has (docs/lab/house.md)",
    refuses=lambda v, d: v.dtype.v.integer,
    explain=lambda v, d: f"no kernel of this family multiplies V of {v.dtype}",
    of_choice=True,
)

RULES: tuple[Rule, ...] = (
    EXACT_SCORES,
    INTEGER_V,
    INTEGER_P,
    INTEGER_SCALING,
    INTEGER_OUT,
    INTEGER_HEAD_DIM,
    LINEAR_RANGE,
    LINEAR_E5M2,
    LINEAR_TOKEN,
    E5M2_TOKEN,
    E5M2_OUT,
    E4M3_OUT_TOKEN,
    TWO_TERMS_E5M2,
    TWO_TERMS_OUT,
    head_dim_rule(
        HEAD_DIM_CHOICES,
        "TMA writes rows of 64 or of 128 bytes without bank conflicts; only 96 is padded to one of them",
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
        name="LISTED-TILE",
        why=f"lists of a mask have tiles of {LISTED_KEYS} rows and keys, of which a kernel takes one or two",
        condition=TILE_M.equals(LISTED_KEYS) & (TILE_N.equals(LISTED_KEYS) | TILE_N.equals(2 * LISTED_KEYS)),
        among=lambda v: v.listed,
        explain=lambda v, d: (
            f"lists of a mask have tiles of {LISTED_KEYS} x {LISTED_KEYS}, not {v.tile_m} x {v.tile_n}"
        ),
    ),
    Rule(
        name="PAIR-REGISTERS",
        why=f"tiles of two take f16 scores, warpgroups that take turns, and an O of head_dim up to {PAIR_HEAD_DIM}",
        refuses=lambda v, d: v.paired and not (v.softmax.by_code and v.schedule.turns and v.head_dim <= PAIR_HEAD_DIM),
        explain=lambda v, d: f"{v.softmax}, {v.schedule} and head_dim {v.head_dim} have no pairs of tiles",
    ),
    Rule(
        name="EXP2-KEYS",
        why=f"FP8 operands come with descales for {KEY_BLOCK} keys, and what takes them must not straddle two",
        condition=SCORE_REGS.equals(2) | (lift(KEY_BLOCK) % TILE_N).equals(0),
        among=lambda v: v.dtype.arrives,
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
        refuses=lambda v, d: cast(WarpgroupDerived, d).key_slots < cast(WarpgroupDerived, d).halves,
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
    smem_rule(SMEM_PER_BLOCK, "sm_90a"),
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
        refuses=lambda v, d: tuned.found(v, "spills") is not None,
        explain=lambda v, d: f"about {d.registers} registers a thread fit, but the blocks of accumulators do not",
    ),
)
