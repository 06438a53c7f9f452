"""Quantisation and packing: bit-exact where torch gives the bits, bounded where it does not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from reference import randn

from fp8cutlass import quantize
from fp8cutlass.quant.descale import canonical_shape
from fp8cutlass.quant.quantize import FP8_MAX, GRANULARITIES, dequantize
from fp8cutlass.quant.v_layout import pack_v, pad_token_descale, unpack_v

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal to the bit, NaN included; the sign of a NaN does not count."""
    nan = x.float().isnan() & y.float().isnan()
    return bool(((x.view(torch.uint8) == y.view(torch.uint8)) | nan).all())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_unit_descale_is_torchs_cast(dtype: torch.dtype) -> None:
    """With the limit itself in the tensor the descale is 1, so the bytes are those of torch's own cast."""
    x = torch.linspace(-1, 1, 4096).mul(FP8_MAX[dtype]).reshape(1, 2, 32, 64)
    x[0, 0, 1, :40] = 2.0 ** -torch.arange(40.0)  # down through the denormals of both types
    x8, descale = quantize(x, dtype=dtype)
    assert descale.tolist() == [1.0]
    assert same_bytes(x8, x.to(dtype))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_shapes_and_error(granularity: str, dtype: torch.dtype) -> None:
    """Descales have the canonical shapes; no element is off by more than half an FP8 step."""
    x = randn(2, 3, 200, 32, seed=1) * torch.logspace(-3, 3, 200)[:, None]
    x8, descale = quantize(x, granularity=granularity, dtype=dtype)
    assert descale.shape == canonical_shape(granularity, x.shape)
    assert descale.dtype == torch.float32 and descale.is_contiguous()
    back = dequantize(x8, descale, granularity)
    step = dequantize(torch.ones_like(x8.float()), descale, granularity) * SMALLEST[dtype]
    bound = torch.maximum(x.float().abs() * 2.0 ** -(MANTISSA_BITS[dtype] + 1), step / 2) * 1.001
    assert bool(((back - x.float()).abs() <= bound).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_group_maximum_becomes_the_limit(granularity: str) -> None:
    """Every group uses its whole range, and the largest element comes back exactly."""
    x = randn(2, 2, 256, 32, seed=2).float()
    x8, descale = quantize(x, granularity=granularity, amax=14.0)
    assert float(x8.float().abs().max()) == 14.0
    groups = {"tensor": 1, "head": 4, "block": 8, "token": 1024, "channel": 128, "group": 32}
    assert int((x8.float().abs() == 14.0).sum()) >= groups[granularity]
    where = x.abs() == x.abs().max()
    assert torch.allclose(dequantize(x8, descale, granularity)[where], x[where], rtol=2.0**-22, atol=0)


def test_blocks_are_independent() -> None:
    """A block's bytes do not depend on its neighbours, and the last one may be short."""
    x = randn(1, 1, 300, 32, seed=3)
    x8, descale = quantize(x, granularity="block")
    for block in range(3):
        part = x[:, :, 128 * block : 128 * (block + 1)]
        alone, alone_descale = quantize(part, granularity="head")
        assert same_bytes(alone, x8[:, :, 128 * block : 128 * (block + 1)])
        assert torch.equal(alone_descale, descale[:, :, block])


@pytest.mark.edge(51)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_all_zero(granularity: str) -> None:
    """Zeros get descale 1 (kernels-community#680 made NaN of them)."""
    x8, descale = quantize(torch.zeros(1, 2, 130, 32), granularity=granularity)
    assert bool((descale == 1).all()) and bool((x8.float() == 0).all())


@pytest.mark.edge(52)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-41, 2e-38, 1e-36, 3e38])
def test_extreme_magnitudes(magnitude: float) -> None:
    """448 / amax must not overflow (TransformerEngine#786), nor amax / 448 underflow."""
    x = torch.full((1, 1, 4, 32), magnitude)
    x8, descale = quantize(x)
    assert bool(descale.isfinite().all()) and bool((descale >= 2.0**-126).all())
    assert bool(x8.float().isfinite().all())
    back = dequantize(x8, descale, "tensor").double()
    assert bool(((back - x.double()).abs() <= 2.0**-10 * 2.0**-126 + 2.0**-4 * x.double()).all())


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 3e38])
def test_extreme_magnitudes_at_the_smallest_amax(magnitude: float) -> None:
    """Neither the descale nor its inverse overflows or vanishes."""
    x8, descale = quantize(torch.full((1, 1, 4, 32), magnitude), amax=1.0)
    assert 2.0**-126 <= float(descale) <= 3.1e38 and bool(x8.float().isfinite().all())
    back = dequantize(x8, descale, "tensor").double()
    assert bool(((back - magnitude).abs() <= 2.0**-10 * 2.0**-126 + 2.0**-4 * magnitude).all())


@pytest.mark.edge(54)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_non_finite_values_stay_where_they_are(granularity: str, dtype: torch.dtype) -> None:
    """One NaN or infinity changes neither the descale nor any other byte (torchao#4725)."""
    clean = randn(1, 2, 140, 32, seed=4).float()
    clean[0, 0, 3, 5] = clean[0, 1, 7, 9] = 0.0
    x = clean.clone()
    x[0, 0, 3, 5], x[0, 1, 7, 9] = math.nan, -math.inf
    want, want_descale = quantize(clean, granularity=granularity, dtype=dtype)
    x8, descale = quantize(x, granularity=granularity, dtype=dtype)
    assert torch.equal(descale, want_descale)
    back = x8.float()
    assert math.isnan(back[0, 0, 3, 5])
    if dtype == E5M2:
        assert float(back[0, 1, 7, 9]) == -math.inf
    else:  # e4m3 has no infinity
        assert math.isnan(back[0, 1, 7, 9])
    back[0, 0, 3, 5] = back[0, 1, 7, 9] = 0.0
    assert torch.equal(back, want.float())


@settings(max_examples=80, deadline=None)
@given(
    shape=array_shapes(min_dims=4, max_dims=4, min_side=1, max_side=5),
    block=st.integers(1, 6),
    granularity=st.sampled_from(GRANULARITIES),
    dtype=st.sampled_from([E4M3, E5M2]),
    data=st.data(),
)
def test_round_trip_of_anything(
    shape: tuple[int, ...], block: int, granularity: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Whatever float32 holds: finite elements stay within half a step, the others stay what they are."""
    count, block = math.prod(shape), 8 * block if granularity == "group" else block
    values = data.draw(st.lists(st.floats(width=32), min_size=count, max_size=count))
    x = torch.tensor(values, dtype=torch.float32).reshape(shape)
    x8, descale = quantize(x, granularity=granularity, dtype=dtype, block=block)
    back = dequantize(x8, descale, granularity, block).double()
    assert bool((descale > 0).all()) and bool(descale.isfinite().all())
    finite = x.isfinite()
    unit = dequantize(torch.ones_like(x), descale, granularity, block).double()
    bound = torch.maximum(x.double().abs() * 2.0 ** -(MANTISSA_BITS[dtype] + 1), unit * SMALLEST[dtype] / 2) * 1.001
    assert bool(((back - x.double()).abs() <= bound)[finite].all())
    assert not bool(back[~finite].isfinite().any())


@pytest.mark.parametrize("order", ["bhsd", "bshd", "slice", "transposed"])
def test_strides_do_not_change_the_bytes(order: str) -> None:
    """Views quantise as their contiguous copies do."""
    x = randn(2, 4, 9, 32, seed=5)
    views = {
        "bhsd": x,
        "bshd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": torch.cat([x, x], -1)[..., :32],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    x8, descale = quantize(views[order], granularity="token")
    want, want_descale = quantize(x, granularity="token")
    assert same_bytes(x8, want) and torch.equal(descale, want_descale)


@pytest.mark.parametrize("shape", [(0, 2, 3, 32), (2, 0, 3, 32), (2, 2, 0, 32)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty(shape: tuple[int, ...], granularity: str) -> None:
    x8, descale = quantize(torch.zeros(shape), granularity=granularity)
    assert x8.shape == shape and descale.shape == canonical_shape(granularity, shape)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(2, 3)}, "x must be"),
        ({"x": torch.zeros(1, 1, 1, 1, dtype=torch.float64)}, "float64"),
        ({"granularity": "row"}, "granularity"),
        ({"dtype": torch.float8_e4m3fnuz}, "dtype"),
        ({"amax": 449.0}, "amax"),
        ({"amax": 0.0}, "amax"),
        ({"amax": 1e-30}, r"amax must lie in \[1, 448\]"),
        ({"amax": 0.999}, "amax"),
        ({"amax": math.nan}, "amax"),
        ({"block": 0}, "block"),
    ],
)
def test_errors_name_the_argument(change: dict, named: str) -> None:
    arguments = {"x": torch.zeros(1, 1, 1, 1)} | change
    with pytest.raises(ValueError, match=named):
        quantize(arguments.pop("x"), **arguments)


def test_pack_v_against_the_formula() -> None:
    """docs/design/numerics.md, element by element."""
    keys, head_dim = 37, 64
    v = torch.randint(0, 256, (2, 3, keys, head_dim), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    packed = pack_v(v.view(E4M3)).view(torch.uint8)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert packed.shape == (2, 3, head_dim, 128) and packed.is_contiguous()
    want = torch.zeros_like(packed)
    for position in range(128):
        key = position // 16 * 16 + order[position % 16]
        for d in range(head_dim):
            row = d // 32 * 32 + 8 * ((d >> 1) & 3) + 2 * ((d >> 3) & 3) + (d & 1)
            if key < keys:
                want[:, :, row, position] = v[:, :, key, d]
    assert torch.equal(packed, want)


@settings(max_examples=25, deadline=None)
@given(keys=st.integers(0, 300), head_dim=st.sampled_from([32, 64, 96, 128, 256]), dtype=st.sampled_from([E4M3, E5M2]))
def test_unpack_undoes_pack(keys: int, head_dim: int, dtype: torch.dtype) -> None:
    v = torch.randint(0, 256, (1, 2, keys, head_dim), dtype=torch.uint8)
    packed = pack_v(v.view(dtype))
    assert packed.dtype == dtype and packed.shape[3] == -(-keys // 128) * 128
    assert torch.equal(unpack_v(packed, keys).view(torch.uint8), v)


def test_pack_v_takes_any_strides() -> None:
    v = torch.randint(0, 256, (2, 50, 3, 32), dtype=torch.uint8).view(E4M3).transpose(1, 2)
    assert same_bytes(pack_v(v), pack_v(v.contiguous()))


def test_pack_v_refuses_other_head_dims() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        pack_v(torch.zeros(1, 1, 16, 40).to(E4M3))


@pytest.mark.parametrize("keys", [1, 127, 128, 129])
def test_pad_token_descale_appends_ones_to_whole_tiles(keys: int) -> None:
    descale = torch.rand(2, 3, keys) + 2.0
    padded = pad_token_descale(descale)
    assert padded.shape == (2, 3, 128 if keys <= 128 else 256)
    assert torch.equal(padded[..., :keys], descale) and bool((padded[..., keys:] == 1.0).all())
