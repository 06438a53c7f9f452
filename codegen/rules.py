"""Legality: named rules, each with the numbers that decided. The kernels hold the same conditions as static_asserts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codegen.arch import FAMILIES, REGISTERS_PER_THREAD
from codegen.derive import Derived, derive
from codegen.expr import Env, Expr, Symbol, lift
from codegen.scaling import KEY_BLOCK
from codegen.spec import Dtype, Kind, Out, Scaling, Softmax, Variant

FP16_MAX = 65_504
QK_AMAX = 14  # = 448 / 32, so the largest element stays exact in e4m3; d * 14 * 14 must fit f16

# Symbols that both languages know. The right-hand side is how a kernel spells the number.
HEAD_DIM = Symbol("head_dim", "kHeadDim")
TILE_M = Symbol("tile_m", "kTileM")
TILE_N = Symbol("tile_n", "kTileN")
WARPS = Symbol("warps", "kWarps")
WARP_ROWS = Symbol("rows_per_warp", "kWarpRows")
CTAS = Symbol("ctas_per_sm", "kCtasPerSm")
SMEM = Symbol("smem_bytes", "int(sizeof(SharedStorage))")
SCORE_REGS = Symbol("score_regs", "kScoreRegs")  # 2: f16 scores, 4: f32


def environment(v: Variant, d: Derived) -> Env:
    return {
        "head_dim": v.head_dim,
        "tile_m": v.tile_m,
        "tile_n": v.tile_n,
        "warps": v.warps,
        "rows_per_warp": d.rows_per_warp,
        "ctas_per_sm": d.ctas_per_sm,
        "smem_bytes": d.smem_bytes,
        "score_regs": 2 if v.softmax is Softmax.LINEAR else 4,
    }


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`condition` must hold (it becomes a static_assert); or `refuses` returns whether to reject.

    `of_choice`: the verdict depends on neither tile nor stages, so no other tile repairs what the rule rejects.
    """

    name: str
    why: str
    explain: Callable[[Variant, Derived], str]
    condition: Expr | None = None
    refuses: Callable[[Variant, Derived], bool] | None = None
    of_choice: bool = False

    def broken(self, v: Variant, d: Derived) -> bool:
        if self.condition is not None:
            return not self.condition.value(environment(v, d))
        return self.refuses is not None and self.refuses(v, d)


def _smem_sum(d: Derived) -> str:
    return " + ".join(f"{name} {size:,}" for name, size in d.smem_parts) + f" = {d.smem_bytes:,}"


SM89 = FAMILIES["sm89"]

HEAD_DIM_CHOICES = (32, 64, 96, 128, 256)  # rows that SmemTile in layout.h lays out without bank conflicts


def load_columns(row_bytes: int) -> int:
    """Threads that share a row in load_tile (copy.cuh): one a 16-byte chunk; 8, 2 of them idle, for 6 chunks."""
    chunks = row_bytes // 16
    return chunks // 3 * 4 if chunks % 3 == 0 else max(1, chunks)


def whole_row_groups(v: Variant, d: Derived) -> bool:
    """The threads of a CTA copy whole groups of 8 rows at a time, in K tiles and in V tiles."""
    return all(d.threads % (8 * load_columns(row_bytes)) == 0 for row_bytes in (v.head_dim, v.tile_n))


RULES = (
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
    Rule(
        name="LINEAR-RANGE",
        why=f"f16 scores of operands quantised to amax {QK_AMAX} must not overflow",
        condition=SCORE_REGS.equals(4) | (HEAD_DIM * (QK_AMAX * QK_AMAX) <= FP16_MAX),
        explain=lambda v, d: f"{v.head_dim} x {QK_AMAX} x {QK_AMAX} = {v.head_dim * QK_AMAX**2:,} > {FP16_MAX:,}",
        of_choice=True,
    ),
    Rule(
        name="HEAD-DIM",
        why="shared-memory rows of other lengths would collide in the banks or not be whole k steps",
        refuses=lambda v, d: v.head_dim not in HEAD_DIM_CHOICES,
        explain=lambda v, d: f"head_dim {v.head_dim} is none of {', '.join(map(str, HEAD_DIM_CHOICES))}",
    ),
    Rule(
        name="LOAD-ROWS",
        why="a swizzle repeats every 8 rows, so a thread that steps down 8 rows at a time keeps its offset",
        refuses=lambda v, d: not whole_row_groups(v, d),
        explain=lambda v, d: (
            f"{d.threads} threads copy no multiple of 8 rows of {v.head_dim} or {v.tile_n} bytes at a time"
        ),
    ),
    Rule(
        name="SMEM",
        why="shared memory a block can have on sm_89",
        condition=SMEM <= SM89.smem_per_block,
        explain=lambda v, d: f"{_smem_sum(d)} > {SM89.smem_per_block:,}",
    ),
    Rule(
        name="REGISTERS",
        why="more registers than a thread can have would spill",
        refuses=lambda v, d: d.registers > REGISTERS_PER_THREAD,
        explain=lambda v, d: f"about {d.registers} registers a thread > {REGISTERS_PER_THREAD}",
    ),
    Rule(
        name="OCCUPANCY",
        why="up to head_dim 128 at least two CTAs share an SM, so that one's softmax runs under the other's products",
        condition=(HEAD_DIM > 128) | (CTAS >= 2),
        explain=lambda v, d: (
            f"{d.ctas_per_sm} CTA an SM ({d.ctas_limit}: {d.smem_bytes:,} B, "
            f"about {d.registers} registers x {d.threads} threads)"
        ),
    ),
    Rule(
        name="LINEAR-E5M2",
        why="e5m2 operands arrive with any range; their f16 scores could overflow",
        refuses=lambda v, d: v.softmax is Softmax.LINEAR and v.dtype is Dtype.E5M2,
        explain=lambda v, d: "linear softmax needs f16 scores, e5m2 reaches 57,344",
        of_choice=True,
    ),
    Rule(
        name="LINEAR-TOKEN",
        why="the code is linear in one score with one slope a row; a K descale for each key would need f32 scores",
        refuses=lambda v, d: v.softmax is Softmax.LINEAR and v.scaling is Scaling.TOKEN,
        explain=lambda v, d: "linear softmax has one slope a row and tile, token scaling one a key",
        of_choice=True,
    ),
    Rule(
        name="E5M2-SCALING",
        why=(
            "e5m2 reaches attention from caches and gradients that carry one scale a tensor or head; "
            "quantise() makes e4m3"
        ),
        refuses=lambda v, d: v.dtype is Dtype.E5M2 and v.scaling not in (Scaling.TENSOR, Scaling.HEAD),
        explain=lambda v, d: f"{v.scaling} scaling of e5m2 operands is not offered (tensor and head are)",
        of_choice=True,
    ),
    Rule(
        name="E5M2-OUT",
        why="who stores in e5m2 computes in 16 bits; an e4m3 output belongs to an e4m3 pipeline",
        refuses=lambda v, d: v.dtype is Dtype.E5M2 and v.out is Out.E4M3,
        explain=lambda v, d: "e4m3 output of e5m2 operands is not offered (bf16 and fp16 are)",
        of_choice=True,
    ),
    Rule(
        name="E4M3-OUT-TOKEN",
        why="an e4m3 output belongs to a pipeline with static scales, which are not one a token",
        refuses=lambda v, d: v.out is Out.E4M3 and v.scaling is Scaling.TOKEN,
        explain=lambda v, d: "e4m3 output with token scaling is not offered (tensor, head and block are)",
        of_choice=True,
    ),
    Rule(
        name="DIAG-TILE",
        why="one kernel a code path is enough for the tests; at head_dim 256 the taps leave registers for 32 keys",
        refuses=lambda v, d: v.kind is Kind.DIAG and (v.tile_n == 32) != (v.head_dim == 256),
        explain=lambda v, d: f"diagnostic kernels of head_dim {v.head_dim} take {32 if v.head_dim == 256 else 64} keys",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    rule: str
    message: str


def check(v: Variant) -> Rejection | None:
    """The first rule that the variant breaks, or None for a legal one."""
    d = derive(v)
    for rule in RULES:
        if rule.broken(v, d):
            return Rejection(rule=rule.name, message=rule.explain(v, d))
    return None


def kernel_asserts() -> list[tuple[str, str]]:
    """(C++ condition, message) for each rule that a compiler can check."""
    return [(r.condition.cpp(), f"{r.name}: {r.why}") for r in RULES if r.condition is not None]
