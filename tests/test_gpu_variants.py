"""Every compiled kernel against its three references: the emulator, float64 on the same operands, and itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gpu import built_variants, on_card, run_operator
from reference import attention64, make_operands, min_row_cosine, randn, relative_l2, z_test

from fp8cutlass.emulator import OUT_DTYPES, emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.target import granularities

pytestmark = pytest.mark.gpu

L2_DEQUANTISED = 3.5e-2  # relative L2 against float64 on the dequantised operands, randn
L2_EMULATOR = 8e-3  # the accumulator of the tensor core is not modelled
E4M3_OUT_L2 = 2.0**-4 / 3**0.5  # rounding of an e4m3 output alone: uniform inside a step of at most 2^-3


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


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"b{s.batch}h{s.heads}kv{s.kv_heads}q{s.seqlen_q}k{s.seqlen_k}")
@pytest.mark.parametrize("variant", built_variants("fwd"), ids=lambda v: v.id)
def test_variant(variant: Variant, shape: Shape) -> None:
    q = randn(shape.batch, shape.heads, shape.seqlen_q, variant.head_dim, seed=1, device="cuda")
    k = randn(shape.batch, shape.kv_heads, shape.seqlen_k, variant.head_dim, seed=2, device="cuda")
    v = randn(shape.batch, shape.kv_heads, shape.seqlen_k, variant.head_dim, seed=3, device="cuda")
    dtype = torch.float8_e4m3fn if variant.dtype == "e4m3" else torch.float8_e5m2
    limits = {} if variant.softmax == "linear" else {"score_amax": 448.0}
    operands = make_operands(q, k, v, granularities(variant.scaling), dtype=dtype, **limits)
    scale = variant.head_dim**-0.5
    # Bottom right: the first rows of a problem with more queries than keys see nothing.
    offset = shape.seqlen_k - shape.seqlen_q if variant.causal else 0
    out_descale = torch.tensor([0.02], device="cuda") if variant.out == "e4m3" else None

    out, lse, amax = run_operator(operands, variant, scale=scale, causal_offset=offset, out_descale=out_descale)
    again, lse_again, _ = run_operator(operands, variant, scale=scale, causal_offset=offset, out_descale=out_descale)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)) and torch.equal(lse, lse_again)

    emulated = emulate(
        *operands.fp8,
        *operands.descales,
        variant=variant,
        scale=scale,
        causal_offset=offset,
        out_descale=out_descale,
        emulated_mma=on_card("sm90a"),
    )
    real, expected = out.float(), emulated.out.float()
    if out_descale is not None:
        real, expected = real * out_descale, expected * out_descale
    reference = attention64(*operands.real, scale, offset if variant.causal else None)
    seen = reference.lse > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen)
    assert bool((real[~seen] == 0).all()), "rows without keys must be 0"
    assert relative_l2(real, expected) <= L2_EMULATOR
    assert abs(float(amax) / float(emulated.amax) - 1) <= 2e-2
    rounding = E4M3_OUT_L2 if variant.out == "e4m3" else 0.0
    assert relative_l2(real, reference.out) <= L2_DEQUANTISED + rounding
    assert min_row_cosine(real[seen], reference.out[seen]) >= 0.99
    # float32 scores: the rounding of the operands' products; f16 scores: half an ulp for each of their roundings
    roundings = 2.0**-12 if variant.score == "f32" else 2.0**-11 * 3 * (variant.head_dim // 32)
    tolerance = 1e-4 + roundings * reference.max_score
    assert float((lse.double() - reference.lse)[seen].abs().max()) <= tolerance
    refused = z_test(real, reference, variant.softmax, OUT_DTYPES[variant.out]).refusals()
    if shape is PERSISTENT:  # the worst of 33,000 rows of few keys: one key's interpolation error is the whole row's
        refused = [r for r in refused if not r.startswith("row_rms")]
    assert not refused
