"""What `scaled_dot_product_attention` takes: other ranks, broadcast batches and heads, other widths of value, numbers
that are no Python float, causal biases, autocast. Each is served as SDPA serves it, by a kernel.

Regressions these catch: a batch dimension taken for heads; a shared head that is another one; a scale that follows the
padded width; columns that belong to the padding; a bias aligned to the other end; a cast that comes too late.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import randn, relative_l2
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fp8cutlass
from fp8cutlass import UnsupportedError, attention, explain, pack_kv, supports
from fp8cutlass.errors import NoKernelError

LIMIT = 0.08  # relative L2 of FP8 operands against bf16 ones


def draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [randn(*shape, seed=10 + seed) for seed, shape in enumerate(shapes)]


def swapped(x: torch.Tensor) -> torch.Tensor:
    """(..., H, S, D) as (..., S, H, D)."""
    return x.transpose(-3, -2) if x.dim() > 2 else x


SHAPES = {
    "2-D": ((30, 64), (40, 64), (40, 64), False),
    "3-D": ((4, 30, 64), (4, 40, 64), (4, 40, 64), False),
    "3-D in groups": ((4, 30, 64), (2, 40, 64), (2, 40, 64), True),
    "5-D": ((2, 3, 4, 30, 64), (2, 3, 4, 40, 64), (2, 3, 4, 40, 64), False),
    "5-D in groups": ((2, 3, 4, 30, 64), (2, 3, 2, 40, 64), (2, 3, 2, 40, 64), True),
    "5-D, batches broadcast": ((2, 3, 4, 30, 64), (2, 1, 4, 40, 64), (1, 3, 4, 40, 64), False),
    "3-D query, 4-D keys": ((4, 30, 64), (2, 4, 40, 64), (2, 4, 40, 64), False),
    "one batch of keys": ((3, 4, 30, 64), (1, 4, 40, 64), (1, 4, 40, 64), False),
    "one batch of queries": ((1, 4, 30, 64), (3, 4, 40, 64), (3, 4, 40, 64), False),
    "one batch of keys, in groups": ((3, 4, 30, 64), (1, 2, 40, 64), (1, 2, 40, 64), True),
    "one KV head": ((2, 4, 30, 64), (2, 1, 40, 64), (2, 1, 40, 64), False),
    "one key head": ((2, 4, 30, 64), (2, 1, 40, 64), (2, 4, 40, 64), False),
    "one query head": ((2, 1, 30, 64), (2, 4, 40, 64), (2, 4, 40, 64), False),
    "2-D query, 4-D keys": ((30, 64), (2, 4, 40, 64), (2, 4, 40, 64), False),
    "narrow value": ((2, 4, 30, 64), (2, 4, 40, 64), (2, 4, 40, 32), False),
    "narrow value, in groups": ((2, 4, 30, 96), (2, 2, 40, 96), (2, 2, 40, 64), True),
    "wide value": ((2, 4, 30, 32), (2, 4, 40, 32), (2, 4, 40, 80), False),
    "3-D, wide value": ((4, 30, 32), (4, 40, 32), (4, 40, 64), False),
    "no keys": ((4, 30, 64), (4, 0, 64), (4, 0, 64), False),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_served_as_sdpa_serves_them(name: str, layout: str, causal: bool) -> None:
    *shapes, gqa = SHAPES[name]
    q, k, v = draw(*shapes)  # type: ignore[arg-type]
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    given = [swapped(x) if layout == "bshd" else x for x in (q, k, v)]
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": gqa, "layout": layout, "return_lse": True}
    assert supports(*given, **options)[0] and "runs: the emulator" in explain(*given, **options)
    got, lse = attention(*given, **options)
    got = swapped(got) if layout == "bshd" else got
    assert got.shape == want.shape and got.dtype == want.dtype and lse.shape == want.shape[:-1]
    if not k.shape[-2]:
        assert not got.any() and lse.isneginf().all()
        return
    assert relative_l2(got, want) < LIMIT
    out = torch.full(swapped(want).shape if layout == "bshd" else want.shape, torch.nan).bfloat16()
    again, _ = attention(*given, **options, out=out)
    assert again is out and torch.equal(swapped(out) if layout == "bshd" else out, got)


def test_the_same_bits_as_the_plain_call() -> None:
    """A view, an expanded operand and columns of zeros change nothing."""
    q, k, v = draw((2, 3, 4, 30, 64), (2, 3, 4, 40, 64), (2, 3, 4, 40, 64))
    flat = attention(*(x.flatten(0, 1) for x in (q, k, v)), is_causal=True)
    assert torch.equal(attention(q, k, v, is_causal=True), flat.unflatten(0, (2, 3)))
    assert torch.equal(attention(q[0, 0], k[0, 0], v[0, 0]), attention(q[0, :1], k[0, :1], v[0, :1])[0])
    shared = attention(q[0], k[0, :1], v[0, :1])
    assert torch.equal(shared, attention(q[0], *(x[0, :1].repeat(3, 1, 1, 1) for x in (k, v))))
    grouped = attention(q[0], k[0, :, :1], v[0, :, :1])
    assert torch.equal(grouped, attention(q[0], *(x[0, :, :1].repeat(1, 4, 1, 1) for x in (k, v))))
    narrow = attention(q[0], k[0], v[0, ..., :40])
    assert torch.equal(narrow, attention(q[0], k[0], F.pad(v[0, ..., :40], (0, 24)))[..., :40])
    assert narrow.is_contiguous()
    wide = attention(q[0, ..., :40], k[0, ..., :40], v[0])
    padded = [F.pad(x[0, ..., :40], (0, 24)) for x in (q, k)]
    assert torch.equal(wide, attention(*padded, v[0], scale=40**-0.5))


def test_all_results_and_transforms_of_a_narrow_value() -> None:
    q, k, v = draw((4, 30, 64), (4, 40, 64), (4, 40, 24))
    options: dict[str, Any] = {"return_lse": True, "return_amax": True, "scaling": "token", "smooth_k": True}
    out, lse, amax = attention(q, k, v, **options, hadamard=True)
    assert out.shape == (4, 30, 24) and lse.shape == (4, 30) and amax.shape == (1,)
    assert float(amax) == pytest.approx(float(out.abs().max()), rel=0.01)
    low = attention(q, k, v, out_dtype=torch.float8_e4m3fn, out_descale=0.01)
    assert relative_l2(low.float() * 0.01, out.float()) < 0.1 and low.shape == out.shape


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((2, 4, 16, 64), (3, 4, 16, 64), (3, 4, 16, 64)), {}, "batch size: 2 and 3"),
        (((2, 4, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64)), {}, "enable_gqa=True"),
        (((16, 64), (16, 32), (16, 64)), {}, "4 dimensions|head_dim"),
        (((64,), (16, 64), (16, 64)), {}, "query must have 4 dimensions"),
        (((4, 16, 64), (4, 16, 64), (4, 16, 300)), {}, "head_dim must lie in 1..256, got 300"),
        (((4, 16, 64), (4, 16, 64), (4, 15, 64)), {}, "tokens: 16 and 15"),
        (((4, 16, 64), (4, 16, 64), (4, 16, 32)), {"out": torch.zeros(4, 16, 64).bfloat16()}, "out has shape"),
        (((4, 16, 64), (4, 16, 64), (4, 16, 64)), {"out": torch.zeros(4, 16, 64)}, "out has dtype"),
    ],
)
def test_what_nobody_serves_is_refused(shapes: Any, options: dict[str, Any], words: str) -> None:
    given = draw(*shapes)
    with pytest.raises(UnsupportedError, match=words):
        attention(*given, **options)
    assert not supports(*given, **options)[0]


def test_fp8_operands_keep_their_shapes() -> None:
    """Their descales belong to batches, heads and channels of a tensor of four dimensions."""
    x8, d = fp8cutlass.quantize(randn(1, 4, 16, 64, seed=1), granularity="head")
    descales = {"q_descale": d, "k_descale": d, "v_descale": d, "scaling": "head"}
    with pytest.raises(UnsupportedError, match="value must have 4 dimensions"):
        attention(x8, x8, x8[0], **descales)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="query and value differ in head_dim"):
        attention(x8, x8, x8[..., :32], **descales)  # type: ignore[arg-type]


def test_packing_takes_plain_shapes() -> None:
    """A PackedKV of a narrow value would give columns that nobody asked for."""
    k, v = draw((2, 2, 40, 64), (2, 2, 40, 32))
    with pytest.raises(UnsupportedError, match="differ in head_dim"):
        pack_kv(k, v)
    with pytest.raises(UnsupportedError, match="batch size"):
        pack_kv(k, k, query_shape=(4, 2, 40, 64))


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64"])
def test_a_scale_of_numpy(kind: str) -> None:
    q, k, v = draw((1, 2, 8, 64), (1, 2, 9, 64), (1, 2, 9, 64))
    value = getattr(pytest.importorskip("numpy"), kind)(2)
    assert torch.equal(attention(q, k, v, scale=value), attention(q, k, v, scale=2.0))
    assert supports(q, k, v, scale=value)[0]


@pytest.mark.parametrize("value", [torch.tensor(0.25), torch.tensor(2), torch.tensor(0.5, dtype=torch.float64)])
def test_a_scale_without_dimensions(value: torch.Tensor) -> None:
    q, k, v = draw((1, 2, 8, 64), (1, 2, 9, 64), (1, 2, 9, 64))
    assert torch.equal(attention(q, k, v, scale=value), attention(q, k, v, scale=float(value)))  # type: ignore[arg-type]
    value.mul_(2)  # the same object again, with another value
    assert torch.equal(attention(q, k, v, scale=value), attention(q, k, v, scale=float(value)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [torch.tensor([0.1]), torch.tensor(0.1, requires_grad=True), torch.tensor(True), "0.1", True]
)
def test_what_is_no_scale(value: Any) -> None:
    q, k, v = draw((1, 2, 8, 64), (1, 2, 9, 64), (1, 2, 9, 64))
    with pytest.raises(UnsupportedError, match="scale must be a float or None, got"):
        attention(q, k, v, scale=value, fallback="sdpa")


# ---- causal biases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize(("rows", "keys"), [(16, 40), (30, 30), (40, 16)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_causal_bias_is_a_causal_call(bias: Any, rows: int, keys: int, layout: str) -> None:
    q, k, v = draw((2, 4, rows, 64), (2, 4, keys, 64), (2, 4, keys, 64))
    given = [swapped(x) if layout == "bshd" else x for x in (q, k, v)]
    got = attention(*given, attn_mask=bias(rows, keys), layout=layout)
    alignment = "bottom_right" if bias is causal_lower_right else "top_left"
    assert torch.equal(got, attention(*given, is_causal=True, causal_alignment=alignment, layout=layout))
    if bias is causal_upper_left or rows <= keys:
        want = F.scaled_dot_product_attention(q, k, v, bias(rows, keys))
        assert relative_l2(swapped(got) if layout == "bshd" else got, want) < LIMIT
    assert supports(*given, attn_mask=bias(rows, keys), layout=layout)[0]


def test_a_causal_bias_with_packed_keys_and_without_a_kernel() -> None:
    q, k, v = draw((2, 4, 16, 64), (2, 4, 40, 64), (2, 4, 40, 64))
    bias = causal_lower_right(16, 40)
    packed = pack_kv(k, v)
    want = attention(q, packed, is_causal=True, causal_alignment="bottom_right")
    assert torch.equal(attention(q, packed, attn_mask=bias), want)
    wide = draw((2, 4, 16, 320), (2, 4, 40, 320), (2, 4, 40, 320))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = attention(*wide, attn_mask=bias, fallback="sdpa")
    assert relative_l2(got, F.scaled_dot_product_attention(*wide, bias)) < 0.01


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": causal_lower_right(16, 41)}, "for 16 rows and 41 keys, query and key have 16 and 40"),
        ({"attn_mask": causal_lower_right(16, 40), "is_causal": True}, "excludes is_causal=True"),
        ({"attn_mask": causal_upper_left(16, 40), "causal_alignment": "bottom_right"}, "excludes causal_alignment"),
        ({"attn_mask": causal_upper_left(16, 40), "window_size": (3, 0)}, "excludes window_size"),
    ],
)
def test_a_causal_bias_that_does_not_fit(options: dict[str, Any], words: str) -> None:
    q, k, v = draw((2, 4, 16, 64), (2, 4, 40, 64), (2, 4, 40, 64))
    for choice in ({}, {"fallback": "sdpa"}):
        with pytest.raises(UnsupportedError, match=words):
            attention(q, k, v, **options, **choice)


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floats", ["qkv", "q", "qk", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_is_not_16_bit(floats: str, dtype: torch.dtype) -> None:
    """Rotary embeddings leave a float32 query, also where the others were cast."""
    halves = [x.to(dtype) for x in draw((2, 4, 16, 64), (2, 4, 40, 64), (2, 4, 40, 64))]
    given = [x.float() if name in floats else x for name, x in zip("qkv", halves, strict=True)]
    want = attention(*halves)
    with torch.autocast("cpu", dtype):
        assert F.scaled_dot_product_attention(*given).dtype == dtype
        got = attention(*given)
        assert got.dtype == dtype and torch.equal(got, want)
        assert supports(*given)[0]
        one_dtype = [x.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16) for x in halves]
        assert attention(*one_dtype).dtype == one_dtype[0].dtype
        packed = pack_kv(given[1], given[2])
        assert packed.dtype == dtype
        assert torch.equal(attention(given[0], packed), want)
    with pytest.raises(UnsupportedError, match="float32|one dtype"):
        attention(*given)


def test_autocast_leaves_the_emulator_alone() -> None:
    """Its matrix products are of torch, which autocast would round."""
    q, k, v = draw((2, 4, 16, 64), (2, 4, 40, 64), (2, 4, 40, 64))
    want = attention(q, k, v, hadamard=True, smooth_k=True, return_lse=True)
    with torch.autocast("cpu"):
        got = attention(q, k, v, hadamard=True, smooth_k=True, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_autocast_of_a_ragged_batch() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in draw((1, 2, 16, 64), (1, 2, 16, 64), (1, 2, 16, 64)))
    ends = torch.tensor([0, 6, 16], dtype=torch.int32)
    want = fp8cutlass.attention_varlen(q, k, v, ends, ends, 16, 16)
    with torch.autocast("cpu"):
        assert torch.equal(fp8cutlass.attention_varlen(q.float(), k, v, ends, ends, 16, 16), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_torchs(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in draw((4, 16, 64), (4, 40, 64), (4, 40, 32)))
    with pytest.raises(NoKernelError, match="query has dtype torch.float(32|64); accepted are torch.bfloat16"):
        attention(q, k, v)
    with pytest.warns(UserWarning, match="falls back to torch's attention: query has dtype"):
        got = attention(q, k, v, fallback="sdpa")
    assert got.dtype == dtype and torch.equal(got, F.scaled_dot_product_attention(q, k, v))
    for name in ("q_descale", "key"):  # what is wrong is not fallen back from
        wrong: dict[str, Any] = {"q_descale": 1.0} if name == "q_descale" else {"key": k.half()}
        with pytest.raises(UnsupportedError, match=name if name == "q_descale" else "one dtype"):
            attention(**{"query": q, "key": k, "value": v} | wrong, fallback="sdpa")


def test_groups_of_other_sizes_are_torchs() -> None:
    q, k, v = draw((2, 4, 16, 64), (2, 2, 40, 64), (2, 4, 40, 64))
    with pytest.raises(NoKernelError, match="key and value differ in heads: 2 and 4"):
        attention(q, k, v, enable_gqa=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = attention(q, k, v, enable_gqa=True, fallback="sdpa")
        assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_what_torch_refuses_too_is_our_error() -> None:
    q = randn(1, 2, 8, 64, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedError, match="dropout_p is not supported.*torch's attention does not serve it"):
            attention(q, q, q, dropout_p=2.0, fallback="sdpa")


@pytest.mark.parametrize("name", ["5-D, batches broadcast", "one KV head", "narrow value", "3-D, wide value"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_keeps_one_graph(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    *shapes, gqa = SHAPES[name]
    given = draw(*shapes)  # type: ignore[arg-type]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(*given, enable_gqa=gqa), attention(*given, enable_gqa=gqa))


def test_compile_under_autocast() -> None:
    torch._dynamo.reset()
    q, k, v = draw((2, 4, 16, 64), (2, 4, 40, 64), (2, 4, 40, 64))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu"):
        assert torch.equal(compiled(q.float(), k, v), attention(q, k, v))
