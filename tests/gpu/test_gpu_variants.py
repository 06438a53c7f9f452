"""Every compiled kernel against its three references: the emulator, float64 on the same operands, and itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from gpu import fp8_variants, is_emulated, out_descale_for, run_kernel
from kernel_gates import (
    AMAX,
    HIGH_L2,
    ROW_COSINE,
    dequantised_limit,
    emulator_limit,
    high_error_limit,
    lse_limit,
    worst_row_is_the_algorithms,
)
from reference import Operands, attention64, min_row_cosine, operands_of, randn, relative_l2, z_test

from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int


# The project's own problem; tails in both directions with GQA; more queries than keys and fewer; one key; and more work
# items (512 of 128 rows) than CTAs fit on any card at once, so that the persistent loop turns.
PERSISTENT = Shape(8, 32, 16, 130, 70)
SHAPES = (
    Shape(1, 8, 8, 512, 512),
    Shape(2, 6, 2, 257, 391),
    Shape(2, 3, 1, 300, 130),
    Shape(1, 2, 2, 1, 1023),
    Shape(1, 2, 1, 129, 1),
    PERSISTENT,
)


VARIANTS = fp8_variants()
# A kernel that reads its descales through strides serves more modes than the one in its id.
COARSER = [(v, scaling) for v in VARIANTS for scaling in v.scalings if scaling != v.scaling]


def random_operands(variant: Variant, shape: Shape, scaling: str | None = None) -> Operands:
    q = randn(shape.batch, shape.heads, shape.seqlen_q, variant.head_dim, seed=1, device="cuda")
    k = randn(shape.batch, shape.kv_heads, shape.seqlen_k, variant.head_dim, seed=2, device="cuda")
    v = randn(shape.batch, shape.kv_heads, shape.seqlen_k, variant.head_dim, seed=3, device="cuda")
    return operands_of(variant, q, k, v, scaling)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"b{s.batch}h{s.heads}kv{s.kv_heads}q{s.seqlen_q}k{s.seqlen_k}")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.id)
def test_variant(variant: Variant, shape: Shape) -> None:
    check(variant, shape, variant.scaling)


@pytest.mark.parametrize(("variant", "scaling"), COARSER, ids=lambda x: x if isinstance(x, str) else x.id)
def test_coarser_scaling(variant: Variant, scaling: str) -> None:
    """Tails, GQA and several batches: a wrong stride reads the descale of another head."""
    check(variant, SHAPES[1], scaling)


def check(variant: Variant, shape: Shape, scaling: str) -> None:
    """The kernel against itself, the emulator, and float64 on the operands that it was given."""
    operands = random_operands(variant, shape, scaling)
    scale = variant.head_dim**-0.5
    # Bottom right: the first rows of a problem with more queries than keys see nothing.
    offset = shape.seqlen_k - shape.seqlen_q if variant.causal else 0
    out_descale = out_descale_for(variant)
    options = {"scale": scale, "scaling": scaling, "causal_offset": offset, "out_descale": out_descale}

    out, lse, amax = run_kernel(operands, variant, **options)
    again, lse_again, _ = run_kernel(operands, variant, **options)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)) and torch.equal(lse, lse_again)
    plain, _, _ = run_kernel(operands, variant, **options, return_lse=False, return_amax=False)
    assert torch.equal(out.view(torch.uint8), plain.view(torch.uint8)), "a call without LSE and amax"

    emulated = emulate(*operands.fp8, *operands.descales, variant=variant, emulated_mma=is_emulated(variant), **options)
    real, expected = out.float(), emulated.out.float()
    if out_descale is not None:
        real, expected = real * out_descale, expected * out_descale
    reference = attention64(*operands.real, scale, offset if variant.causal else None)
    seen = reference.lse > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen)
    assert bool((real[~seen] == 0).all()), "rows without keys must be 0"
    assert relative_l2(real, expected) <= emulator_limit(variant)
    assert abs(float(amax) / float(emulated.amax) - 1) <= AMAX
    assert relative_l2(real, reference.out) <= dequantised_limit(variant)
    if variant.softmax == "exp2x2":
        assert max(relative_l2(real, expected), relative_l2(real, reference.out)) <= HIGH_L2[variant.out]
        if shape is SHAPES[0]:
            assert bool(((real.double() - reference.out).abs() <= high_error_limit(variant, reference.out)).all())
    assert min_row_cosine(real[seen], reference.out[seen]) >= ROW_COSINE
    tolerance = lse_limit(variant, reference.max_score, emulated=is_emulated(variant))
    assert float((lse.double() - reference.lse)[seen].abs().max()) <= tolerance
    z = z_test(real, reference, variant.softmax, OUT_DTYPES[variant.out])
    refused = z.refusals()
    # It may also be the worst of 33,000.
    of_algorithm = worst_row_is_the_algorithms(z, z_test(expected, reference, variant.softmax, OUT_DTYPES[variant.out]))
    if shape is PERSISTENT or of_algorithm:
        refused = [r for r in refused if not r.startswith("row_rms")]
    assert not refused


def one_of_each(*axes: str) -> list[Variant]:
    """The first variant of every combination of values that is built."""
    return list({tuple(getattr(v, axis) for axis in axes): v for v in reversed(VARIANTS)}.values())


def differing_of_a_thousand(variant: Variant, shape: Shape, *, lse_every: int = 1) -> int:
    """How many runs have another output than the first one, or another LSE: it is asked for in each `lse_every`-th,
    and amax with it."""
    operands, out_descale = random_operands(variant, shape), out_descale_for(variant)
    first, lse, _ = run_kernel(operands, variant, scale=0.1, out_descale=out_descale)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        wants = i % lse_every == 0
        asked = {"return_lse": wants, "return_amax": wants}
        out, again, _ = run_kernel(operands, variant, scale=0.1, out_descale=out_descale, **asked)
        other = (out.view(torch.uint8) != first.view(torch.uint8)).any()
        differ += other | (again != lse).any() if wants else other
    return int(differ)


@pytest.mark.edge(44)
@pytest.mark.parametrize(
    "variant", one_of_each("family", "head_dim", "tile_n", "schedule", "cluster"), ids=lambda v: v.id
)
def test_a_thousand_runs_give_the_same_bits(variant: Variant) -> None:
    """More work items than CTAs and more tiles than stages, so that a race between turns has its chance."""
    assert differing_of_a_thousand(variant, Shape(4, 12, 6, 515, 4 * variant.tile_n * variant.stages + 33)) == 0


UNROLLED = [(v, least, most) for v in VARIANTS for least, most in v.unrolled]


@pytest.mark.parametrize(
    ("variant", "least", "most"), UNROLLED, ids=lambda x: x.id if isinstance(x, Variant) else str(x)
)
class TestUnrolled:
    """Forms for certain KV lengths: at both ends, on either side of them, where the loop runs, and in between."""

    def test_ends(self, variant: Variant, least: int, most: int) -> None:
        for seqlen_k in (least - 1, least, most - 7, most, most + 1):
            check(variant, Shape(2, 6, 3, 300, seqlen_k), variant.scaling)

    @pytest.mark.edge(44)
    def test_a_thousand_runs_of_a_form(self, variant: Variant, least: int, most: int) -> None:
        """The same bits, the LSE asked for in every other run; more items than CTAs."""
        shape = Shape(1, 300, 150, 65, most - 3)
        check(variant, shape, variant.scaling)
        assert differing_of_a_thousand(variant, shape, lse_every=2) == 0

    @pytest.mark.parametrize("scale", (1.0, 100.0))
    def test_a_reference_that_moves(self, variant: Variant, least: int, most: int, scale: float) -> None:
        """Each tile outweighs those before it, by more than 2^16 with the larger scale. Scores have one product each,
        so that both sides have the same."""
        for keys in (least, most - 5, most):
            q, k = (torch.zeros(1, 4, n, variant.head_dim, device="cuda").bfloat16() for n in (200, keys))
            q[..., 0], k[..., 0] = 1, torch.linspace(-4, 4, keys, device="cuda")
            operands = operands_of(variant, q, k, randn(1, 4, keys, variant.head_dim, seed=3, device="cuda"))
            options = {"scale": 8 * scale, "out_descale": out_descale_for(variant)}
            out, lse, _ = run_kernel(operands, variant, **options)
            emulated = emulate(*operands.fp8, *operands.descales, variant=variant, **options)
            assert relative_l2(out.float(), emulated.out.float()) <= emulator_limit(variant)
            assert float((lse - emulated.lse).abs().max()) <= 1e-5 * float(emulated.lse.abs().max()) + 1e-3


SOFTMAXES = one_of_each("family", "head_dim", "tile_n", "schedule", "softmax")


@pytest.mark.parametrize("scale", (0.1, 10.0, 1000.0))
@pytest.mark.parametrize("variant", SOFTMAXES, ids=lambda v: v.id)
def test_the_lse_changes_no_bit_of_the_output(variant: Variant, scale: float) -> None:
    """The sums for the LSE lie behind the branch of logits that leave the range of f16, which are there from the last
    scale on; without LSE and such logits a kernel goes past it."""
    operands = random_operands(variant, Shape(2, 6, 2, 257, 3 * variant.tile_n + 33))
    out_descale = out_descale_for(variant)
    options = {"scale": scale, "out_descale": out_descale}
    out, lse, _ = run_kernel(operands, variant, **options)
    alone, none, _ = run_kernel(operands, variant, return_lse=False, **options)
    assert none is None and bool(lse.isfinite().all()) and bool(out.float().isfinite().all())
    assert torch.equal(out.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("steepness", (0.98, 1.02, 3.0))
@pytest.mark.parametrize("variant", [v for v in SOFTMAXES if v.score == "f16"], ids=lambda v: v.id)
def test_scores_as_large_as_they_can_be(variant: Variant, steepness: float) -> None:
    """All of Q and K at amax 14, and slopes just below the one from which codes may leave the range of f16, just above
    it and far above."""
    q, k = (torch.full((1, 2, n, variant.head_dim), 14.0, device="cuda").bfloat16() for n in (70, 391))
    operands = operands_of(variant, q, k, randn(1, 2, 391, variant.head_dim, seed=3, device="cuda"))
    out_descale = out_descale_for(variant)
    scale = steepness * 65_000 / (14 * 14 * variant.head_dim) / (8 * math.log2(math.e))
    offset = 391 - 70 if variant.causal else 0
    options = {"scale": scale, "causal_offset": offset, "out_descale": out_descale}
    out, _, _ = run_kernel(operands, variant, **options)
    alone, _, _ = run_kernel(operands, variant, return_lse=False, **options)
    assert torch.equal(out.view(torch.uint8), alone.view(torch.uint8))
    real = out.float() if out_descale is None else out.float() * out_descale
    reference = attention64(*operands.real, scale, offset if variant.causal else None)
    assert relative_l2(real, reference.out) <= dequantised_limit(variant)
