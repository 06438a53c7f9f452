"""Each stage of the kernel alone: Q K^T, softmax, P V, whole. The diagnostic kernels are the forward kernels with taps.

A wrong result of the whole is then a wrong result of exactly one of these.
"""

from __future__ import annotations

import pytest
import torch
from gpu import built_variants, diagnose, is_emulated
from reference import Operands, operands_of, randn, relative_l2, visible

from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.emulator.softmax import SOFTMAXES
from fp8cutlass.manifest import Variant

pytestmark = pytest.mark.gpu

DIAGNOSTIC = pytest.mark.parametrize("variant", built_variants("diag"), ids=lambda v: v.id)
BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 150, 333
OFFSET = SEQLEN_K - SEQLEN_Q


def random_operands(variant: Variant) -> Operands:
    d = variant.head_dim
    q = randn(BATCH, HEADS, SEQLEN_Q, d, seed=4, device="cuda")
    k = randn(BATCH, KV_HEADS, SEQLEN_K, d, seed=5, device="cuda")
    v = randn(BATCH, KV_HEADS, SEQLEN_K, d, seed=6, device="cuda")
    return operands_of(variant, q, k, v)


def grouped(x: torch.Tensor) -> torch.Tensor:
    """K or V with each KV head repeated for its group of query heads."""
    return x.float().repeat_interleave(HEADS // KV_HEADS, 1)


def seen() -> torch.Tensor:
    return visible(SEQLEN_Q, SEQLEN_K, OFFSET, "cuda")


@DIAGNOSTIC
def test_scores_of_small_integers_are_exact(variant: Variant) -> None:
    """Integers up to 2, 80% zeros: the products fit every accumulator, so layouts must be right to the bit."""
    generator = torch.Generator().manual_seed(7)

    def integers(heads: int, rows: int) -> torch.Tensor:
        x = torch.randint(-2, 3, (BATCH, heads, rows, variant.head_dim), generator=generator).float()
        return (x * (torch.rand(x.shape, generator=generator) < 0.2)).cuda()

    q, k, v = integers(HEADS, SEQLEN_Q), integers(KV_HEADS, SEQLEN_K), integers(KV_HEADS, SEQLEN_K)
    shapes = operands_of(variant, q, k, v)
    ones = tuple(torch.ones_like(d) for d in shapes.descales)
    operands = Operands(tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v)), ones, (q, k, v))
    _, wrote = diagnose(operands, variant, scale=1.0, causal_offset=OFFSET)
    expected = (q @ grouped(k).transpose(-1, -2)).masked_fill(~seen(), -torch.inf)
    assert torch.equal(wrote.scores[..., :SEQLEN_K], expected)
    assert bool((wrote.scores[..., SEQLEN_K:] == -torch.inf).all()), "keys past the end must be masked"


@DIAGNOSTIC
def test_scores(variant: Variant) -> None:
    operands = random_operands(variant)
    _, wrote = diagnose(operands, variant, scale=0.1, causal_offset=OFFSET)
    q, k, _ = operands.fp8
    expected = q.double() @ grouped(k).double().transpose(-1, -2)
    if variant.scaling == "token":
        expected = expected * grouped(operands.descales[1][..., None]).double().transpose(-1, -2)
    got = wrote.scores[..., :SEQLEN_K]
    assert torch.equal(got == -torch.inf, ~seen().expand_as(got))
    # f16 scores are rounded after every k step. Of float32 ones the tensor core's FP8 accumulator keeps 13 fraction
    # bits; where it is emulated, they lose less than a bit of e4m3's products.
    limit = max(2.0**-10, variant.head_dim // 32 * 2.0**-12)
    if variant.score == "f32":
        limit = 2.0**-20 if is_emulated(variant) else 2.0**-10
    largest = expected.abs().amax()
    difference = (got.double() - expected).masked_fill(~seen(), 0.0).abs().amax()
    assert float(difference / largest) <= limit


@DIAGNOSTIC
def test_softmax(variant: Variant) -> None:
    """P and the weights from the kernel's own scores, so that a wrong score cannot hide or cause a wrong softmax."""
    operands = random_operands(variant)
    scale = variant.head_dim**-0.5
    _, wrote = diagnose(operands, variant, scale=scale, causal_offset=OFFSET)
    q_descale, k_descale, _ = operands.descales
    slope = q_descale[..., None] * (scale * 1.4426950408889634)  # block and token mode: (B, H, Sq)
    for tile in range(wrote.weight.shape[3]):
        columns = slice(tile * variant.tile_n, (tile + 1) * variant.tile_n)
        s = wrote.scores[..., columns]
        if variant.scaling == "block":
            of_tile = k_descale[..., tile * variant.tile_n // variant.key_block, None, None]
            tile_slope = slope * of_tile.repeat_interleave(HEADS // KV_HEADS, 1)
        else:
            tile_slope = slope
        by_code = variant.score == "f16"
        tile_slope = (tile_slope * 8).clamp_min(2.0**-24) if by_code else tile_slope.clamp_min(2.0**-126)
        _, p, weight, _ = SOFTMAXES[variant.softmax](s, tile_slope)
        visited = (wrote.weight[..., tile, None] > -1e29).expand_as(s)
        got = wrote.p[..., columns]
        assert not bool(got[~visited].any()), "a row that sees nothing of a tile has P = 0"
        # the exponential's last bits and the order of two roundings may move a value by one code, rarely
        apart = (got[visited].int() - p[visited].int()).abs()
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) <= 2e-3
        live = visited[..., :1]
        gap = (wrote.weight[..., tile, None] - weight)[live].abs()
        assert float(gap.max()) <= 1e-3


@DIAGNOSTIC
def test_values(variant: Variant) -> None:
    """P V of every tile from the kernel's own P; the tensor core's FP8 accumulator keeps 13 fraction bits."""
    operands = random_operands(variant)
    _, wrote = diagnose(operands, variant, scale=0.2, causal_offset=OFFSET)
    v = grouped(operands.fp8[2]).double()
    for tile in range(wrote.weight.shape[3]):
        start = tile * variant.tile_n
        p = wrote.p[..., start : min(start + variant.tile_n, SEQLEN_K)].contiguous().view(torch.float8_e4m3fn).double()
        expected = p @ v[:, :, start : start + variant.tile_n]
        assert relative_l2(wrote.tile_o[:, :, tile], expected) <= (1e-5 if is_emulated(variant) else 2e-3)


@DIAGNOSTIC
def test_whole(variant: Variant) -> None:
    operands = random_operands(variant)
    scale = variant.head_dim**-0.5
    out, _ = diagnose(operands, variant, scale=scale, causal_offset=OFFSET)
    expected = emulate(
        *operands.fp8,
        *operands.descales,
        variant=variant,
        scale=scale,
        causal_offset=OFFSET,
        emulated_mma=is_emulated(variant),
    )
    assert relative_l2(out, expected.out) <= 8e-3
