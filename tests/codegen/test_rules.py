"""Legality: each rule with its name and numbers, and the same verdict from Python and from the compiler.

Regressions these catch: a rule that refuses a legal kernel or lets an illegal one through, a message without the
numbers that decided, a rule nobody needs, a static_assert that says something else than the ledger.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compilers import nvcc, run_cpp

from codegen.arch import REGISTERS_PER_SM, REGISTERS_PER_THREAD, TARGETS
from codegen.axes import Cluster, Kind, Mask, Operand, Out, Scaling, Schedule, Softmax, Tile, Walk
from codegen.expr import Env
from codegen.families import FAMILIES, derive
from codegen.families.warpgroup.derive import derive as derive_warpgroup
from codegen.legal import check, kernel_asserts
from codegen.matrix import MATRICES
from codegen.render import environment as template_environment
from codegen.render import render_kernel
from codegen.rule import QK_AMAX, VALUES, Rule
from codegen.select import select
from codegen.variant import Variant, parse_id
from fp8cutlass.manifest import SCORE_AMAX

BASE = parse_id("sm89_fwd_d64_m64n64w4_s2_block_full_e4m3_bf16_linear")
HOPPER = parse_id("sm90a_fwd_d64_m128n128w8_s2_block_full_e4m3_bf16_linear_serial_solo")
RULES = {name: family.rules for name, family in FAMILIES.items()}
RULE = {family: {rule.name: rule for rule in rules} for family, rules in RULES.items()}
LIMIT = FAMILIES["sm89"].smem_per_block
HOPPER_LIMIT = FAMILIES["sm90a"].smem_per_block

ROOT = Path(__file__).resolve().parents[2]


def tile(m: int, n: int, warps: int) -> Tile:
    return Tile(m=m, n=n, warps=warps)


def smem_sum(v: Variant) -> str:
    d = derive(v)
    return " + ".join(f"{name} {size:,}" for name, size in d.smem_parts) + f" = {d.smem_bytes:,}"


BIG = replace(BASE, head_dim=256, tile=tile(128, 128, 8), stages=4)
WIDE = replace(BASE, head_dim=256, tile=tile(128, 32, 4), stages=1)
ALONE = replace(BASE, tile=tile(128, 128, 8), stages=4)
EXP2 = replace(BASE, softmax=Softmax.EXP2)
HOPPER_EXP2 = replace(HOPPER, softmax=Softmax.EXP2)
TERMS, HOPPER_TERMS = (replace(v, softmax=Softmax.EXP2X2) for v in (BASE, HOPPER))
WARP_INTEGERS = replace(BASE, dtype=Operand.S8, softmax=Softmax.CODES)
INTEGERS = replace(HOPPER, dtype=Operand.S8, softmax=Softmax.CODES)
HOPPER_BENT = replace(HOPPER, softmax=Softmax.QUADRATIC)
BENT_SPILLS = replace(HOPPER_BENT, head_dim=128, tile=tile(128, 192, 8), schedule=Schedule.PINGPONG, out=Out.E4M3)
BENT_COLUMNS = replace(HOPPER_BENT, head_dim=192, schedule=Schedule.COLUMNS)
COLUMNS_ARE_FOR = (
    "column parts are for two warpgroups, head_dim > 128 and softmax linear, or quadratic below head_dim 256"
)
HOPPER_SPILLS = replace(HOPPER, head_dim=128, tile=tile(128, 64, 8), softmax=Softmax.EXP2, schedule=Schedule.PINGPONG)
HOPPER_BIG = replace(HOPPER, head_dim=256, tile=tile(128, 256, 8), stages=4)
HOPPER_FULL = replace(HOPPER_EXP2, head_dim=128, tile=tile(192, 128, 12))
SPLIT = "offered to forward kernels with 64 or 128 rows, schedule serial and one term of P"

# rule, a variant that breaks it and nothing before it, the message
CASES: list[tuple[str, Variant, str]] = [
    ("WARP-ROWS", replace(BASE, tile=tile(64, 64, 8)), "64 rows / 8 warps = 8, not 16 or 32"),
    ("WARP-ROWS", replace(BASE, tile=tile(128, 64, 2)), "128 rows / 2 warps = 64, not 16 or 32"),
    ("WARP-ROWS", replace(BASE, tile=tile(64, 64, 3)), "64 rows / 3 warps = 21.3333, not 16 or 32"),
    ("WARP-ROWS", replace(BASE, tile=tile(65, 64, 4)), "65 rows / 4 warps = 16.25, not 16 or 32"),
    ("KEY-TILE", replace(BASE, tile=tile(64, 48, 4)), "tile_n 48 is no multiple of 32 that divides 128"),
    ("KEY-TILE", replace(BASE, tile=tile(64, 96, 4)), "tile_n 96 is no multiple of 32 that divides 128"),
    ("KEY-TILE", replace(BASE, tile=tile(64, 256, 4)), "tile_n 256 is no multiple of 32 that divides 128"),
    ("SMEM", BIG, f"{smem_sum(BIG)} > {LIMIT:,}"),
    ("SMEM", replace(BIG, scaling=Scaling.TOKEN), f"{smem_sum(replace(BIG, scaling=Scaling.TOKEN))} > {LIMIT:,}"),
    ("REGISTERS", WIDE, f"about {derive(WIDE).registers} registers a thread > {REGISTERS_PER_THREAD}"),
    (
        "OCCUPANCY",
        ALONE,
        f"1 CTA an SM (shared memory: {derive(ALONE).smem_bytes:,} B, "
        f"about {derive(ALONE).registers} registers x 256 threads)",
    ),
    (
        "LINEAR-RANGE",
        replace(BASE, head_dim=336, tile=tile(64, 32, 4), stages=1),
        "336 x 14 x 14 = 65,856 > 65,504",
    ),
    ("LINEAR-E5M2", replace(BASE, dtype=Operand.E5M2), "linear softmax needs f16 scores, e5m2 reaches 57,344"),
    (
        "LINEAR-TOKEN",
        replace(BASE, scaling=Scaling.TOKEN),
        "linear softmax has one slope a row and tile, token scaling one a key",
    ),
    (
        "E5M2-TOKEN",
        replace(EXP2, dtype=Operand.E5M2, scaling=Scaling.TOKEN),
        "token scaling of e5m2 operands is not offered (tensor, head and block are)",
    ),
    (
        "E5M2-OUT",
        replace(EXP2, dtype=Operand.E5M2, out=Out.E4M3),
        "e4m3 output of e5m2 operands is not offered (bf16 and fp16 are)",
    ),
    (
        "E4M3-OUT-TOKEN",
        replace(EXP2, scaling=Scaling.TOKEN, out=Out.E4M3),
        "e4m3 output with token scaling is not offered (tensor, head and block are)",
    ),
    (
        "TWO-TERMS-OUT",
        replace(TERMS, out=Out.E4M3),
        "two terms of P with e4m3 output are not offered (bf16 and fp16 are)",
    ),
    (
        "TWO-TERMS-E5M2",
        replace(TERMS, dtype=Operand.E5M2),
        "two terms of P with e5m2 operands are not offered (e4m3 are)",
    ),
    ("EXACT-SCORES", replace(BASE, softmax=Softmax.CODES), "codes softmax takes s32 scores, those of e4m3 are f32"),
    ("EXACT-SCORES", replace(BASE, dtype=Operand.S8), "linear softmax takes f16 scores, those of s8 are s32"),
    ("INTEGER-P", replace(WARP_INTEGERS, softmax=Softmax.BYTES), "bytes softmax makes u8, P of s8 is e4m3"),
    ("INTEGER-P", replace(WARP_INTEGERS, dtype=Operand.S8U8), "codes softmax makes no u8, P of s8u8 is u8"),
    (
        "INTEGER-SCALING",
        replace(WARP_INTEGERS, scaling=Scaling.TOKEN),
        "token descales of s8 operands are not offered (block are)",
    ),
    (
        "INTEGER-OUT",
        replace(WARP_INTEGERS, out=Out.E4M3),
        "e4m3 output of s8 operands is not offered (bf16 and fp16 are)",
    ),
    ("HEAD-DIM", replace(BASE, head_dim=48), "head_dim 48 is none of 32, 64, 96, 128, 256"),
    (
        "LOAD-ROWS",
        replace(BASE, head_dim=256, tile=tile(32, 32, 2)),
        "64 threads copy no multiple of 8 rows of 256 or 32 bytes at a time",
    ),
    (
        "DIAG-TILE",
        replace(BASE, kind=Kind.DIAG, tile=tile(64, 32, 4)),
        "diagnostic kernels of head_dim 64 take 64 keys",
    ),
    # sm90a
    ("LINEAR-RANGE", replace(HOPPER, head_dim=336), "336 x 14 x 14 = 65,856 > 65,504"),
    ("LINEAR-E5M2", replace(HOPPER, dtype=Operand.E5M2), "linear softmax needs f16 scores, e5m2 reaches 57,344"),
    (
        "LINEAR-E5M2",
        replace(HOPPER_BENT, dtype=Operand.E5M2),
        "quadratic softmax needs f16 scores, e5m2 reaches 57,344",
    ),
    (
        "LINEAR-TOKEN",
        replace(HOPPER, scaling=Scaling.TOKEN),
        "linear softmax has one slope a row and tile, token scaling one a key",
    ),
    (
        "LINEAR-TOKEN",
        replace(HOPPER_BENT, scaling=Scaling.TOKEN),
        "quadratic softmax has one slope a row and tile, token scaling one a key",
    ),
    (
        "E5M2-TOKEN",
        replace(HOPPER_EXP2, dtype=Operand.E5M2, scaling=Scaling.TOKEN),
        "token scaling of e5m2 operands is not offered (tensor, head and block are)",
    ),
    (
        "E5M2-OUT",
        replace(HOPPER_EXP2, dtype=Operand.E5M2, out=Out.E4M3),
        "e4m3 output of e5m2 operands is not offered (bf16 and fp16 are)",
    ),
    (
        "E4M3-OUT-TOKEN",
        replace(HOPPER_EXP2, scaling=Scaling.TOKEN, out=Out.E4M3),
        "e4m3 output with token scaling is not offered (tensor, head and block are)",
    ),
    (
        "TWO-TERMS-OUT",
        replace(HOPPER_TERMS, out=Out.E4M3),
        "two terms of P with e4m3 output are not offered (bf16 and fp16 are)",
    ),
    (
        "TWO-TERMS-E5M2",
        replace(HOPPER_TERMS, dtype=Operand.E5M2),
        "two terms of P with e5m2 operands are not offered (e4m3 are)",
    ),
    ("EXACT-SCORES", replace(HOPPER, softmax=Softmax.CODES), "codes softmax takes s32 scores, those of e4m3 are f32"),
    (
        "INTEGER-SCALING",
        replace(INTEGERS, scaling=Scaling.TOKEN),
        "token descales of s8 operands are not offered (block are)",
    ),
    ("INTEGER-OUT", replace(INTEGERS, out=Out.E4M3), "e4m3 output of s8 operands is not offered (bf16 and fp16 are)"),
    ("INTEGER-P", replace(INTEGERS, softmax=Softmax.BYTES), "bytes softmax makes u8, P of s8 is e4m3"),
    (
        "INTEGER-V",
        replace(INTEGERS, dtype=Operand.S8U8, softmax=Softmax.BYTES),
        "no kernel of this family multiplies V of s8u8",
    ),
    ("INTEGER-HEAD-DIM", replace(INTEGERS, head_dim=96), "s8 operands are offered for head_dim 64 and 128"),
    ("HEAD-DIM", replace(HOPPER, head_dim=80), "head_dim 80 is none of 64, 96, 128, 192, 256"),
    ("WARPGROUP-ROWS", replace(HOPPER, tile=tile(128, 64, 4)), "128 rows for 4 warps, which own 64"),
    ("KEY-STEPS", replace(HOPPER, tile=tile(128, 96, 8)), "tile_n 96 is no multiple of 64 up to 256"),
    ("KEY-STEPS", replace(HOPPER, tile=tile(128, 320, 8)), "tile_n 320 is no multiple of 64 up to 256"),
    (
        "LISTED-TILE",
        replace(HOPPER, mask=Mask.BLOCKS, tile=tile(128, 64, 8)),
        "lists of a mask have tiles of 128 x 128, not 128 x 64",
    ),  # fmt: skip
    (
        "PAIR-REGISTERS",
        replace(HOPPER, mask=Mask.BLOCKS, tile=tile(128, 256, 8)),
        "linear, serial and head_dim 64 have no pairs of tiles",
    ),
    (
        "EXP2-KEYS",
        replace(HOPPER_EXP2, tile=tile(128, 192, 8)),
        "exp2 softmax serves blocks of 128 keys, which 192 does not divide",
    ),
    (
        "PINGPONG-ALONE",
        replace(HOPPER, tile=tile(64, 128, 4), schedule=Schedule.PINGPONG),
        "1 warpgroup has nobody to take turns with",
    ),
    (
        "WIDE-PARTS",
        replace(HOPPER, head_dim=192, schedule=Schedule.OVERLAP),
        "overlap has no registers for a product of head_dim 192 beside O",
    ),
    ("COLUMNS-WIDE", replace(HOPPER, schedule=Schedule.COLUMNS), COLUMNS_ARE_FOR),
    ("COLUMNS-WIDE", replace(BENT_COLUMNS, head_dim=256), COLUMNS_ARE_FOR),
    (
        "HALVED-SLOTS",
        replace(HOPPER, head_dim=256, tile=tile(128, 256, 8), schedule=Schedule.COLUMNS),
        "2 stages are too few for tiles of 256 keys in halves",
    ),
    ("SPLIT-TILE", replace(HOPPER, tile=tile(192, 128, 12), cluster=Cluster.SPLIT2), SPLIT),
    ("SPLIT-TILE", replace(HOPPER, schedule=Schedule.PINGPONG, cluster=Cluster.SPLIT4), SPLIT),
    ("SPLIT-TILE", replace(HOPPER, kind=Kind.DIAG, cluster=Cluster.SPLIT2), SPLIT),
    ("SPLIT-TILE", replace(HOPPER_TERMS, stages=3, cluster=Cluster.SPLIT2), SPLIT),
    (
        "SPILLS",
        HOPPER_SPILLS,
        f"about {derive(HOPPER_SPILLS).registers} registers a thread fit, but the blocks of accumulators do not",
    ),
    (
        "SPILLS",
        BENT_SPILLS,
        f"about {derive(BENT_SPILLS).registers} registers a thread fit, but the blocks of accumulators do not",
    ),
    ("SMEM", HOPPER_BIG, f"{smem_sum(HOPPER_BIG)} > {HOPPER_LIMIT:,}"),
    (
        "MERGE-BYTES",
        replace(HOPPER, head_dim=256, tile=tile(128, 64, 8), cluster=Cluster.SPLIT2),
        "139,264 bytes to merge > 67,584 of all stages",
    ),
    (
        "REGISTERS",
        HOPPER_FULL,
        f"about {derive(HOPPER_FULL).registers} registers a thread > {derive(HOPPER_FULL).register_limit}",
    ),
]

# Rules that reject no declared point, with the reason for which they stand there all the same.
GUARDS = {
    "sm89": {
        "EXACT-SCORES": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-SCALING": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-OUT": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "HEAD-DIM": "the declared head_dims keep it; it guards one that somebody adds",
        "LOAD-ROWS": "the declared tiles keep it; it guards a tile that somebody adds",
        "WARP-ROWS": "the declared tiles keep it; it guards a tile that somebody adds",
        "KEY-TILE": "the declared tiles keep it; it guards a tile that somebody adds",
        "LINEAR-RANGE": "head_dim 256 keeps it with 50,176; it guards a larger head_dim or amax",
    },
    "sm90a": {
        "EXACT-SCORES": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-SCALING": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-OUT": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-P": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-V": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "INTEGER-HEAD-DIM": "the matrix of integers keeps it; it says why a cell of the table is empty",
        "HEAD-DIM": "the declared head_dims keep it; it guards one that somebody adds",
        "WARPGROUP-ROWS": "the declared tiles keep it; it guards a tile that somebody adds",
        "KEY-STEPS": "the declared tiles keep it; it guards a tile that somebody adds",
        "LISTED-TILE": "the declared tiles keep it; it guards a tile that somebody adds",
        "LINEAR-RANGE": "head_dim 256 keeps it with 50,176; it guards a larger head_dim or amax",
    },
}


def test_the_variants_beside_the_cases_are_legal() -> None:
    for v in (
        BASE,
        EXP2,
        TERMS,
        HOPPER_BENT,
        BENT_COLUMNS,
        replace(EXP2, scaling=Scaling.TOKEN),
        replace(EXP2, dtype=Operand.E5M2),
    ):
        assert check(v) is None, v.id
    assert check(replace(WIDE, tile=tile(64, 32, 4))) is None
    for v in (HOPPER_EXP2, replace(HOPPER_EXP2, scaling=Scaling.TOKEN), replace(HOPPER_EXP2, dtype=Operand.E5M2)):
        assert check(v) is None, v.id
    for v in (HOPPER, HOPPER_TERMS, replace(HOPPER_TERMS, scaling=Scaling.TOKEN, out=Out.FP16)):
        assert check(v) is None, v.id
    for schedule in (Schedule.PINGPONG, Schedule.OVERLAP, Schedule.SERIAL):
        assert check(replace(HOPPER, schedule=schedule)) is None, schedule
    assert check(replace(HOPPER, head_dim=256, stages=2, tile=tile(128, 128, 8), schedule=Schedule.COLUMNS)) is None
    assert check(replace(HOPPER, stages=3, cluster=Cluster.SPLIT4)) is None


@pytest.mark.parametrize(("rule", "v", "message"), CASES, ids=[f"{rule}-{v.id}" for rule, v, _ in CASES])
def test_rejection(rule: str, v: Variant, message: str) -> None:
    rejection = check(v)
    assert rejection is not None
    assert (rejection.rule, rejection.message) == (rule, message)


@pytest.mark.parametrize(
    ("v", "parts"),
    [
        (BASE, {"Q": 64 * 64, "2 x K": 2 * 64 * 64, "2 x V": 2 * 64 * 64}),
        (BIG, {"Q": 128 * 256, "4 x K": 4 * 128 * 256, "4 x V": 4 * 256 * 128}),
        (
            replace(EXP2, head_dim=96, scaling=Scaling.TOKEN),  # rows of 96 bytes are padded to 112
            {"Q": 64 * 112, "2 x K": 2 * 64 * 112, "2 x V": 2 * 96 * 64, "2 x K descales": 2 * 64 * 4},
        ),
        (
            replace(EXP2, scaling=Scaling.TOKEN, tile=tile(64, 32, 4)),
            {"Q": 64 * 64, "2 x K": 2 * 32 * 64, "2 x V": 2 * 64 * 32, "2 x K descales": 2 * 128},
        ),
        (HOPPER, {"2 x Q": 2 * 128 * 64, "2 x K": 2 * 128 * 64, "2 x V": 2 * 128 * (64 + 8)}),
        (
            replace(HOPPER_EXP2, head_dim=96, scaling=Scaling.TOKEN, tile=tile(64, 64, 4)),
            # rows of 96 bytes take 128; 64 x 104 bytes of V are rounded up to 7 KiB, and so is the total
            {"2 x Q": 2 * 64 * 128, "2 x V": 2 * 7168, "2 x K descales": 512},
        ),
        (replace(HOPPER, cluster=Cluster.SPLIT2), {"1 x Q": 128 * 64}),
    ],
    ids=lambda x: x.id if isinstance(x, Variant) else "parts",
)
def test_the_sum_of_shared_memory(v: Variant, parts: dict[str, int]) -> None:
    """The numbers of the SMEM message, once by hand; the compiler holds the total to sizeof(SharedStorage)."""
    d = derive(v)
    assert parts.items() <= dict(d.smem_parts).items()
    assert d.smem_bytes == sum(size for _, size in d.smem_parts)
    assert v.family == "sm89" or d.smem_bytes % 1024 == 0, "what is aligned to 1 KiB has a size of whole KiB"


@pytest.mark.parametrize("family", RULES)
def test_every_rule_has_a_case(family: str) -> None:
    assert {rule for rule, v, _ in CASES if v.family == family} == set(RULE[family])
    assert len(RULE[family]) == len(RULES[family])


@pytest.mark.parametrize("family", RULES)
def test_every_rule_is_needed(family: str) -> None:
    used = {r.rule for v, r in select().rejected if v.family == family} - {"OUTRANKED"}
    assert set(RULE[family]) - used == set(GUARDS[family])


@pytest.mark.parametrize("rule", {id(r): r for rules in RULES.values() for r in rules}.values(), ids=lambda r: r.name)
def test_a_rule_is_a_condition_or_a_choice(rule: Rule) -> None:
    assert (rule.condition is None) != (rule.refuses is None)
    assert rule.why


@pytest.mark.parametrize(
    ("rule", "env", "holds"),
    [
        ("SMEM", {"smem_bytes": LIMIT}, True),
        ("SMEM", {"smem_bytes": LIMIT + 1}, False),
        ("OCCUPANCY", {"head_dim": 128, "ctas_per_sm": 2}, True),
        ("OCCUPANCY", {"head_dim": 128, "ctas_per_sm": 1}, False),
        ("OCCUPANCY", {"head_dim": 256, "ctas_per_sm": 1}, True),
        ("LINEAR-RANGE", {"score_regs": 2, "head_dim": 334}, True),
        ("LINEAR-RANGE", {"score_regs": 2, "head_dim": 335}, False),
        ("LINEAR-RANGE", {"score_regs": 4, "head_dim": 335}, True),
        ("WARP-ROWS", {"tile_m": 64, "warps": 4, "rows_per_warp": 16}, True),
        ("WARP-ROWS", {"tile_m": 128, "warps": 4, "rows_per_warp": 32}, True),
        ("WARP-ROWS", {"tile_m": 96, "warps": 2, "rows_per_warp": 48}, False),
        ("KEY-TILE", {"tile_n": 32}, True),
        ("KEY-TILE", {"tile_n": 128}, True),
        ("KEY-TILE", {"tile_n": 16}, False),
    ],
)
def test_edges(rule: str, env: Env, holds: bool) -> None:
    assert_edge("sm89", rule, env, holds)


@pytest.mark.parametrize(
    ("rule", "env", "holds"),
    [
        ("SMEM", {"smem_bytes": HOPPER_LIMIT}, True),
        ("SMEM", {"smem_bytes": HOPPER_LIMIT + 1}, False),
        ("WARPGROUP-ROWS", {"tile_m": 192, "warps": 12}, True),
        ("WARPGROUP-ROWS", {"tile_m": 128, "warps": 12}, False),
        ("KEY-STEPS", {"tile_n": 256}, True),
        ("KEY-STEPS", {"tile_n": 257}, False),
        ("KEY-STEPS", {"tile_n": 320}, False),
        ("LISTED-TILE", {"tile_m": 128, "tile_n": 128}, True),
        ("LISTED-TILE", {"tile_m": 128, "tile_n": 256}, True),
        ("LISTED-TILE", {"tile_m": 128, "tile_n": 192}, False),
        ("LISTED-TILE", {"tile_m": 64, "tile_n": 128}, False),
        ("EXP2-KEYS", {"tile_n": 128, "score_regs": 4}, True),
        ("EXP2-KEYS", {"tile_n": 256, "score_regs": 4}, False),
        ("EXP2-KEYS", {"tile_n": 256, "score_regs": 2}, True),
    ],
)
def test_edges_of_sm90a(rule: str, env: Env, holds: bool) -> None:
    assert_edge("sm90a", rule, env, holds)


def assert_edge(family: str, rule: str, env: Env, holds: bool) -> None:
    condition = RULE[family][rule].condition
    assert condition is not None
    assert bool(condition.value(env)) is holds


def spelled(env: Env) -> str:
    """A C++ scope in which the conditions find their symbols, as in a kernel."""
    return (
        f"constexpr int kHeadDim = {env['head_dim']}, kTileM = {env['tile_m']}, kTileN = {env['tile_n']}, "
        f"kWarps = {env['warps']}, kWarpRows = {env['rows_per_warp']}, kCtasPerSm = {env['ctas_per_sm']}, "
        f"kScoreRegs = {env['score_regs']}; struct SharedStorage {{ char bytes[{env['smem_bytes']}]; }};"
    )


@pytest.mark.parametrize("family", RULES)
def test_python_and_cpp_agree_on_every_condition(family: str, tmp_path: Path) -> None:
    """Over every environment that the declared matrix has, and those of the cases."""
    variants = [v for matrix in MATRICES if matrix.family == family for v in matrix.points]
    variants += [v for _, v, _ in CASES if v.family == family]
    found = {tuple((name, of(v, derive(v))) for name, of in VALUES.items()) for v in variants}
    environments = [dict(items) for items in sorted(found)]
    conditions = [rule.condition for rule in RULES[family] if rule.condition is not None]
    values = ", ".join(f"bool({c.cpp()})" for c in conditions)
    show = 'for (bool b : all) std::printf("%d\\n", b);'
    blocks = [f"{{ {spelled(e)} const bool all[] = {{{values}}}; {show} }}" for e in environments]
    got = [int(line) for line in run_cpp(blocks, tmp_path).split()]
    want = [int(bool(c.value(e))) for e in environments for c in conditions]
    assert len(environments) > 100
    for i in range(len(conditions)):
        assert set(want[i :: len(conditions)]) == {0, 1}, "a condition that never changes proves nothing"
    assert got == want


def test_every_condition_stands_in_every_kernel() -> None:
    env = template_environment()
    for v in select().emitted:
        lines = [f'static_assert({cpp}, "{message}");' for cpp, message in kernel_asserts(v)]
        assert len(lines) == sum(rule.condition is not None and rule.among(v) for rule in RULES[v.family])
        text = render_kernel(v, env)
        assert [line for line in lines if line not in text] == [], v.id
        if v.dtype is Operand.E4M3:
            assert all(rule.among(v) == (v.listed or rule.name != "LISTED-TILE") for rule in RULES[v.family]), (
                "a rule that is not asked of e4m3 is asked of lists of tiles, or of nothing"
            )


def compiled(v: Variant, folder: Path) -> tuple[bool, str]:
    """Whether the front end takes a kernel of the variant's family, and what it says."""
    source = folder / "kernel.cu"
    source.write_text(render_kernel(v, template_environment()))
    result = nvcc(f"-arch={TARGETS[v.family].code}", "-ptx", source, "-o", folder / "kernel.ptx")
    return result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("family", "rule"),
    [("sm89", "WARP-ROWS"), ("sm89", "SMEM"), ("sm89", "OCCUPANCY"), ("sm90a", "SMEM"), ("sm90a", "EXP2-KEYS")],
)
def test_the_compiler_refuses_too(family: str, rule: str, tmp_path: Path) -> None:
    v = next(v for name, v, _ in CASES if (v.family, name) == (family, rule))
    good, said = compiled(v, tmp_path)
    assert not good
    refused = {name for name in RULE[family] if f'static assertion failed with "{name}: ' in said}
    assert rule in refused
    assert refused == {r.name for r in RULES[family] if r.condition is not None and r.broken(v, derive(v))}


@pytest.mark.parametrize("v", [BASE, HOPPER], ids=lambda v: v.family)
def test_the_compiler_accepts_a_legal_kernel(v: Variant, tmp_path: Path) -> None:
    """Without this, a template that never compiles would pass the tests above."""
    good, said = compiled(v, tmp_path)
    assert good, said


# ---- what sm90a derives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"threads": 384, "parts": 1, "part_columns": 64}),
        ({"head_dim": 96}, {"part_columns": 96, "mma_per_tile": 3 + 4}),
        ({"head_dim": 192}, {"parts": 2, "part_columns": 96, "mma_per_tile": 6 + 8}),
        ({"head_dim": 256}, {"parts": 2, "part_columns": 128}),
        ({"tile": tile(192, 192, 12)}, {"threads": 512, "warpgroups": 3}),
        ({"tile": tile(64, 256, 4)}, {"threads": 256, "warpgroups": 1}),
        ({"cluster": Cluster.SPLIT4}, {"query_buffers": 1, "merge_bytes": 4 * 128 * 80}),
        # 2 x 48 KiB of Q and 2 x 33 KiB of K and V fit; with four stages only one Q does.
        ({"head_dim": 256, "tile": tile(192, 64, 12)}, {"query_buffers": 2, "stream_bytes": 67_584}),
        ({"head_dim": 256, "tile": tile(192, 64, 12), "stages": 4}, {"query_buffers": 1, "stream_bytes": 135_168}),
    ],
)
def test_what_follows_from_an_sm90a_variant(changes: dict[str, Any], expected: dict[str, int]) -> None:
    d = derive_warpgroup(replace(HOPPER, **changes))
    assert {name: getattr(d, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("head_dim", "keys", "forms"),
    [
        (64, 256, [(257, 512, 2, 256, 2 * 2 + 16), (769, 1024, 4, 256, 4 * 2 + 32)]),
        (96, 256, [(257, 512, 2, 256, 2 * 3 + 16)]),
        (128, 192, [(385, 512, 3, 128, 28), (577, 640, 4, 64, 36), (961, 1024, 6, 64, 56)]),
        (128, 128, []),
    ],
)
def test_forms_with_unrolled_tiles(head_dim: int, keys: int, forms: list[tuple[int, ...]]) -> None:
    """Two tiles of 256 keys; two of 192 and one of 128; three, or five, of 192 and one of 64."""
    v = replace(
        HOPPER,
        head_dim=head_dim,
        tile=tile(128, keys, 8),
        schedule=Schedule.PINGPONG,
        softmax=Softmax.LINEAR,
        mask=Mask.FULL,
    )
    found = derive_warpgroup(v).unrolled
    assert [(u.least_keys, u.most_keys, u.tiles, u.last_keys, u.products) for u in found] == forms
    others = Softmax.EXP2, Softmax.QUADRATIC
    for other in (
        {"mask": Mask.CAUSAL},
        {"mask": Mask.WINDOW},
        {"walk": Walk.RAGGED},
        *({"softmax": softmax} for softmax in others),
        {"scaling": Scaling.TOKEN},
        {"kind": Kind.DIAG},
    ):
        assert derive_warpgroup(replace(v, **other)).unrolled == ()
    assert [u.most_keys for u in found if u.plain] == ([1024] if keys == 192 else [])
    assert derive_warpgroup(v).middle or not found  # how `unrolled.j2` ends


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_the_registers_of_all_roles_fit_an_sm(warpgroups: int) -> None:
    d = derive_warpgroup(replace(HOPPER, tile=tile(64 * warpgroups, 64, 4 * warpgroups)))
    assert 128 * (warpgroups * d.consumer_registers + d.producer_registers) <= REGISTERS_PER_SM
    assert d.consumer_registers % 8 == d.producer_registers % 8 == 0


def test_the_slope_that_is_safe_is_that_of_the_amax() -> None:
    """What the kernels take for the largest score is what quantisation makes it."""
    header = (ROOT / "include" / "fp8cutlass" / "softmax.cuh").read_text()
    assert f"return kCodeLimit / ({QK_AMAX} * {QK_AMAX} * head_dim);" in header
    assert QK_AMAX == SCORE_AMAX
