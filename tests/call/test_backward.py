"""`backward="flash"`: gradients against torch's own, and what has none.

Regressions these catch: an output that is detached in silence; gradients of other heads in a group; a causal mask that
the two passes align differently; a scale or a padded column that the backward pass does not know of.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from reference import randn, relative_l2
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8cutlass import UnsupportedError, attention, attention_varlen, explain, pack_kv, quantize, supports
from fp8cutlass.call import backward
from fp8cutlass.call.request import request_of
from fp8cutlass.call.settle import settle
from fp8cutlass.errors import NoKernelError

E4M3 = torch.float8_e4m3fn
# Relative L2 of a gradient to that of exact attention: the forward's rounding is in its LSE and its output.
LIMIT = 0.05


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [randn(*shape, seed=20 + i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def exact(
    inputs: list[torch.Tensor], grad: torch.Tensor, *, swap: bool = False, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of SDPA in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) if swap else x for x in wide)
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return torch.autograd.grad(out.transpose(1, 2) if swap else out, wide, grad.double())


PLAIN = ((2, 4, 100, 64), (2, 4, 140, 64), (2, 4, 140, 64))
SQUARE = ((2, 4, 130, 64),) * 3
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "causal": (SQUARE, {"is_causal": True}),
    "scale": (PLAIN, {"scale": 0.06}),
    "negative scale": (PLAIN, {"scale": -0.1}),
    "groups": (((2, 4, 100, 64), (2, 2, 140, 64), (2, 2, 140, 64)), {"enable_gqa": True}),
    "causal groups": (((1, 6, 90, 64), (1, 2, 90, 64), (1, 2, 90, 64)), {"enable_gqa": True, "is_causal": True}),
    "head_dim 36": (((1, 2, 50, 36), (1, 2, 70, 36), (1, 2, 70, 36)), {}),
    "head_dim 256": (((1, 2, 50, 256), (1, 2, 70, 256), (1, 2, 70, 256)), {}),
    "3-D": (((4, 50, 64), (4, 70, 64), (4, 70, 64)), {}),
    "narrow value": (((1, 4, 50, 64), (1, 4, 70, 64), (1, 4, 70, 32)), {}),
    "one batch of keys": (((3, 4, 50, 64), (1, 4, 70, 64), (1, 4, 70, 64)), {}),
    "one KV head": (((2, 4, 50, 64), (2, 1, 70, 64), (2, 1, 70, 64)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_attention(name: str) -> None:
    shapes, options = CASES[name]
    inputs = leaves(*shapes)
    out = attention(*inputs, backward="flash", **options)
    grad = randn(*out.shape, seed=30)
    assert supports(*inputs, backward="flash", **options)[0]
    assert "gradient:  torch's flash attention" in explain(*inputs, backward="flash", **options)
    found = torch.autograd.grad(out, inputs, grad)
    torchs = F.scaled_dot_product_attention(*inputs, **options)
    for got, want, theirs, x in zip(
        found, exact(inputs, grad, **options), torch.autograd.grad(torchs, inputs, grad), inputs, strict=True
    ):
        assert got.shape == x.shape and got.dtype == x.dtype
        assert relative_l2(got, want) < LIMIT and relative_l2(theirs, want) < 0.01
        assert not torch.equal(got, theirs)  # it is ours that was differentiated
    with torch.no_grad():
        assert torch.equal(out, attention(*inputs, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"smooth_k": True, "hadamard": True}, {"scaling": "token"}, {"precision": "high"}])
def test_of_every_way_to_round(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = leaves(*PLAIN, dtype=dtype)
    if "smooth_k" in options:
        with torch.no_grad():
            k += 3  # the mean that is subtracted from the keys must be in the LSE, and may not multiply its error
    out = attention(q, k, v, backward="flash", **options)
    grad = randn(*out.shape, seed=31).to(dtype)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), grad), exact([q, k, v], grad), strict=True):
        assert relative_l2(got, want) < LIMIT


def test_layout_bshd() -> None:
    inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves(*SQUARE)]
    out = attention(*inputs, is_causal=True, layout="bshd", backward="flash")
    grad = randn(*out.shape, seed=32)
    found = torch.autograd.grad(out, inputs, grad)
    for got, want in zip(found, exact(inputs, grad, swap=True, is_causal=True), strict=True):
        assert relative_l2(got, want) < LIMIT


def test_only_what_wants_a_gradient_gets_one() -> None:
    q, k, v = leaves(*PLAIN)
    attention(q, k.detach(), v, backward="flash").sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None
    assert not attention(q.detach(), k.detach(), v.detach(), backward="flash").requires_grad
    with torch.no_grad():
        assert not attention(q, k, v, backward="flash").requires_grad
        assert "gradient:" not in explain(q, k, v, backward="flash")


def test_float32_parameters_under_autocast() -> None:
    """Evaluation without `no_grad`, and training: gradients reach the parameters in their own dtype."""
    weight = (randn(64, 64, seed=1).float() / 8).requires_grad_()
    x = randn(2, 4, 60, 64, seed=2).float()
    with torch.autocast("cpu"):
        attention(x @ weight, x, x, is_causal=True, backward="flash").float().square().sum().backward()
    got, weight.grad = weight.grad, None
    with torch.autocast("cpu"):
        F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True).float().square().sum().backward()
    assert got is not None and got.dtype == torch.float32 and relative_l2(got, weight.grad) < LIMIT


@pytest.mark.parametrize("shapes", [((1, 2, 0, 64), (1, 2, 7, 64)), ((1, 2, 7, 64), (1, 2, 0, 64))], ids=str)
def test_of_nothing_the_gradient_is_zero(shapes: Any) -> None:
    inputs = leaves(shapes[0], shapes[1], shapes[1])
    out = attention(*inputs, backward="flash")
    for got, x in zip(torch.autograd.grad(out, inputs, torch.ones_like(out)), inputs, strict=True):
        assert got.shape == x.shape and not got.any()


def test_a_second_derivative_is_refused() -> None:
    q, k, v = leaves(*PLAIN)
    out = attention(q, k, v, backward="flash")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


Q8 = quantize(randn(2, 4, 100, 64, seed=1), granularity="head")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_causal": True}, "is_causal=True with 100 rows and 140 keys"),
        ({"window_size": (5, 5)}, r"window_size=\(5, 5\)"),
        ({"window_size": (-1, 3)}, r"window_size=\(-1, 3\)"),
        ({"return_lse": True}, "return_lse"),
        ({"return_amax": True}, "return_amax"),
        ({"out_dtype": torch.float16}, "out_dtype=torch.float16 for operands of torch.bfloat16"),
        ({"out": torch.empty(2, 4, 100, 64).bfloat16()}, "out$"),
    ],
)
def test_what_has_no_gradient_is_named(change: dict[str, Any], words: str) -> None:
    q, k, v = leaves(*PLAIN)
    call = {"query": q, "key": k, "value": v, "backward": "flash"} | change
    with pytest.raises(NoKernelError, match="backward='flash' cannot serve .*" + words):
        attention(**call)
    assert not supports(**call)[0]
    with torch.no_grad():
        attention(**call)


def test_packed_keys_and_fp8_have_none() -> None:
    q, k, v = leaves(*PLAIN)
    with torch.no_grad():
        packed = pack_kv(k, v)
    with pytest.raises(NoKernelError, match="cannot serve a PackedKV"):
        attention(q, packed, backward="flash")
    q8, d = Q8
    descales = {f"{name}_descale": d.clone().requires_grad_() for name in "qkv"}
    with pytest.raises(NoKernelError, match="q_descale has requires_grad=True and there is no backward"):
        attention(q8, q8, q8, scaling="head", backward="flash", **descales)
    with pytest.raises(UnsupportedError, match="backward must be one of none, flash, got 'math'"):
        attention(q, k, v, backward="math")  # type: ignore[call-overload]


def test_the_default_refuses_and_says_what_there_is() -> None:
    q, k, v = leaves(*PLAIN)
    with pytest.raises(NoKernelError, match="requires_grad=True .*torch.no_grad.*backward='flash'"):
        attention(q, k, v)
    with pytest.warns(UserWarning, match="requires_grad=True") as caught:
        for _ in range(3):
            out = attention(q, k, v, fallback="sdpa")
    assert len(caught) == 1
    (got,) = torch.autograd.grad(out.sum(), q)
    (want,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q)
    assert torch.equal(got, want)
    ends = torch.tensor([0, 100], dtype=torch.int32)
    flat = [x[0, :, :100].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(NoKernelError, match="q has requires_grad=True and there is no backward"):
        attention_varlen(*flat, ends, ends, 100, 100)


def test_what_flash_cannot_serve_falls_back_with_a_gradient() -> None:
    q, k, v = leaves(*PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = attention(q, k, v, is_causal=True, backward="flash", fallback="sdpa")
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, want) and out.requires_grad


def test_compile_keeps_one_graph() -> None:
    torch._dynamo.reset()
    inputs = leaves(*SQUARE)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, is_causal=True, backward="flash")

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    grad = randn(*out.shape, seed=33)
    assert torch.equal(out, step(*inputs))
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(step(*inputs), inputs, grad), strict=True
    ):
        assert torch.equal(got, want)


def test_one_tensor_in_three_places() -> None:
    """torch.compile takes no tensor twice; the gradient is the sum."""
    torch._dynamo.reset()
    (x,) = leaves((1, 2, 40, 64))

    def step(x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, backward="flash")

    grad = randn(*x.shape, seed=36)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    want = sum(y.float() for y in torch.autograd.grad(attention(*apart, backward="flash"), apart, grad))
    assert isinstance(want, torch.Tensor)
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        (got,) = torch.autograd.grad(function(x), x, grad)
        assert relative_l2(got, want) < 0.01


def test_the_functional_transform() -> None:
    q, k, v = (x.detach() for x in leaves(*PLAIN))
    found = torch.func.grad(lambda q, k: attention(q, k, v, backward="flash").float().sum(), argnums=(0, 1))(q, k)
    inputs = leaves(*PLAIN)
    wanted = torch.autograd.grad(attention(*inputs, backward="flash").float().sum(), inputs[:2])
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_checkpointing_runs_the_forward_again() -> None:
    inputs = leaves(*PLAIN)

    def step(*x: torch.Tensor) -> torch.Tensor:
        return attention(*x, backward="flash")  # type: ignore[call-overload]

    again = torch.utils.checkpoint.checkpoint(step, *inputs, use_reentrant=False)
    grad = randn(*again.shape, seed=35)
    for got, want in zip(
        torch.autograd.grad(again, inputs, grad), torch.autograd.grad(step(*inputs), inputs, grad), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("head_dim", [36, 64, 200])
@pytest.mark.parametrize("gqa", [False, True])
def test_the_call_that_a_card_gets(head_dim: int, gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's twin in the place of the card's operator: columns in eights, 200 of them as 256, and cut again."""
    seen = []

    def twin(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: float) -> Any:
        cu_q, cu_k, rows, keys, dropout, causal, seed, offset = rest
        assert cu_q is None and cu_k is None and (rows, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
        assert seed.numel() == 2 and offset.numel() == 0 and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        assert all(x.shape[1] == q.shape[1] and x.stride(3) == 1 for x in (grad, q, k, v, out))
        seen.append(q.shape[3])
        of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return of(grad, q, k, v, out, lse, 0.0, causal, scale=scale)

    shapes = ((2, 4, 50, head_dim), (2, 2 if gqa else 4, 70, head_dim), (2, 2 if gqa else 4, 70, head_dim))
    q, k, v = (x.detach() for x in leaves(*shapes))
    call, _ = settle(request_of(q, k, v, enable_gqa=gqa, scale=0.2))
    with torch.no_grad():
        out, lse = attention(q, k, v, enable_gqa=gqa, scale=0.2, return_lse=True)
    grad = randn(*out.shape, seed=34)
    want = backward.gradients(call, grad, q, k, v, out, lse)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", twin, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    got = backward.gradients(call, grad, q, k, v, out, lse)
    assert seen == [{36: 40, 64: 64, 200: 256}[head_dim]]
    for mine, wanted in zip(got, want, strict=True):
        assert mine.shape == wanted.shape and relative_l2(mine, wanted) < 0.01


def test_the_cards_operator_takes_these_arguments() -> None:
    """Its fake kernel: the order of arguments, and that no lengths are an argument that it has."""
    with FakeTensorMode():
        q, k = (torch.empty(2, 4, rows, 40, dtype=torch.bfloat16, device="meta") for rows in (50, 70))
        lse = torch.empty(2, 4, 50, device="meta")
        dq, dk, dv = backward._on_a_card([q, q, k, k, q], lse, 0.2, False)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape
