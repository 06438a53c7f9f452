"""The ledger's part of decode, and `python -m codegen decode`: every declared shape is emitted, or rejected by numbers.

Regressions these catch: a shape that falls out of the sum, a row for points that another rule rejected, an emitted
kernel that a rule forbids, an explanation of another kernel than calls get.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
from click.testing import CliRunner

from codegen.arch import REGISTERS_PER_SM, SMEM_RESERVED_PER_CTA, TARGETS
from codegen.cli import main
from codegen.decode import ALL, DECLARED, HEAD_DIMS, Decode, candidates, emitted_as, refusal
from codegen.decode_ledger import AXES, CANDIDATE, VALUES, explain, render, rows_of_ledger, verdict
from fp8cutlass.manifest import generated_dir
from fp8cutlass.native.decode import kernel_for


def test_each_emitted_kernel_is_one_declared_shape_and_legal() -> None:
    found = [(d, kernel) for d in DECLARED if (kernel := emitted_as(d)) is not None]
    assert sorted(kernel.id for _, kernel in found) == sorted(d.id for d in ALL)
    for d, kernel in found:
        assert refusal(d) is None and (d.stages, d.smem_bytes, d.tile) == (
            kernel.stages,
            kernel.smem_bytes,
            kernel.tile,
        )


def test_candidates_are_the_legal_shapes() -> None:
    """By the limits of an SM, written again."""
    for d in DECLARED:
        target = TARGETS[d.target]
        each = min(target.smem_per_sm // d.ctas - SMEM_RESERVED_PER_CTA, target.smem_per_block)
        wide = d.target == "sm90a" and d.head_dim in (64, 128)
        legal = d.rows != 32 if wide else d.rows != 64 and d.rows * d.head_dim <= 4096
        legal = legal and d.smem_with(2) <= each
        legal = legal and d.registers * d.threads * d.ctas <= REGISTERS_PER_SM
        assert legal == (d in candidates(HEAD_DIMS, tuple(TARGETS))), d.id


def points_of(where: str) -> set[str]:
    named = {} if where == "everything" else dict(part.split("=") for part in where.split(" "))
    values = [
        [x for x in all_of if axis not in named or str(x) in named[axis].split("|")]
        for axis, all_of in zip(AXES, VALUES, strict=True)
    ]
    return {Decode(**dict(zip(AXES, point, strict=True))).id for point in product(*values)}


def test_every_rejected_shape_is_in_exactly_one_row() -> None:
    covered: dict[str, tuple[str, str]] = {}
    for rule, where, message, count in rows_of_ledger():
        points = points_of(where)
        assert len(points) == count and not points & covered.keys(), where
        covered |= dict.fromkeys(points, (rule, message))
    rejected = {d.id: verdict(d) for d in DECLARED if verdict(d)[0]}
    assert covered == rejected and len(rejected) + len(ALL) == len(DECLARED) == len({d.id for d in DECLARED})


def test_the_text_adds_up() -> None:
    head = re.search(r"^## decode: declared (\d+) = emitted (\d+) \+ rejected (\d+)$", render(), re.M)
    assert (
        head is not None and int(head[1]) == len(DECLARED) == int(head[2]) + int(head[3]) and int(head[2]) == len(ALL)
    )
    sections = render().split("\n### ")[1:]
    total = 0
    for section in sections:
        title, *lines = section.strip().splitlines()
        count = re.search(r"\(([\d,]+)\)", title)
        assert count is not None and sum(int(line.split()[0]) for line in lines) == int(count[1].replace(",", "")) > 0
        total += int(count[1].replace(",", ""))
    assert total == int(head[3]) and len(sections) == 5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 33, 200])
def test_the_explained_kernel_is_that_of_calls(target: str, head_dim: int, rows: int) -> None:
    kernel, _ = kernel_for(generated_dir(), target, head_dim, rows)
    result = CliRunner().invoke(main, ["decode", "--arch", target, "--head-dim", str(head_dim), "--rows", str(rows)])
    said = explain(target, head_dim, rows)
    assert result.exit_code == 0 and result.output == f"{said}\n" and f"kernel   {kernel.id}\n" in said
    assert f"{kernel.smem_bytes:,} of shared memory" in said and f"CTAs     {kernel.ctas_per_sm} an SM" in said
    few_said = f"few      decode_{target}_d{head_dim}_r16, where" in said
    assert few_said == (kernel.rows == 64 and rows <= 32)
    few, _ = kernel_for(generated_dir(), target, head_dim, rows, few=True)
    assert few.rows == (16 if kernel.rows == 64 and rows <= 32 else kernel.rows)
    if kernel.rows == 64:
        assert said.endswith("other shapes: none")
        return
    shapes = said.split("other shapes:\n")[1].splitlines()
    declared = [d for d in DECLARED if (d.target, d.head_dim, d.rows) == (target, head_dim, kernel.rows)]
    assert len(shapes) == len(declared) - 1
    assert all(re.fullmatch(r"  k\d+c\dw\d DECODE-[A-Z]+: .+", line) for line in shapes)
    if head_dim == 64:
        assert any(CANDIDATE in line for line in shapes)


def test_a_head_dim_without_kernels() -> None:
    assert explain("sm90a", 80, 4).endswith("got 80")
