"""The rules of the sm89 family, in the order in which they are asked."""

from __future__ import annotations

from codegen.derived import Derived
from codegen.expr import lift
from codegen.families.warp.derive import SMEM_PER_BLOCK
from codegen.rule import (
    CTAS,
    E4M3_OUT_TOKEN,
    E5M2_OUT,
    E5M2_TOKEN,
    EXACT_SCORES,
    HEAD_DIM,
    INTEGER_OUT,
    INTEGER_P,
    INTEGER_SCALING,
    LINEAR_E5M2,
    LINEAR_RANGE,
    LINEAR_TOKEN,
    REGISTERS,
    TILE_M,
    TILE_N,
    TWO_TERMS_E5M2,
    TWO_TERMS_OUT,
    WARP_ROWS,
    WARPS,
    Rule,
    head_dim_rule,
    smem_rule,
)
from codegen.scaling import KEY_BLOCK
from codegen.variant import Variant

HEAD_DIM_CHOICES = (32, 64, 96, 128, 256)  # rows that SmemTile in layout.h lays out without bank conflicts


def load_columns(row_bytes: int) -> int:
    """Threads that share a row in load_tile (copy.cuh): one a 16-byte chunk; 8, 2 of them idle, for 6 chunks."""
    chunks = row_bytes // 16
    return chunks // 3 * 4 if chunks % 3 == 0 else max(1, chunks)


def whole_row_groups(v: Variant, d: Derived) -> bool:
    """The threads of a CTA copy whole groups of 8 rows at a time, in K tiles and in V tiles."""
    return all(d.threads % (8 * load_columns(row_bytes)) == 0 for row_bytes in (v.head_dim, v.tile_n))


RULES: tuple[Rule, ...] = (
    Rule(
        name="WARP-ROWS",
        why="a warp owns one or two 16-row fragments: fewer cannot be, more do not fit the registers beside O",
        condition=(TILE_M % WARPS).equals(0) & (WARP_ROWS.equals(16) | WARP_ROWS.equals(32)),
        explain=lambda v, d: f"{v.tile_m} rows / {v.warps} warps = {v.tile_m / v.warps:g}, not 16 or 32",
    ),
    Rule(
        name="KEY-TILE",
        why=f"P V takes 32 keys a step, and a tile must lie inside one block of {KEY_BLOCK} keys with one descale",
        condition=(TILE_N % 32).equals(0) & (lift(KEY_BLOCK) % TILE_N).equals(0),
        explain=lambda v, d: f"tile_n {v.tile_n} is no multiple of 32 that divides {KEY_BLOCK}",
    ),
    EXACT_SCORES,
    INTEGER_P,
    INTEGER_SCALING,
    INTEGER_OUT,
    LINEAR_RANGE,
    head_dim_rule(
        HEAD_DIM_CHOICES, "shared-memory rows of other lengths would collide in the banks or not be whole k steps"
    ),
    Rule(
        name="LOAD-ROWS",
        why="a swizzle repeats every 8 rows, so a thread that steps down 8 rows at a time keeps its offset",
        refuses=lambda v, d: not whole_row_groups(v, d),
        explain=lambda v, d: (
            f"{d.threads} threads copy no multiple of 8 rows of {v.head_dim} or {v.tile_n} bytes at a time"
        ),
    ),
    smem_rule(SMEM_PER_BLOCK, "sm_89"),
    REGISTERS,
    Rule(
        name="OCCUPANCY",
        why="up to head_dim 128 at least two CTAs share an SM, so that one's softmax runs under the other's products",
        condition=(HEAD_DIM > 128) | (CTAS >= 2),
        explain=lambda v, d: (
            f"{d.ctas_per_sm} CTA an SM ({d.ctas_limit}: {d.smem_bytes:,} B, "
            f"about {d.registers} registers x {d.threads} threads)"
        ),
    ),
    LINEAR_E5M2,
    LINEAR_TOKEN,
    E5M2_TOKEN,
    E5M2_OUT,
    E4M3_OUT_TOKEN,
    TWO_TERMS_E5M2,
    TWO_TERMS_OUT,
    Rule(
        name="DIAG-TILE",
        why="one kernel a code path is enough for the tests; at head_dim 256 the taps leave registers for 32 keys",
        refuses=lambda v, d: v.kind.diagnostic and (v.tile_n == 32) != (v.head_dim == 256),
        explain=lambda v, d: f"diagnostic kernels of head_dim {v.head_dim} take {32 if v.head_dim == 256 else 64} keys",
    ),
)
