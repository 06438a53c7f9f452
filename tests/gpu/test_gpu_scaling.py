"""`quantize`, static and delayed scales on the card against the CPU: every byte, every bit of a descale."""

from __future__ import annotations

import pytest
import torch
from layouts import ORDERS, laid_out
from test_gpu_pack import VALUES, values_of

import fp8cutlass
from fp8cutlass import DelayedScale, StaticScale, quantize
from fp8cutlass.quant.descale import canonical_shape
from fp8cutlass.quant.quantize import FP8_MAX, GRANULARITIES

pytestmark = pytest.mark.gpu

SHAPE = (2, 3, 150, 40)
SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert all(x.is_cuda and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(got, want, strict=True))
    assert torch.equal(got[0].cpu().view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1].cpu().view(torch.int32), want[1].view(torch.int32))


@pytest.mark.edge(51, 52, 54)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FP8_MAX, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_quantize(source: torch.dtype, dtype: torch.dtype, granularity: str) -> None:
    """Tails, zeros, denormals, infinities and NaN, for every granularity that a scaling mode has."""
    for seed, kind in enumerate(VALUES):
        x = values_of(kind, SHAPE, source, seed)
        for amax, block in ((None, 128), (14.0, 64)):
            options = {"granularity": granularity, "dtype": dtype, "amax": amax, "block": block}
            check(quantize(x.cuda(), **options), quantize(x, **options))


@pytest.mark.parametrize("order", ORDERS)
def test_strides(order: str) -> None:
    x = values_of("rows", SHAPE, torch.bfloat16, 1)
    for granularity in GRANULARITIES:
        got = quantize(laid_out(x.cuda(), order), granularity=granularity)
        check(got, quantize(laid_out(x, order), granularity=granularity))


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_magnitude(source: torch.dtype) -> None:
    """Tokens of all powers of two and some between: the division of the limit by a maximum, bit for bit."""
    limits = torch.finfo(source)
    exponents = torch.linspace(torch.tensor(limits.smallest_normal).log2().item(), 0.99, 50_000, dtype=torch.float64)
    x = torch.cat((exponents.exp2(), exponents.exp2() * limits.max / 2)).to(source)[None, None, :, None]
    x = x * torch.tensor([1.0, -0.5, 0.3, 0.0], dtype=source)
    for dtype in FP8_MAX:
        for amax in (None, 1.0, 14.0, 256.0):
            options = {"granularity": "token", "dtype": dtype, "amax": amax}
            check(quantize(x.cuda(), **options), quantize(x, **options))


@pytest.mark.edge(50, 53)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FP8_MAX, ids=str)
def test_given_descales(dtype: torch.dtype, granularity: str) -> None:
    """What lies beyond one saturates on both devices alike; what has no normal inverse is clamped, NaN stays."""
    generator = torch.Generator().manual_seed(1)
    shape = canonical_shape(granularity, SHAPE)
    descale = torch.exp2(torch.empty(shape).uniform_(-20, 4, generator=generator))
    odd = torch.tensor([0.0, -1.0, 1e-40, 1e30, torch.inf, -torch.inf, torch.nan])
    for values in (descale, odd.repeat(-(-descale.numel() // 7))[: descale.numel()].reshape(shape)):
        for seed, kind in enumerate(VALUES):
            x = values_of(kind, SHAPE, torch.bfloat16, seed)
            options = {"granularity": granularity, "dtype": dtype}
            got = quantize(x.cuda(), **options, descale=values.cuda())
            check(got, quantize(x, **options, descale=values))


def test_delayed_scales() -> None:
    """The same descales and histories as on the CPU, call after call."""
    for options in ({}, {"heads": 3, "margin": 0.7, "amax": 14.0}):
        card, host = DelayedScale(4, **options).cuda(), DelayedScale(4, **options)
        for seed, kind in enumerate(VALUES):
            x = values_of(kind, SHAPE, torch.bfloat16, seed)
            check(card.quantize(x.cuda()), host.quantize(x))
            assert torch.equal(card.amax_history.cpu(), host.amax_history)


@pytest.mark.edge(42)
def test_scales_in_a_graph() -> None:
    """Replays move the history as calls do, and attention inside the graph follows: the bits of eager mode."""
    graphed, eager = ([DelayedScale(3, heads=4).cuda(), DelayedScale(2).cuda(), StaticScale(0.02).cuda()] for _ in "ab")

    def step(scales: list[DelayedScale | StaticScale], operands: list[torch.Tensor]) -> torch.Tensor:
        pairs = [scale.quantize(x) for scale, x in zip(scales, operands, strict=True)]
        descales = {f"{name}_descale": descale for name, (_, descale) in zip("qkv", pairs, strict=True)}
        return fp8cutlass.attention(*(x8 for x8, _ in pairs), scaling="head", **descales)

    inputs = [torch.randn(2, 4, 300, 64, device="cuda").bfloat16() for _ in range(3)]
    step([StaticScale(0.02).cuda()] * 3, inputs)  # loads the library and the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(graphed, inputs)
    for call in range(1, 20):
        for x in inputs:
            x.copy_(torch.randn_like(x) * (1 + call % 5))
        graph.replay()
        assert torch.equal(out, step(eager, inputs)), call
    for x, y in zip(graphed[:2], eager[:2], strict=True):
        assert torch.equal(x.amax_history, y.amax_history)
