"""Random arguments: `attention` returns or raises UnsupportedError, and never accepts what its documentation rejects.

The oracle is written from the docstring of `attention` alone, so that a check that is lost, or that crashes on what it
was not made for, shows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fp8cutlass import UnsupportedError, attention, explain, supports
from fp8cutlass.errors import NoKernelError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF, FP8 = (torch.bfloat16, torch.float16), (E4M3, E5M2)
FLT_MAX, SMALLEST = (2 - 2.0**-23) * 2.0**127, 2.0**-126
JUNK = (None, "x", 3, 1.5, math.nan, True, [1.0], {}, torch.ones(2), object())
DESCALES = ("q_descale", "k_descale", "v_descale")
FLAGS = ("is_causal", "enable_gqa", "smooth_k", "hadamard", "return_lse", "return_amax")
SIZES = st.sampled_from((0, 1, 2, 3, 5))
DTYPES = (*HALF, *FP8, torch.float32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fnuz)


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """A call that is right but for up to three arguments that may be anything."""
    batch, kv_heads, group = draw(SIZES), draw(SIZES), draw(st.sampled_from((1, 1, 2, 3)))
    seqlen_q, seqlen_k, head_dim = draw(SIZES), draw(SIZES), draw(st.sampled_from((1, 8, 31, 64)))
    dtype = draw(st.sampled_from((*HALF, *FP8)))
    layout = draw(st.sampled_from(("bhsd", "bshd")))

    def shape(heads: int, tokens: int) -> tuple[int, ...]:
        return (batch, heads, tokens, head_dim) if layout == "bhsd" else (batch, tokens, heads, head_dim)

    call: dict[str, Any] = {
        "query": tensor(shape(kv_heads * group, seqlen_q), dtype),
        "key": tensor(shape(kv_heads, seqlen_k), dtype),
        "value": tensor(shape(kv_heads, seqlen_k), dtype),
        "layout": layout,
        "scaling": draw(st.sampled_from(("tensor", "head", "block", "token"))),
        "enable_gqa": group > 1 or draw(st.booleans()),
        "is_causal": draw(st.booleans()),
    }
    if dtype in FP8:
        call |= dict.fromkeys(DESCALES, 0.5)
    if draw(st.booleans()):
        call |= {"out_dtype": E4M3, "out_descale": 0.5}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(list(CHANGES)))
        call[name] = draw(CHANGES[name](call))
    return call


def tensors(call: dict[str, Any]) -> st.SearchStrategy[Any]:
    shapes = st.one_of(
        st.tuples(SIZES, SIZES, SIZES, st.sampled_from((0, 1, 8, 31, 64, 257))),
        st.lists(SIZES, max_size=5).map(tuple),
    )
    made = st.builds(tensor, shapes, st.sampled_from(DTYPES))
    gradient = st.just(torch.randn(1, 1, 2, 8, dtype=torch.bfloat16).requires_grad_())
    return st.one_of(made, made, made, gradient, st.just(torch.empty(1, 1, 2, 8, device="meta")), st.sampled_from(JUNK))


def descales(call: dict[str, Any]) -> st.SearchStrategy[Any]:
    numbers = st.sampled_from((0, 1, 2.0, -1.0, math.inf, 1e39, 1e-40, SMALLEST, FLT_MAX))
    shapes = st.one_of(st.sampled_from(((), (1,), (2,), (3,))), st.lists(SIZES, max_size=4).map(tuple))
    made = st.builds(tensor, shapes, st.sampled_from((torch.float32, torch.float32, torch.float64)))
    return st.one_of(numbers, made, st.just(torch.ones(1, requires_grad=True)), st.sampled_from(JUNK))


def outs(call: dict[str, Any]) -> st.SearchStrategy[Any]:
    query = call["query"]
    fitting = [torch.empty(query.shape, dtype=query.dtype), query] if isinstance(query, torch.Tensor) else []
    return st.one_of(tensors(call), st.sampled_from([*fitting, None]))


def masks(call: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Of sizes that fit, unless query and key are none."""
    sizes = [x.shape for x in (call["query"], call["key"]) if isinstance(x, torch.Tensor) and x.dim() == 4]
    rows, keys = (shape[-2 if call["layout"] == "bhsd" else -3] for shape in (sizes * 2)[:2]) if sizes else (2, 2)
    shapes = st.sampled_from(((rows, keys), (1, 1, 1, keys), (1, rows, 1), (keys,), ()))
    return st.builds(tensor, shapes, st.sampled_from((torch.bool, torch.float32, torch.bfloat16, torch.float64)))


def among(*values: Any) -> Any:
    return lambda call: st.one_of(st.sampled_from(values), st.sampled_from(JUNK))


CHANGES: dict[str, Any] = {
    "query": tensors,
    "key": tensors,
    "value": tensors,
    "out": outs,
    **dict.fromkeys((*DESCALES, "out_descale"), descales),
    "attn_mask": lambda call: st.one_of(masks(call), tensors(call)),
    "dropout_p": among(0.0, 0, 0.1),
    "scale": among(0.0, -0.3, 1, 1e39, -math.inf),
    **dict.fromkeys(
        ("is_causal", "enable_gqa", "smooth_k", "hadamard", "return_lse", "return_amax"), among(True, False)
    ),
    "layout": among("bhsd", "bshd", "sbhd"),
    "scaling": among("tensor", "token", "row"),
    "precision": among("fast", "balanced", "accurate", "int8", "int8_full", "best"),
    "out_dtype": among(*DTYPES),
    "causal_alignment": among("top_left", "bottom_right"),
    "kernel": among("", "sm89_fwd"),
    "fallback": among("error"),
}


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_one_of(x: Any, *choices: Any) -> bool:
    return isinstance(x, type(choices[0])) and x in choices


def good_descale(x: Any, shapes: list[tuple[int, ...]], largest: float) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dtype == torch.float32 and x.device.type == "cpu" and x.shape in shapes and not x.requires_grad
    return is_number(x) and SMALLEST <= x <= largest


def in_order(x: torch.Tensor, layout: Any) -> torch.Tensor:
    """(B, H, S, D), dimensions of size 1 for those that are not there and one batch for all others."""
    if layout != "bhsd" and x.dim() > 2:
        x = x.transpose(-3, -2)
    return (
        x.reshape(-1, *(1,) * (3 - x.dim()), *x.shape[-3:])
        if x.numel()
        else x.new_empty((x.shape[:-3].numel(), *(1,) * (3 - x.dim()), *x.shape[-3:]))
    )


def result_shape(call: dict[str, Any]) -> tuple[int, ...] | None:
    """That of SDPA's result: batches are broadcast, and heads unless they are shared in groups; None if they cannot."""
    shapes = []
    for name in ("query", "key", "value"):
        x = call[name]
        x = x.transpose(-3, -2) if call["layout"] != "bhsd" and x.dim() > 2 else x
        shapes.append((*(1,) * (3 - x.dim()), *x.shape))
    (*_, heads, rows, _), (*_, k_heads, _, _), (*_, v_heads, _, columns) = shapes
    try:
        if call.get("enable_gqa") is True:
            if k_heads != v_heads or heads != k_heads and (not k_heads or heads % k_heads):
                return None
        elif call["query"].dtype in FP8:
            if not heads == k_heads == v_heads:
                return None
        else:
            (heads,) = torch.broadcast_shapes((heads,), (k_heads,), (v_heads,))
        batches = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    except RuntimeError:
        return None
    if all(call[name].dim() == 2 for name in ("query", "key", "value")):
        return rows, columns
    return (*batches, heads, rows, columns) if call["layout"] == "bhsd" else (*batches, rows, heads, columns)


def objections(call: dict[str, Any]) -> list[str]:
    """Arguments that the docstring of `attention` rejects; not all, where the first make the rest meaningless."""
    get = call.get
    operands = ("query", "key", "value")
    wrong = [name for name in operands if not isinstance(get(name), torch.Tensor) or get(name).dim() < 2]
    if not wrong and any(get(name).dtype in FP8 for name in operands):
        wrong = [name for name in operands if get(name).dim() != 4]
    wrong += ["layout"] * (not is_one_of(get("layout", "bhsd"), "bhsd", "bshd"))
    wrong += ["scaling"] * (not is_one_of(get("scaling", "block"), "tensor", "head", "block", "token"))
    if wrong:
        return wrong
    q, k, v = (in_order(get(n), get("layout")) for n in operands)
    if q.dtype not in (*HALF, *FP8) or {q.dtype, k.dtype, v.dtype} != {q.dtype}:
        wrong.append("dtypes")
    if any(x.device.type != "cpu" or x.requires_grad for x in (q, k, v)):
        wrong.append("devices and gradients")
    if k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3] or not q.shape[3] or max(q.shape[3], v.shape[3]) > 256:
        wrong.append("shapes")
    if q.dtype in FP8 and (k.shape != v.shape or k.shape[0] != q.shape[0]):
        wrong.append("shapes")
    if result_shape(call) is None:
        wrong.append("batches or heads")
    for name in FLAGS:
        unsaid = name in ("smooth_k", "hadamard") and get(name) is None  # as the precision has it
        wrong += [name] * (not unsaid and not isinstance(get(name, False), bool))
    integers = is_one_of(get("precision", "fast"), "int8", "int8_full")
    wrong += ["precision"] * (not integers and not is_one_of(get("precision", "fast"), "fast", "balanced", "accurate"))
    mask = get("attn_mask")
    biased = isinstance(mask, torch.Tensor) and mask.dtype != torch.bool
    wrong += ["precision"] * (integers and (q.dtype in FP8 or get("scaling", "block") != "block" or biased))
    wrong += ["causal_alignment"] * (not is_one_of(get("causal_alignment", "top_left"), "top_left", "bottom_right"))
    wrong += ["bottom_right"] * (get("causal_alignment") == "bottom_right" and get("is_causal") is not True)
    scale = get("scale")
    wrong += ["scale"] * (scale is not None and not (is_number(scale) and abs(scale) <= FLT_MAX))
    wrong += ["attn_mask"] * (not good_mask(call))
    wrong += ["dropout_p"] * (not (is_number(get("dropout_p", 0.0)) and get("dropout_p", 0.0) == 0))
    wrong += ["kernel"] * (get("kernel") is not None)  # of those that are drawn none is a kernel's
    wrong += ["fallback"] * (not is_one_of(get("fallback", "error"), "error"))
    if q.dtype in FP8:
        finest = {"tensor": (None,) * 3, "head": (None,) * 3, "block": (2, -1, -1), "token": (2, 2, 3)}[get("scaling")]
        for name, x, axis in zip(DESCALES, (q, k, v), finest, strict=True):
            batch, heads = x.shape[:2]
            shapes: list[tuple[int, ...]] = [(), (1,)]
            if get("scaling") != "tensor":
                shapes += [(heads,), (batch, heads)]
            if axis is not None:
                shapes.append((batch, heads, -(-x.shape[2] // 128) if axis == -1 else x.shape[axis]))
            wrong += [name] * (not good_descale(get(name), shapes, FLT_MAX))
        wrong += [name for name in ("smooth_k", "hadamard") if get(name) is True]
    else:
        wrong += [name for name in DESCALES if get(name) is not None]
    stored = get("out_dtype")
    if stored is not None and not is_one_of(stored, E4M3, *HALF):
        wrong.append("out_dtype")
    elif stored == E4M3:
        wrong += ["out_descale"] * (not good_descale(get("out_descale"), [(), (1,)], 1 / SMALLEST))
    elif get("out_descale") is not None:
        wrong.append("out_descale")
    out = get("out")
    if out is not None:
        if not isinstance(out, torch.Tensor) or out.shape != result_shape(call) or out.requires_grad:
            wrong.append("out")
        elif out.dtype != (stored or (q.dtype if q.dtype in HALF else torch.bfloat16)) or out.device.type != "cpu":
            wrong.append("out")
        elif out.numel() and out.data_ptr() == call["query"].data_ptr():
            wrong.append("out")
    return wrong


def good_mask(call: dict[str, Any]) -> bool:
    """Whether a mask broadcasts to (..., H, Sq, Sk)."""
    mask, shape = call.get("attn_mask"), result_shape(call)
    if mask is None or shape is None:
        return mask is None
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.float32, *HALF):
        return False
    if mask.device.type != "cpu" or mask.requires_grad or (mask.dtype == torch.bool and call.get("is_causal") is True):
        return False
    if len(shape) > 2 and call["layout"] == "bshd":
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    key = call["key"]
    keys = key.shape[-2 if call["layout"] == "bhsd" or key.dim() == 2 else -3]
    try:
        return torch.broadcast_shapes(mask.shape, (*shape[:-1], keys)) == (*shape[:-1], keys)
    except RuntimeError:
        return False


@pytest.mark.edge(25, 26, 55, 56)
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_random_arguments(call: dict[str, Any]) -> None:
    expected = objections(call)
    served, text = supports(**call)
    assert isinstance(explain(**call), str)
    event("rejected" if expected else "served" if served else "no kernel")
    try:
        result = attention(**call)
    except UnsupportedError as error:
        assert not served and str(error) == text
        assert expected or isinstance(error, NoKernelError), "the documentation allows this call"
        return
    assert served and not expected
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == result_shape(call)
    extra = [call.get("return_lse", False), call.get("return_amax", False)]
    assert (len(result) if isinstance(result, tuple) else 1) == 1 + sum(extra)
