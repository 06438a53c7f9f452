"""Every argument of `attention` changes the result or raises, and an error names the argument, what was given and what
is accepted."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import randn

import fp8cutlass
from fp8cutlass import UnsupportedError, attention, attention_varlen, explain, pack_kv, quantize, supports
from fp8cutlass.call.request import POSITIONAL

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DESCALES: dict[str, Any] = {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}


def bf16(*shape: int) -> torch.Tensor:
    return randn(*(shape or (1, 4, 16, 64)), seed=sum(shape))


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return bf16(*shape).to(dtype)


def call(**changes: Any) -> dict[str, Any]:
    """A call that works, with changes."""
    return {"query": bf16(), "key": bf16(), "value": bf16()} | changes


def fp8_call(**changes: Any) -> dict[str, Any]:
    return {"query": fp8(), "key": fp8(), "value": fp8()} | DESCALES | changes


HEAD_DIM, GROUPED, MISMATCH = pytest.mark.edge(23), pytest.mark.edge(24), pytest.mark.edge(25)
DTYPE, OUT, DEVICE = pytest.mark.edge(26), pytest.mark.edge(33), pytest.mark.edge(37)
DESCALE_VALUE, DESCALE_SHAPE, FEATURE = pytest.mark.edge(50), pytest.mark.edge(55), pytest.mark.edge(56)

SHARED = bf16()
REFUSED = [
    # options
    (call(layout="sbhd"), ["layout", "bhsd, bshd", "'sbhd'"]),
    (call(precision="best"), ["precision", "fast, balanced, accurate", "'best'"]),
    (call(scaling="row"), ["scaling", "tensor", "head", "block", "token", "'row'"]),
    (call(scaling=["block"]), ["scaling", "['block']"]),
    (call(causal_alignment="middle"), ["causal_alignment", "top_left, bottom_right", "'middle'"]),
    (call(causal_alignment="bottom_right"), ["causal_alignment='bottom_right'", "is_causal=True", "is_causal=False"]),
    (call(fallback="maths"), ["fallback", "error, sdpa", "'maths'"]),
    (call(is_causal=1), ["is_causal", "True or False", "1"]),
    (call(enable_gqa=None), ["enable_gqa", "None"]),
    (call(return_lse="yes"), ["return_lse", "'yes'"]),
    (call(return_amax=2), ["return_amax", "2"]),
    (call(smooth_k=1), ["smooth_k", "True or False", "1"]),
    (call(hadamard="on"), ["hadamard", "'on'"]),
    (call(kernel=3), ["kernel", "3"]),
    (call(kernel=""), ["kernel", "''"]),
    # scale
    (call(scale=math.nan), ["scale", "finite", "nan"]),
    (call(scale=-math.inf), ["scale", "finite", "inf"]),
    (call(scale=1e39), ["scale", "float32", "1e+39"]),
    (call(scale=torch.tensor([0.1])), ["scale", "float", "Tensor"]),
    (call(scale=True), ["scale", "bool"]),
    # shapes
    (fp8_call(query=fp8(4, 16, 64)), ["query", "4 dimensions", "(4, 16, 64)"]),
    (fp8_call(value=fp8(1, 1, 4, 16, 64)), ["value", "4 dimensions"]),
    (call(value=bf16(64)), ["value", "4 dimensions"]),
    (call(key=[1.0]), ["key", "torch.Tensor", "list"]),
    pytest.param(
        call(query=bf16(3, 4, 16, 64), key=bf16(2, 4, 16, 64)),
        ["query and key", "batch size", "3 and 2", "key (2, 4, 16, 64)"],
        marks=MISMATCH,
    ),
    pytest.param(call(key=bf16(1, 4, 16, 32)), ["query and key", "head_dim", "64 and 32"], marks=MISMATCH),
    pytest.param(fp8_call(value=fp8(1, 4, 16, 32)), ["query and value", "head_dim", "64 and 32"], marks=MISMATCH),
    pytest.param(call(value=bf16(1, 4, 17, 64)), ["key and value", "tokens", "16 and 17"], marks=MISMATCH),
    pytest.param(call(value=bf16(1, 2, 16, 64)), ["key and value", "heads", "4 and 2"], marks=MISMATCH),
    (call(key=bf16(1, 2, 16, 64), value=bf16(1, 2, 16, 64)), ["enable_gqa=True", "4 heads", "2"]),
    pytest.param(
        call(key=bf16(1, 3, 16, 64), value=bf16(1, 3, 16, 64), enable_gqa=True), ["multiple", "4 and 3"], marks=GROUPED
    ),
    pytest.param(
        call(key=bf16(1, 0, 16, 64), value=bf16(1, 0, 16, 64), enable_gqa=True), ["multiple", "4 and 0"], marks=GROUPED
    ),
    pytest.param(
        call(**{n: bf16(1, 4, 16, 257) for n in ("query", "key", "value")}),
        ["head_dim", "1..256", "257", "32, 64, 96"],
        marks=HEAD_DIM,
    ),
    pytest.param(
        call(**{n: bf16(1, 4, 16, 0) for n in ("query", "key", "value")}),
        ["head_dim", "1..256", "got 0"],
        marks=HEAD_DIM,
    ),
    pytest.param(
        call(**{n: bf16(1, 16, 4, 512) for n in ("query", "key", "value")}, layout="bshd"),
        ["head_dim", "512"],
        marks=HEAD_DIM,
    ),
    # dtypes
    pytest.param(
        call(**{n: bf16().float() for n in ("query", "key", "value")}),
        ["query", "torch.float32", "torch.bfloat16", "torch.float8_e5m2"],
        marks=DTYPE,
    ),
    pytest.param(call(query=bf16().float()), ["one dtype", "query torch.float32", "key torch.bfloat16"], marks=DTYPE),
    pytest.param(call(query=bf16().int()), ["query", "torch.int32", "torch.bfloat16"], marks=DTYPE),
    pytest.param(call(value=bf16().half()), ["one dtype", "value torch.float16"], marks=DTYPE),
    pytest.param(
        fp8_call(key=fp8(dtype=E5M2)), ["one dtype", "query torch.float8_e4m3fn", "key torch.float8_e5m2"], marks=DTYPE
    ),
    pytest.param(fp8_call(query=fp8().view(torch.uint8)), ["query", "torch.uint8"], marks=DTYPE),
    pytest.param(fp8_call(key=bf16().to(torch.float8_e4m3fnuz)), ["key", "float8_e4m3fnuz"], marks=DTYPE),
    pytest.param(fp8_call(key=bf16().to(torch.float8_e5m2fnuz)), ["key", "float8_e5m2fnuz"], marks=DTYPE),
    (call(out_dtype=torch.float32), ["out_dtype", "torch.float32", "torch.float16"]),
    (call(out_dtype=E5M2), ["out_dtype", "torch.float8_e5m2"]),
    (call(out_dtype=[torch.bfloat16]), ["out_dtype", "[torch.bfloat16]"]),
    # devices
    pytest.param(call(key=bf16().to("meta")), ["key", "meta", "cpu"], marks=DEVICE),
    (call(**{n: bf16().to("meta") for n in ("query", "key", "value")}), ["meta", "cpu and cuda"]),
    # descales
    (fp8_call(q_descale=None), ["q_descale is missing", "(1, 4, 16)"]),
    (fp8_call(k_descale=None, v_descale=None), ["k_descale is missing", "v_descale is missing", "(1, 4, 1)"]),
    (call(q_descale=1.0), ["q_descale", "FP8", "torch.bfloat16"]),
    (fp8_call(smooth_k=True), ["smooth_k", "bf16 and fp16", "torch.float8_e4m3fn", "quantised already"]),
    (fp8_call(hadamard=True, smooth_k=True), ["smooth_k", "hadamard", "quantised already"]),
    pytest.param(fp8_call(q_descale=0.0), ["q_descale", ">= 2^-126", "0.0"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(k_descale=-1.0), ["k_descale", ">= 2^-126", "-1.0"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(q_descale=1e-46), ["q_descale", ">= 2^-126", "1e-46"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(k_descale=1e-40), ["k_descale", ">= 2^-126", "1e-40"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(v_descale=1e39), ["v_descale", "finite", "1e+39"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(v_descale=math.inf), ["v_descale", "finite", "inf"], marks=DESCALE_VALUE),
    pytest.param(fp8_call(v_descale=math.nan), ["v_descale", "finite", "nan"], marks=DESCALE_VALUE),
    (fp8_call(v_descale="1"), ["v_descale", "float", "str"]),
    pytest.param(fp8_call(k_descale=torch.ones(3)), ["k_descale", "(3,)", "(1, 4, 1)", "(4,)"], marks=DESCALE_SHAPE),
    pytest.param(fp8_call(k_descale=torch.ones(1, 4, 2)), ["k_descale", "(1, 4, 2)", "(1, 4, 1)"], marks=DESCALE_SHAPE),
    pytest.param(fp8_call(q_descale=torch.ones(1, 4, 16, 1)), ["q_descale", "(1, 4, 16, 1)"], marks=DESCALE_SHAPE),
    pytest.param(
        fp8_call(scaling="tensor", q_descale=torch.ones(4)),
        ["q_descale", "one descale per tensor", "(1,)"],
        marks=DESCALE_SHAPE,
    ),
    pytest.param(
        fp8_call(scaling="head", v_descale=torch.ones(1, 4, 64)),
        ["v_descale", "one descale per head", "(1, 4)"],
        marks=DESCALE_SHAPE,
    ),
    pytest.param(
        fp8_call(scaling="token", v_descale=torch.ones(1, 4, 16)),
        ["v_descale", "one descale per channel", "(1, 4, 64)"],
        marks=DESCALE_SHAPE,
    ),
    (fp8_call(q_descale=torch.ones(1, dtype=torch.float64)), ["q_descale", "float32", "float64"]),
    pytest.param(fp8_call(q_descale=torch.ones(1, device="meta")), ["q_descale", "meta", "cpu"], marks=DEVICE),
    (call(out_dtype=E4M3), ["out_descale"]),
    (call(out_descale=1.0), ["out_descale", "float8_e4m3fn", "None"]),
    pytest.param(call(out_dtype=E4M3, out_descale=0.0), ["out_descale", "[2^-126, 2^126]", "0.0"], marks=DESCALE_VALUE),
    pytest.param(
        call(out_dtype=E4M3, out_descale=1e-40), ["out_descale", "[2^-126, 2^126]", "1e-40"], marks=DESCALE_VALUE
    ),
    pytest.param(
        call(out_dtype=E4M3, out_descale=3e38), ["out_descale", "[2^-126, 2^126]", "3e+38"], marks=DESCALE_VALUE
    ),
    pytest.param(call(out_dtype=E4M3, out_descale=math.nan), ["out_descale", "nan"], marks=DESCALE_VALUE),
    pytest.param(call(out_dtype=E4M3, out_descale=torch.ones(2)), ["out_descale", "(2,)", "(1,)"], marks=DESCALE_SHAPE),
    # features
    pytest.param(call(attn_mask=torch.ones(16, 16, requires_grad=True)), ["attn_mask", "requires_grad"], marks=FEATURE),
    pytest.param(call(dropout_p=0.1), ["dropout_p", "0.1"], marks=FEATURE),
    pytest.param(call(dropout_p=torch.zeros(2)), ["dropout_p", "tensor"], marks=FEATURE),
    pytest.param(call(query=bf16().requires_grad_()), ["query", "requires_grad"], marks=FEATURE),
    pytest.param(call(value=bf16().requires_grad_()), ["value", "requires_grad"], marks=FEATURE),
    pytest.param(fp8_call(k_descale=torch.ones(1, requires_grad=True)), ["k_descale", "requires_grad"], marks=FEATURE),
    # out=
    pytest.param(call(out=[1]), ["out", "list"], marks=OUT),
    pytest.param(call(out=bf16(1, 4, 17, 64)), ["out", "(1, 4, 17, 64)", "(1, 4, 16, 64)"], marks=OUT),
    pytest.param(call(out=bf16().half()), ["out", "torch.float16", "torch.bfloat16"], marks=OUT),
    pytest.param(call(out=bf16().to("meta")), ["out", "meta", "cpu"], marks=OUT),
    pytest.param(call(out=bf16().requires_grad_()), ["out", "requires_grad"], marks=OUT),
    pytest.param(
        call(out=bf16().requires_grad_(), dropout_p=0.5, fallback="sdpa"), ["out", "requires_grad"], marks=OUT
    ),
    pytest.param(
        call(out=torch.empty(1, 1, 16, 64, dtype=torch.bfloat16).expand(1, 4, 16, 64)), ["out", "expanded"], marks=OUT
    ),
    pytest.param(
        call(out=torch.empty(4096, dtype=torch.bfloat16).as_strided((1, 4, 16, 64), (4096, 512, 32, 1))),
        ["out overlaps itself", "(4096, 512, 32, 1)"],
        marks=OUT,
    ),
    pytest.param(call(query=SHARED, out=SHARED), ["out shares its memory with query"], marks=OUT),
    pytest.param(call(value=SHARED, out=SHARED.view_as(SHARED)), ["out shares its memory with value"], marks=OUT),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda x: "; ".join(x) if isinstance(x, list) else "")
def test_refused(arguments: dict[str, Any], words: list[str]) -> None:
    """`attention` raises, `supports` and `explain` give the same reasons without raising."""
    with pytest.raises(UnsupportedError) as caught:
        attention(**arguments)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert caught.value.reasons and message == "; ".join(caught.value.reasons)
    assert supports(**arguments) == (False, message)
    assert all(reason in explain(**arguments) for reason in caught.value.reasons)


@pytest.mark.edge(56)
@pytest.mark.parametrize("unknown", ["cap", "window", "smooth", "rotate", "mask"])
@pytest.mark.parametrize("function", [attention, supports, explain])
def test_unknown_keyword(function: Any, unknown: str) -> None:
    with pytest.raises(TypeError, match=unknown):
        function(bf16(), bf16(), bf16(), **{unknown: None})


def test_all_reasons_at_once() -> None:
    """One call, one error, everything that is wrong at that stage."""
    with pytest.raises(UnsupportedError) as caught:
        bias = torch.ones(16, 16, requires_grad=True)
        attention(**call(attn_mask=bias, dropout_p=0.5, query=bf16().requires_grad_()))
    assert len(caught.value.reasons) == 3


def test_signature_is_sdpas() -> None:
    """The positional part drops in for SDPA, and the other functions take the same."""
    ours = inspect.signature(attention).parameters
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == POSITIONAL
    assert positional == "query key value attn_mask dropout_p is_causal scale enable_gqa".split()


@pytest.mark.edge(56)
def test_no_grad_lifts_the_refusal() -> None:
    q = bf16().requires_grad_()
    with torch.no_grad():
        assert attention(q, q, q).shape == q.shape
        out = bf16().requires_grad_()
        assert attention(**call(out=out)) is out


@pytest.mark.edge(50)
@pytest.mark.parametrize("value", [2.0**-126, 2.0**126])
def test_descales_at_their_limits(value: float) -> None:
    """Neither the descale nor its inverse vanishes: V of that size comes back, and output of that size fits."""
    got = attention(**fp8_call(v_descale=value, out_dtype=E4M3, out_descale=value, scaling="head"))
    want = attention(**fp8_call(out_dtype=E4M3, out_descale=1.0, scaling="head"))
    assert bool(want.float().any()) and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64"])
def test_numbers_of_numpy_are_descales(kind: str) -> None:
    """`x.abs().max() / 448` of a numpy array is a float32."""
    number = getattr(pytest.importorskip("numpy"), kind)
    got = attention(**fp8_call(q_descale=number(1), scaling="head"))
    assert torch.equal(got, attention(**fp8_call(q_descale=1.0, scaling="head")))
    with pytest.raises(UnsupportedError, match="q_descale must be finite"):
        attention(**fp8_call(q_descale=number(0), scaling="head"))


@pytest.mark.edge(58)
def test_checks_survive_python_O() -> None:
    """SageAttention#19: asserts vanish under -O; these checks do not."""
    code = (
        "import torch, fp8cutlass\n"
        "x = torch.zeros(1, 1, 4, 32, dtype=torch.bfloat16)\n"
        "try:\n    fp8cutlass.attention(x, x, x, dropout_p=0.5)\n"
        "except fp8cutlass.UnsupportedError as e:\n    print('refused:', e)\n"
    )
    package = str(Path(fp8cutlass.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": package},
    )
    assert done.stdout.startswith("refused: dropout_p")


SPREAD = {
    "tensor": [(), (1,)],
    "head": [(), (1,), ("H",), ("B", "H")],
    "block": [(), (1,), ("H",), ("B", "H"), "canonical"],
    "token": [(), (1,), ("H",), ("B", "H"), "canonical"],
}


@pytest.mark.parametrize("scaling", list(SPREAD))
def test_coarser_descales_are_spread(scaling: str) -> None:
    """Every accepted shape with one value gives what a float gives."""
    q, k = fp8(2, 4, 16, 64), fp8(2, 2, 150, 64)
    values = {"q_descale": 0.02, "k_descale": 0.015, "v_descale": 0.01}
    want = attention(q, k, k, scaling=scaling, enable_gqa=True, **values)
    finest = {
        "block": {"q_descale": (2, 4, 16), "k_descale": (2, 2, 2), "v_descale": (2, 2, 2)},
        "token": {"q_descale": (2, 4, 16), "k_descale": (2, 2, 150), "v_descale": (2, 2, 64)},
    }
    for shape in SPREAD[scaling]:
        given = {}
        for name, value in values.items():
            sizes = {"B": 2, "H": 4 if name == "q_descale" else 2}
            full = finest[scaling][name] if shape == "canonical" else tuple(sizes.get(n, n) for n in shape)
            given[name] = torch.full(full, value)
        assert torch.equal(attention(q, k, k, scaling=scaling, enable_gqa=True, **given), want), shape


def test_a_descale_per_head_reaches_its_head() -> None:
    q, k, v = fp8(2, 4, 8, 64), fp8(2, 2, 20, 64), fp8(2, 2, 20, 64)
    factor = torch.tensor([1.0, 4.0])
    common = {"q_descale": 0.1, "k_descale": 0.1, "scaling": "head", "enable_gqa": True}
    one = attention(q, k, v, v_descale=1.0, **common)
    many = attention(q, k, v, v_descale=factor, **common)
    assert torch.equal(many, one * factor.repeat_interleave(2)[:, None, None])


@pytest.mark.parametrize("fallback", ["error", "sdpa"])
def test_forward_mode_is_refused(fallback: str) -> None:
    """An operator without a forward formula drops the tangents, silently."""
    q, k, v = bf16(), bf16(), bf16()
    choice = {} if fallback == "error" else {"fallback": fallback}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises((UnsupportedError, NotImplementedError), match="forward-mode AD|forward AD"):
            attention(dual, k, v, **choice)
    with pytest.raises((UnsupportedError, NotImplementedError, RuntimeError), match="forward-mode AD|forward AD"):
        torch.func.jvp(lambda x: attention(x, k, v, **choice), (q,), (torch.ones_like(q),))
    ends = torch.tensor([0, q.shape[2]], dtype=torch.int32)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode AD"):
        attention_varlen(q[0].transpose(0, 1), *(x[0].transpose(0, 1) for x in (k, v)), ends, ends, 1, 1)
    attention(q, k, v)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_a_nan_in_a_tensor_of_descales_reaches_its_head_alone(name: str) -> None:
    """The emulator keeps it visible; nobody reads tensors (docs/evidence/results.md has what a card does)."""
    descales = {n: torch.ones(4) for n in ("q_descale", "k_descale", "v_descale")}
    want = attention(fp8(), fp8(), fp8(), scaling="head", **descales)
    descales[name] = torch.tensor([1.0, 1.0, math.nan, 1.0])
    got = attention(fp8(), fp8(), fp8(), scaling="head", **descales)
    assert got[:, 2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(got[:, others], want[:, others])


def test_the_largest_scale() -> None:
    """Kernels multiply it by log2 e in float32."""
    most = torch.finfo(torch.float32).max * math.log(2)
    assert supports(bf16(), bf16(), bf16(), scale=0.999 * most)[0]
    for scale in (1.001 * most, -1.001 * most, math.inf):
        with pytest.raises(UnsupportedError, match="scale must be finite in float32, also times"):
            attention(bf16(), bf16(), bf16(), scale=scale)
    assert attention(bf16(), bf16(), bf16(), scale=2**70).isfinite().all()  # an int that fits no 64 bits


def test_other_layouts_are_refused_by_name() -> None:
    q = bf16()
    jagged = torch.nested.nested_tensor([torch.zeros(3, 8, 64), torch.zeros(2, 8, 64)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.zeros(3, 8, 64), torch.zeros(2, 8, 64)])
    for other, said in ((q.to_sparse(), "torch.sparse_coo"), (strided, "nested")):
        with pytest.raises(UnsupportedError, match=f"query must be a dense tensor, got a {said}"):
            attention(other, q, q)
        assert not supports(other, q, q)[0]
    with pytest.raises(UnsupportedError, match="query must be a dense tensor, got a torch.sp"):
        attention(q[0].to_sparse(), q, q)
    with pytest.raises(
        UnsupportedError, match="key must be a nested tensor of layout torch.jagged, as query is, got s"
    ):
        attention(jagged, q, q)
    assert not supports(jagged, q, q)[0] and explain(jagged, q, q).startswith("no kernel: key must be")
    with pytest.raises(UnsupportedError, match="key must be a dense tensor, got a nested one"):
        attention(q, jagged, jagged)


def test_arguments_of_a_wrong_kind_are_named() -> None:
    with pytest.raises(UnsupportedError, match="query_shape must be the 4 sizes"):
        pack_kv(bf16(), bf16(), query_shape="abcd")
    with pytest.raises(ValueError, match="block must be an integer"):
        quantize(bf16(), granularity="block", block=1.5)
