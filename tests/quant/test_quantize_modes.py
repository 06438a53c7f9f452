"""`quantize` for every scaling mode, and by a descale that the caller brings.

Regressions these catch: a granularity that attention does not understand, operands that differ from what attention
makes inside, a given descale that is replaced, a value beyond the range that wraps instead of saturating.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference import randn
from test_quantize import E4M3, E5M2, same_bytes

from fp8cutlass import attention, quantize
from fp8cutlass.manifest import Manifest
from fp8cutlass.quant.descale import canonical_shape
from fp8cutlass.quant.quantize import FP8_MAX, GRANULARITIES, V_AMAX, dequantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_every_mode_is_what_attention_makes_inside(scaling: str, dtype: torch.dtype, manifest: Manifest) -> None:
    """By the public function alone: the bits of a call on the unquantised operands, with tails and grouped heads."""
    q, k, v = randn(2, 4, 70, 64, seed=1), randn(2, 2, 300, 64, seed=2), randn(2, 2, 300, 64, seed=3)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    shared_by = manifest.scaling[scaling]
    pairs = {n: quantize(x, granularity=shared_by[n]) for n, x in (("q", q), ("k", k))}
    pairs["v"] = quantize(v, granularity=shared_by["v"], amax=V_AMAX)
    descales = {f"{n}_descale": descale for n, (_, descale) in pairs.items()}
    operands = [x8 for x8, _ in pairs.values()]
    kept = {"precision": "accurate"}  # others may lower Q and K
    got = attention(*operands, scaling=scaling, enable_gqa=True, out_dtype=dtype, **kept, **descales)
    assert torch.equal(got, attention(q, k, v, scaling=scaling, enable_gqa=True, **kept))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_given_descale_is_the_one_that_is_used(granularity: str, dtype: torch.dtype) -> None:
    """Powers of two, whose products are exact: torch's cast of x / descale, for each group its own."""
    x = randn(2, 3, 150, 32, seed=1)
    generator = torch.Generator().manual_seed(2)
    given = 2.0 ** torch.randint(-6, 3, canonical_shape(granularity, x.shape), generator=generator)
    x8, descale = quantize(x, granularity=granularity, dtype=dtype, descale=given)
    assert torch.equal(descale, given)
    unit = dequantize(torch.ones_like(x), given, granularity)
    assert same_bytes(x8, (x.float() / unit).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_a_coarser_descale_is_spread(shape: tuple[int, ...]) -> None:
    x = randn(2, 3, 150, 32, seed=1)
    x8, descale = quantize(x, granularity="block", descale=torch.full(shape, 0.25), block=64)
    want, want_descale = quantize(x, granularity="block", descale=0.25, block=64)
    assert same_bytes(x8, want) and torch.equal(descale, want_descale)
    assert descale.shape == (2, 3, 3) and bool((descale == 0.25).all())


@pytest.mark.edge(53)
@pytest.mark.parametrize(("dtype", "amax"), [(E4M3, None), (E4M3, 14.0), (E5M2, None), (E5M2, 100.0)])
def test_values_beyond_a_given_descale_saturate(dtype: torch.dtype, amax: float | None) -> None:
    """pytorch#178817; at 14 where scores must fit f16. Infinities are no large numbers."""
    x = torch.tensor([3e38, -3e38, 1.0, -0.5, 0.0, math.inf, -math.inf, math.nan]).repeat(4).reshape(1, 1, 1, 32)
    x8, _ = quantize(x, dtype=dtype, amax=amax, descale=0.01)
    limit = float(torch.tensor(FP8_MAX[dtype] if amax is None else amax).to(dtype))
    back = x8.float().flatten()[:8]
    top = min(100.0, limit)
    want = torch.tensor([limit, -limit, top, -min(50.0, limit), 0.0]).to(dtype).float()
    assert torch.equal(back[:5], want)
    if dtype == E5M2:
        assert back[5:7].tolist() == [math.inf, -math.inf]
    else:
        assert bool(back[5:7].isnan().all())
    assert math.isnan(back[7])


@pytest.mark.edge(50)
@pytest.mark.parametrize(
    ("value", "counts_as"),
    [(0.0, 2.0**-126), (-1.0, 2.0**-126), (1e-40, 2.0**-126), (1e30, 1e30), (math.inf, 2.0**126), (math.nan, math.nan)],
)
def test_odd_descales_in_tensors_stay_in_their_head(value: float, counts_as: float) -> None:
    x = randn(1, 2, 40, 32, seed=1)
    x[0, 0, 3, 5] = 0.0
    want, _ = quantize(x, granularity="head", descale=0.5)
    x8, descale = quantize(x, granularity="head", descale=torch.tensor([[value, 0.5]]))
    assert same_bytes(x8[:, 1], want[:, 1])
    if math.isnan(value):
        assert bool(x8[:, 0].float().isnan().all()) and math.isnan(descale[0, 0])
    else:
        assert float(descale[0, 0]) == pytest.approx(counts_as) and bool(x8.float().isfinite().all())
        assert float(x8[0, 0, 3, 5]) == 0.0


@pytest.mark.parametrize(
    ("descale", "words"),
    [
        pytest.param(0.0, [r"2\^-126"], marks=pytest.mark.edge(50)),
        pytest.param(-1.0, [r"2\^-126"], marks=pytest.mark.edge(50)),
        pytest.param(math.nan, [r"2\^-126"], marks=pytest.mark.edge(50)),
        pytest.param(math.inf, [r"2\^126"], marks=pytest.mark.edge(50)),
        pytest.param(1e-40, [r"2\^-126"], marks=pytest.mark.edge(50)),
        (True, ["float", "bool"]),
        ("1", ["float", "str"]),
        pytest.param(
            torch.ones(3, 2), [r"\(3, 2\)", r"one descale per head means \(2, 3\)"], marks=pytest.mark.edge(55)
        ),
        (torch.ones(2, 3).double(), ["float64"]),
        (torch.ones(2, 3, device="meta"), ["descale is on meta, x is on cpu"]),
    ],
)
def test_wrong_descales_are_refused(descale: object, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(words)):
        quantize(randn(2, 3, 10, 32, seed=1), granularity="head", descale=descale)  # type: ignore[arg-type]


def test_compiled_bits_are_those_of_eager_mode() -> None:
    """On the CPU: the division by a tensor stays a reciprocal and a product."""
    torch._dynamo.reset()
    x = randn(2, 3, 150, 32, seed=1) * torch.logspace(-3, 3, 150)[:, None]
    for options in ({}, {"descale": torch.rand(2, 3) + 0.1}):
        step = lambda x, options=options: quantize(x, granularity="head", **options)  # noqa: E731
        got, descale = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
        want, want_descale = step(x)
        assert same_bytes(got, want) and torch.equal(descale, want_descale)
