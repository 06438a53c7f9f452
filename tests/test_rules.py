"""Legality: each rule with its name and numbers, and the same verdict from Python and from the compiler.

Regressions these catch: a rule that refuses a legal kernel or lets an illegal one through, a message without the
numbers that decided, a rule nobody needs, a static_assert that says something else than the ledger.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from compilers import nvcc, run_cpp

from codegen.arch import FAMILIES, REGISTERS_PER_THREAD
from codegen.derive import derive
from codegen.expr import Env
from codegen.ledger import counts
from codegen.matrix import MATRICES
from codegen.render import environment as template_environment
from codegen.render import render_kernel
from codegen.rules import RULES, Rule, check, environment, kernel_asserts
from codegen.select import select
from codegen.spec import Dtype, Kind, Out, Scaling, Softmax, Tile, Variant, parse_id

BASE = parse_id("sm89_fwd_d64_m64n64w4_s2_tensor_full_e4m3_bf16_linear")
RULE = {rule.name: rule for rule in RULES}
LIMIT = FAMILIES["sm89"].smem_per_block


def tile(m: int, n: int, warps: int) -> Tile:
    return Tile(m=m, n=n, warps=warps)


def smem_sum(v: Variant) -> str:
    d = derive(v)
    return " + ".join(f"{name} {size:,}" for name, size in d.smem_parts) + f" = {d.smem_bytes:,}"


BIG = replace(BASE, head_dim=256, tile=tile(128, 128, 8), stages=4)
WIDE = replace(BASE, head_dim=256, tile=tile(128, 32, 4), stages=1)
ALONE = replace(BASE, tile=tile(128, 128, 8), stages=4)
EXP2 = replace(BASE, softmax=Softmax.EXP2)

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
    ("LINEAR-E5M2", replace(BASE, dtype=Dtype.E5M2), "linear softmax needs f16 scores, e5m2 reaches 57,344"),
    (
        "LINEAR-TOKEN",
        replace(BASE, scaling=Scaling.TOKEN),
        "linear softmax has one slope a row and tile, token scaling one a key",
    ),
    (
        "E5M2-SCALING",
        replace(EXP2, dtype=Dtype.E5M2, scaling=Scaling.BLOCK),
        "block scaling of e5m2 operands is not offered (tensor and head are)",
    ),
    (
        "E5M2-SCALING",
        replace(EXP2, dtype=Dtype.E5M2, scaling=Scaling.TOKEN),
        "token scaling of e5m2 operands is not offered (tensor and head are)",
    ),
    (
        "E5M2-OUT",
        replace(EXP2, dtype=Dtype.E5M2, out=Out.E4M3),
        "e4m3 output of e5m2 operands is not offered (bf16 and fp16 are)",
    ),
    (
        "E4M3-OUT-TOKEN",
        replace(EXP2, scaling=Scaling.TOKEN, out=Out.E4M3),
        "e4m3 output with token scaling is not offered (tensor, head and block are)",
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
]

# Rules that reject no declared point, with the reason for which they stand there all the same.
GUARDS = {
    "HEAD-DIM": "the declared head_dims keep it; it guards one that somebody adds",
    "LOAD-ROWS": "the declared tiles keep it; it guards a tile that somebody adds",
    "WARP-ROWS": "the declared tiles keep it; it guards a tile that somebody adds",
    "KEY-TILE": "the declared tiles keep it; it guards a tile that somebody adds",
    "LINEAR-RANGE": "head_dim 256 keeps it with 50,176; it guards a larger head_dim or amax",
}


def test_the_variants_beside_the_cases_are_legal() -> None:
    for v in (BASE, EXP2, replace(EXP2, scaling=Scaling.TOKEN), replace(EXP2, dtype=Dtype.E5M2)):
        assert check(v) is None, v.id
    assert check(replace(WIDE, tile=tile(64, 32, 4))) is None


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
    ],
    ids=lambda x: x.id if isinstance(x, Variant) else "parts",
)
def test_the_sum_of_shared_memory(v: Variant, parts: dict[str, int]) -> None:
    """The numbers of the SMEM message, once by hand; the compiler holds the total to sizeof(SharedStorage)."""
    d = derive(v)
    assert parts.items() <= dict(d.smem_parts).items()
    assert d.smem_bytes == sum(size for _, size in d.smem_parts)


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, _, _ in CASES} == set(RULE)
    assert len(RULE) == len(RULES)


def test_every_rule_is_needed() -> None:
    used = set(counts(select())) - {"OUTRANKED"}
    assert set(RULE) - used == set(GUARDS)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
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
    condition = RULE[rule].condition
    assert condition is not None
    assert bool(condition.value(env)) is holds


def spelled(env: Env) -> str:
    """A C++ scope in which the conditions find their symbols, as in a kernel."""
    return (
        f"constexpr int kHeadDim = {env['head_dim']}, kTileM = {env['tile_m']}, kTileN = {env['tile_n']}, "
        f"kWarps = {env['warps']}, kWarpRows = {env['rows_per_warp']}, kCtasPerSm = {env['ctas_per_sm']}, "
        f"kScoreRegs = {env['score_regs']}; struct SharedStorage {{ char bytes[{env['smem_bytes']}]; }};"
    )


def test_python_and_cpp_agree_on_every_condition(tmp_path: Path) -> None:
    """Over every environment that the declared matrix has, and those of the cases."""
    variants = [v for matrix in MATRICES for v in matrix.points()] + [v for _, v, _ in CASES]
    found = {tuple(environment(v, derive(v)).items()) for v in variants}
    environments = [dict(items) for items in sorted(found)]
    conditions = [rule.condition for rule in RULES if rule.condition is not None]
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
    lines = [f'static_assert({cpp}, "{message}");' for cpp, message in kernel_asserts()]
    assert len(lines) == sum(rule.condition is not None for rule in RULES)
    for v in select().emitted:
        text = render_kernel(v, env)
        assert [line for line in lines if line not in text] == [], v.id


@pytest.mark.parametrize("rule", ["WARP-ROWS", "SMEM", "OCCUPANCY"])
def test_the_compiler_refuses_too(rule: str, tmp_path: Path) -> None:
    v = next(v for name, v, _ in CASES if name == rule)
    source = tmp_path / "kernel.cu"
    source.write_text(render_kernel(v, template_environment()))
    result = nvcc("-arch=sm_89", "-ptx", source, "-o", tmp_path / "kernel.ptx")
    assert result.returncode != 0
    refused = {name for name in RULE if f'static assertion failed with "{name}: ' in result.stderr}
    assert rule in refused
    assert refused == {r.name for r in RULES if r.condition is not None and r.broken(v, derive(v))}


def test_the_compiler_accepts_a_legal_kernel(tmp_path: Path) -> None:
    """Without this, a template that never compiles would pass the tests above."""
    source = tmp_path / "kernel.cu"
    source.write_text(render_kernel(BASE, template_environment()))
    result = nvcc("-arch=sm_89", "-ptx", source, "-o", tmp_path / "kernel.ptx")
    assert result.returncode == 0, result.stderr
