"""What a rule is, the symbols its condition may use, and the rules that all families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.axes import Operand, Out, Scaling
from codegen.axes.axis import Axis
from codegen.derived import Derived
from codegen.expr import Env, Expr, Symbol
from codegen.variant import Variant

FP16_MAX = 65_504
QK_AMAX = 14  # = 448 / 32, so the largest element stays exact in e4m3; d * 14 * 14 must fit f16

# Symbols that both languages know. The right-hand side is how a kernel spells the number.
HEAD_DIM = Symbol("head_dim", "kHeadDim")
TILE_M = Symbol("tile_m", "kTileM")
TILE_N = Symbol("tile_n", "kTileN")
WARPS = Symbol("warps", "kWarps")
WARP_ROWS = Symbol("rows_per_warp", "kWarpRows")  # sm89
CTAS = Symbol("ctas_per_sm", "kCtasPerSm")  # sm89
SMEM = Symbol("smem_bytes", "int(sizeof(SharedStorage))")
SCORE_REGS = Symbol("score_regs", "kScoreRegs")  # of four scores: 2 for f16, 4 for f32


VALUES: dict[str, Callable[[Variant, Derived], int]] = {
    "head_dim": lambda v, d: v.head_dim,
    "tile_m": lambda v, d: v.tile_m,
    "tile_n": lambda v, d: v.tile_n,
    "warps": lambda v, d: v.warps,
    "rows_per_warp": lambda v, d: d.rows_per_warp,
    "ctas_per_sm": lambda v, d: d.ctas_per_sm,
    "smem_bytes": lambda v, d: d.smem_bytes,
    "score_regs": lambda v, d: v.softmax.score_registers,
}


class Numbers(dict[str, int]):
    """The symbols' values for a variant, each found when a condition first asks for it."""

    def __init__(self, v: Variant, d: Derived) -> None:
        super().__init__()
        self._of = v, d

    def __missing__(self, name: str) -> int:
        self[name] = value = VALUES[name](*self._of)
        return value


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`condition` must hold (it becomes a static_assert); or `refuses` returns whether to reject.

    `of_choice`: the verdict depends on nothing that a rival could have otherwise (tile, stages, schedule, cluster), so
    no rival repairs what the rule rejects.
    """

    name: str
    why: str
    explain: Callable[[Variant, Derived], str]
    condition: Expr | None = None
    refuses: Callable[[Variant, Derived], bool] | None = None
    of_choice: bool = False
    among: Callable[[Variant], bool] = lambda v: True  # what it is asked of

    def broken(self, v: Variant, d: Derived, numbers: Env | None = None) -> bool:
        """numbers: those of the variant, where several rules are asked about it."""
        if not self.among(v):
            return False
        if self.condition is not None:
            return not self.condition.value(Numbers(v, d) if numbers is None else numbers)
        return self.refuses is not None and self.refuses(v, d)


def smem_rule(limit: int, code: str) -> Rule:
    """limit: bytes. code: how the compiler calls the target whose limit it is."""
    return Rule(
        name="SMEM",
        why=f"shared memory a block can have on {code}",
        condition=SMEM <= limit,
        explain=lambda v, d: f"{d.smem_sum} > {limit:,}",
    )


def refused(what: str, offered: Iterable[Axis]) -> str:
    """The sentence that names what is offered instead."""
    *others, last = map(str, offered)
    return f"{what} not offered ({', '.join(others)} and {last} are)" if others else f"{what} not offered ({last} are)"


def head_dim_rule(choices: tuple[int, ...], why: str) -> Rule:
    return Rule(
        name="HEAD-DIM",
        why=why,
        refuses=lambda v, d: v.head_dim not in choices,
        explain=lambda v, d: f"head_dim {v.head_dim} is none of {', '.join(map(str, choices))}",
    )


LINEAR_RANGE = Rule(
    name="LINEAR-RANGE",
    why=f"f16 scores of operands quantised to amax {QK_AMAX} must not overflow",
    condition=SCORE_REGS.equals(4) | (HEAD_DIM * (QK_AMAX * QK_AMAX) <= FP16_MAX),
    explain=lambda v, d: f"{v.head_dim} x {QK_AMAX} x {QK_AMAX} = {v.head_dim * QK_AMAX**2:,} > {FP16_MAX:,}",
    of_choice=True,
)

EXACT_SCORES = Rule(
    name="EXACT-SCORES",
    why="products of integers are summed in s32, and no others are",
    refuses=lambda v, d: v.softmax.exact != v.dtype.qk.integer,
    explain=lambda v, d: f"{v.softmax} softmax takes {v.score} scores, those of {v.dtype} are {v.dtype.qk.sums}",
    of_choice=True,
)

INTEGER_P = Rule(
    name="INTEGER-P",
    why="P is multiplied by an integer V where it is an integer itself",
    refuses=lambda v, d: v.softmax.by_byte != v.dtype.p.integer,
    explain=lambda v, d: (
        f"{v.softmax} softmax makes {'u8' if v.softmax.by_byte else 'no u8'}, P of {v.dtype} is {v.dtype.p}"
    ),
    of_choice=True,
)

INTEGER_SCALING = Rule(
    name="INTEGER-SCALING",
    why="integers of one step need a descale for few numbers; one for a lane's columns of a block costs nothing",
    refuses=lambda v, d: v.dtype.groups > 1 and v.scaling is not Scaling.BLOCK,
    explain=lambda v, d: refused(f"{v.scaling} descales of {v.dtype} operands are", (Scaling.BLOCK,)),
    of_choice=True,
)

INTEGER_OUT = Rule(
    name="INTEGER-OUT",
    why="an e4m3 output rounds by 2^-4 what integers gain",
    refuses=lambda v, d: v.dtype.qk.integer and v.out.scaled,
    explain=lambda v, d: refused(f"{v.out} output of {v.dtype} operands is", (o for o in Out if not o.scaled)),
    of_choice=True,
)

REGISTERS = Rule(
    name="REGISTERS",
    why="more registers than a thread can have would spill",
    refuses=lambda v, d: d.registers > d.register_limit,
    explain=lambda v, d: f"about {d.registers} registers a thread > {d.register_limit}",
)

LINEAR_E5M2 = Rule(
    name="LINEAR-E5M2",
    why="e5m2 operands arrive with any range; their f16 scores could overflow",
    refuses=lambda v, d: v.softmax.narrow and not v.dtype.made,
    explain=lambda v, d: f"{v.softmax} softmax needs f16 scores, {v.dtype} reaches {v.dtype.qk.limit:,}",
    of_choice=True,
)

LINEAR_TOKEN = Rule(
    name="LINEAR-TOKEN",
    why="a code comes from one f16 score by one slope a row; a K descale for each key would need f32 scores",
    refuses=lambda v, d: v.softmax.by_code and v.scaling.per_key,
    explain=lambda v, d: f"{v.softmax} softmax has one slope a row and tile, token scaling one a key",
    of_choice=True,
)

E5M2_TOKEN = Rule(
    name="E5M2-TOKEN",
    why="e5m2 reaches attention from caches and gradients that carry one scale a tensor, head or block",
    refuses=lambda v, d: not v.dtype.made and v.scaling.per_key,
    explain=lambda v, d: refused(
        f"{v.scaling} scaling of {v.dtype} operands is", (s for s in Scaling if not s.per_key)
    ),
    of_choice=True,
)

E5M2_OUT = Rule(
    name="E5M2-OUT",
    why="who stores in e5m2 computes in 16 bits; an e4m3 output belongs to an e4m3 pipeline",
    refuses=lambda v, d: not v.dtype.made and v.out.scaled,
    explain=lambda v, d: refused(f"{v.out} output of {v.dtype} operands is", (o for o in Out if not o.scaled)),
    of_choice=True,
)

TWO_TERMS_OUT = Rule(
    name="TWO-TERMS-OUT",
    why="an e4m3 output rounds by 2^-4 what a second term of P gains",
    refuses=lambda v, d: v.terms > 1 and v.out.scaled,
    explain=lambda v, d: refused(f"two terms of P with {v.out} output are", (o for o in Out if not o.scaled)),
    of_choice=True,
)

TWO_TERMS_E5M2 = Rule(
    name="TWO-TERMS-E5M2",
    why="e5m2 operands have lost more to their own rounding than a second term of P gains",
    refuses=lambda v, d: v.terms > 1 and not v.dtype.made,
    explain=lambda v, d: refused(
        f"two terms of P with {v.dtype} operands are", (o for o in Operand if o.made and o.arrives)
    ),
    of_choice=True,
)

E4M3_OUT_TOKEN = Rule(
    name="E4M3-OUT-TOKEN",
    why="an e4m3 output belongs to a pipeline with static scales, which are not one a token",
    refuses=lambda v, d: v.out.scaled and v.scaling.per_key,
    explain=lambda v, d: refused(f"{v.out} output with {v.scaling} scaling is", (s for s in Scaling if not s.per_key)),
    of_choice=True,
)
