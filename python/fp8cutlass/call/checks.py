"""The checks of a call, with their error messages. No check reads a tensor's values. So none waits for a device, and
torch.compile traces them into shape guards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..dtypes import DTYPE_NAMES, HALF_DTYPES, OUT_NAMES
from ..errors import NoKernelError, UnsupportedError
from ..manifest import INTEGER
from ..quant import descale
from . import backward, masks
from .options import TRANSFORMS, wrong_sinks
from .reasons import (
    BHSD,
    NO_BACKWARD,
    differing,
    for_fp8,
    missing,
    no_derivatives,
    vectorised,
    wanted,
    wrong_dtype,
    wrong_dtypes,
    wrong_groups,
    wrong_tensors,
)
from .request import Request

MAX_TOKENS = 2**31 - 1 - 256  # rows and keys of a tile past the end are 32-bit in the kernels
ACCEPTED = (*HALF_DTYPES, *DTYPE_NAMES)
WIDE_DTYPES = (torch.float32, torch.float64)  # operands that SDPA serves and no kernel
MOST_STEPS = 1000  # of a search for an element that two tensors share


OPERANDS = ("query", "key", "value")
DESCALES = ("q_descale", "k_descale", "v_descale")
FLASH = ", or pass backward='flash' for the gradient of torch's flash attention"


def _named(request: Request, names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, getattr(request, name)) for name in names]


def check_shapes(request: Request) -> None:
    """Ranks, then sizes against one another."""
    order = BHSD if request.options.layout == "bhsd" else ("batch", "tokens", "heads", "head_dim")
    wrong = wrong_tensors(_named(request, OPERANDS), order)
    if wrong:
        raise UnsupportedError(*wrong)
    q, k, v = request.bhsd()
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        for axis, what in ((0, "batch size"), (3, "head_dim")):
            wrong += differing("query", "key", [(what, q.shape[axis], k.shape[axis])])
            wrong += differing("query", "value", [(what, q.shape[axis], v.shape[axis])])
        grouped = request.options.enable_gqa and v.shape[1] != 0 and q.shape[1] % v.shape[1] == 0
        if not grouped:  # else check_features
            wrong += differing("key", "value", [("heads", k.shape[1], v.shape[1])])
        wrong += differing("key", "value", [("tokens", k.shape[2], v.shape[2])])
    if not torch.compiler.is_compiling():  # no guard on a size that no memory holds but an expanded tensor's
        for name, x in (("query", q), ("key", k)):
            if x.shape[2] > MAX_TOKENS:
                wrong.append(f"{name} may have {MAX_TOKENS} tokens at most, got {x.shape[2]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads:
        if not request.options.enable_gqa:
            wrong.append(
                f"query has {heads} heads and key has {kv_heads}: pass enable_gqa=True to share key and value heads"
            )
        wrong += wrong_groups("query", "key", heads, kv_heads)
    if wrong:
        shapes = ", ".join(f"{name} {tuple(getattr(request, name).shape)}" for name in ("query", "key", "value"))
        raise UnsupportedError(*wrong, f"given, in layout {request.options.layout}: {shapes}")


def check_types(request: Request) -> None:
    """Dtypes and devices of the tensors, what the output type needs, and the mask."""
    q = request.query
    wrong = wrong_dtypes(_named(request, OPERANDS), ACCEPTED, WIDE_DTYPES)
    if q.dtype in DTYPE_NAMES:
        on = [name for name in TRANSFORMS if getattr(request.options, name)]
        wrong += [f"{name} is for bf16 and fp16 operands; {q.dtype} ones are quantised already" for name in on]
        if (precision := request.options.precision) in INTEGER:
            wrong.append(f"precision={precision!r} is for bf16 and fp16 operands; {q.dtype} ones are quantised already")
    heads = request.bhsd()[0].shape[1]
    if (reason := wrong_sinks("sinks", request.sinks, heads, q.device)) is not None:
        wrong.append(reason)
    elif request.sinks is not None and request.options.smooth_k:
        wrong.append("sinks stand beside logits, and smooth_k moves these: the two do not go together")
    out_dtype = request.options.out_dtype
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in OUT_NAMES):
        wrong.append(f"out_dtype must be one of {', '.join(map(str, OUT_NAMES))}, got {out_dtype}")
    if out_dtype == torch.float8_e4m3fn:
        if request.out_descale is None:
            wrong.append("out_dtype=torch.float8_e4m3fn needs out_descale, the factor that multiplies the output back")
        else:
            wrong += descale.refuse("out_descale", request.out_descale, "tensor", (1, 1, 1, 1), q.device)
    elif request.out_descale is not None:
        wrong.append(f"out_descale is for out_dtype=torch.float8_e4m3fn, got out_dtype={out_dtype}")
    wrong += masks.refused(request.attn_mask, request.options, *request.bhsd()[:2])
    if wrong:
        raise UnsupportedError(*wrong)


def check_descales(request: Request, granularity: Sequence[str]) -> None:
    """FP8 operands need their descales, others may not have any."""
    wrong = []
    fp8 = request.query.dtype in DTYPE_NAMES
    for name, x, shared_by in zip(DESCALES, request.bhsd(), granularity, strict=True):
        given = getattr(request, name)
        if fp8 and given is None:
            shape = f"a float or a tensor of shape {descale.canonical_shape(shared_by, x.shape)}"
            wrong.append(missing(name, x.dtype, shape))
        elif given is not None and not fp8:
            wrong += for_fp8([name], x.dtype)
        elif given is not None:
            wrong += descale.refuse(name, given, shared_by, x.shape, x.device)
    if wrong:
        raise UnsupportedError(*wrong)


def check_features(request: Request) -> None:
    """Well-formed arguments that no kernel serves, but torch's attention does."""
    wrong = []
    if request.key.shape != request.value.shape:
        k, v = request.bhsd()[1:]
        wrong += differing("key", "value", [("heads", k.shape[1], v.shape[1])])
    if request.query.dtype in WIDE_DTYPES:
        wrong += [wrong_dtype(name, x, ACCEPTED) for name, x in _named(request, OPERANDS)]
    if not isinstance(request.options.dropout_p, (int, float)) or request.options.dropout_p != 0.0:
        given = "" if torch.compiler.is_compiling() else f", got {request.options.dropout_p}"  # no text of a SymFloat
        wrong.append(f"dropout_p is not supported; accepted is 0.0{given}")
    differentiable = wanted(_named(request, OPERANDS))
    if differentiable and request.options.backward == "flash":
        wrong += backward.refused(request)
    else:
        wrong += [f"{name} has {NO_BACKWARD}{FLASH}" for name in differentiable]
    wrong += no_derivatives(_named(request, (*DESCALES, "out_descale", "sinks")))
    wrong += vectorised(_named(request, (*OPERANDS, *DESCALES, "out_descale", "sinks", "attn_mask")))
    wrong += masks.wants_gradient(request.attn_mask)
    if wrong:
        raise NoKernelError(*wrong)


def check_out(request: Request, out_dtype: torch.dtype, shape: Sequence[int]) -> None:
    """``out=`` takes the result, of this shape and in the layout of query, by ``copy_``: any strides will do."""
    out, query = request.out, request.query
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise UnsupportedError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    wrong = []
    if tuple(out.shape) != tuple(shape):
        wrong.append(f"out has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    if out.dtype != out_dtype:
        wrong.append(f"out has dtype {out.dtype}, the result has {out_dtype}")
    if out.device != query.device:
        wrong.append(f"out is on {out.device}, query is on {query.device}")
    if torch.is_grad_enabled() and out.requires_grad:
        wrong.append(f"out has {NO_BACKWARD}")
    if _expanded(out):
        wrong.append(f"out is expanded: shape {tuple(out.shape)}, strides {out.stride()}")
    elif not torch.compiler.is_compiling() and _overlaps_itself(out):
        wrong.append(f"out overlaps itself: shape {tuple(out.shape)}, strides {out.stride()}")
    # Not while tracing, where tensors have no memory and the graph keeps reads before writes.
    if not torch.compiler.is_compiling():
        for name in ("query", "key", "value"):
            if _overlap(out, getattr(request, name)):
                wrong.append(f"out shares its memory with {name}")
    if wrong:
        raise UnsupportedError(*wrong)


def writable(out: torch.Tensor, *read: torch.Tensor) -> bool:
    """Whether a kernel that reads these tensors may write to ``out``: no two of its elements are one, and none lies in
    them."""
    return not (_expanded(out) or _overlaps_itself(out) or any(_overlap(out, x) for x in read))


def _expanded(x: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True when two tensors share a byte: not where the elements of one lie between those of the other."""
    if not x.numel() or not y.numel() or x.device != y.device:
        return False
    (x_start, x_end), (y_start, y_end) = _address_range(x), _address_range(y)
    if x_start >= y_end or y_start >= x_end:
        return False
    ends: dict[int, list[int]] = {}  # of a stride in bytes: what its steps in x less those in y may be
    for tensor, end, sign in ((x, 1, 1), (y, 0, -1)):
        size = tensor.element_size()
        strides = (1, *(stride * size for stride in tensor.stride()))
        for stride, count in zip(strides, (size, *tensor.shape), strict=True):
            if stride:
                ends.setdefault(stride, [0, 0])[end] += sign * (count - 1)
    return _reaches(y_start - x_start, [(stride, least, most) for stride, (least, most) in ends.items()])


def _address_range(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _overlaps_itself(x: torch.Tensor) -> bool:
    """True when two elements of a tensor that is not expanded are one."""
    if not x.numel():
        return False
    steps = sorted((stride, size - 1) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    reach = 0  # of the dimensions with smaller strides
    for stride, last in steps:
        if stride <= reach:
            break
        reach += stride * last
    else:
        return False
    # Of two elements that are one, the first dimension in which they differ is taken upwards.
    return any(
        _reaches(0, [(stride, 1, last), *((s, -most, most) for s, most in steps[:i])])
        for i, (stride, last) in enumerate(steps)
    )


def _reaches(total: int, terms: Iterable[tuple[int, int, int]]) -> bool:
    """Whether a sum of stride * n is ``total`` for whole numbers least <= n <= most, of (stride, least, most) with
    stride > 0. True, too, where ``MOST_STEPS`` do not tell; strides that follow from sizes take a few."""
    terms = sorted(terms)
    low, high = [0], [0]  # of the terms with smaller strides
    for stride, least, most in terms:
        low.append(low[-1] + stride * least)
        high.append(high[-1] + stride * most)
    waiting = [(total, len(terms))]  # what is left to reach, and by how many terms
    for _ in range(MOST_STEPS):
        if not waiting:
            return False
        rest, left = waiting.pop()
        if not left:  # each was chosen so that the others can make up the rest
            return rest == 0
        stride, least, most = terms[left - 1]
        first = max(least, -((high[left - 1] - rest) // stride))
        last = min(most, (rest - low[left - 1]) // stride)
        waiting += [(rest - stride * n, left - 1) for n in range(first, min(last, first + MOST_STEPS) + 1)]
    return True
