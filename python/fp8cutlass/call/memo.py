"""A cache of checked calls, on a card in eager mode.

What ``attention`` checks and chooses depends on the operands' metadata and the options alone. A call whose metadata and
options equal those of an earlier one skips the checks and launches. These calls are never cached: with ``out`` or
``out_descale``, with bf16 and fp16 operands that are copied first, with tensor subclasses, and under torch.compile.
A cached call does not notice later changes of the environment variables that name libraries and tables.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from ..cache.packed import PackedKV
from ..memory import ALIGNMENT
from ..quant.descale import all_canonical
from .call import Call, Outputs, Tensors
from .launch import ready
from .options import Options
from .plan import resolve

LIMIT = 4096  # calls that are kept; then all are forgotten, as a program with ever new shapes gains nothing
_NUMBERS = ("dropout_p", "is_causal", "scale", "enable_gqa", "smooth_k", "hadamard", "return_lse", "return_amax")
_numbers = itemgetter(*map(Options._fields.index, _NUMBERS))  # their types count as well: 1 is not True

Signature = tuple[Any, ...]
Known = Callable[..., Outputs]  # of query, key and value in layout bhsd and, if FP8, the descales

_known: dict[Signature, Known] = {}
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def signature(query: Any, key: Any, value: Any, descales: tuple[Any, ...], options: Options) -> Signature | None:
    """What the checks and choices of a call depend on, or None where it is never cached.

    ``descales`` are those of query, key and value, () where there is none. The arguments that are neither these nor
    ``options`` have their defaults.
    """
    # Subclasses, modes and transforms want to see the operator that torch knows by its fake kernel.
    if type(query) is not torch.Tensor or not query.is_cuda or _modes() or _transforms():
        return None
    if torch.autograd.forward_ad._current_level >= 0:  # refused, as there are no tangents
        return None
    grad = torch.is_grad_enabled()
    if grad and query.requires_grad:
        return None
    try:
        if type(key) is type(value) is torch.Tensor:
            if grad and (key.requires_grad or value.requires_grad):
                return None
            if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT:
                return None
            signed = (
                query.shape,
                key.shape,
                value.shape,
                query.stride(),
                key.stride(),
                value.stride(),
                query.dtype,
                key.dtype,
                value.dtype,
                query.get_device(),
                key.is_cuda and key.get_device(),
                value.is_cuda and value.get_device(),
                options,
                *map(type, _numbers(options)),
            )
            return (*signed, *_of_others(descales, grad)) if descales else signed
        if type(key) is PackedKV and value is None and not descales:
            held = (key.k, key.v, key.k_descale, key.v_descale, key.k_mean)
            settled = (
                key.head_dim,
                key.dtype,
                key.key_block,
                key.amax,
                key.scaling,
                key.precision,
                key.smooth_k,
                key.hadamard,
            )
            return (*_of_others((query, *held), grad), settled, options, *map(type, _numbers(options)))
    except (_Unknown, RuntimeError):  # a layout without strides or data
        return None
    return None


class _Unknown(Exception):
    """An argument of which too little is known."""


def _of_others(arguments: tuple[Any, ...], grad: bool) -> tuple[Any, ...]:
    """The part of the signature of tensors, numbers and None; anything else is _Unknown, as are tensors with a
    gradient, which the long way refuses."""
    found: list[Any] = []
    for x in arguments:
        if type(x) is torch.Tensor:
            if grad and x.requires_grad:
                raise _Unknown
            found.append((x.shape, x.stride(), x.dtype, x.device))
        elif x is None or type(x) is float:
            found.append(x)
        else:
            raise _Unknown
    return tuple(found)


def look_up(signed: Signature) -> Known | None:
    """The call with this signature; None where there was none."""
    try:
        return _known.get(signed)
    except TypeError:  # an option that cannot be hashed; the long way refuses it
        return None


def taken_as_given(tensors: Tensors, query: torch.Tensor, key: Any, value: Any, scale: Any) -> bool:
    """Whether a call was made of these arguments themselves: autocast is no part of the signature, nor is the value of
    a scale that is a tensor."""
    if isinstance(scale, torch.Tensor) or tensors.q.dtype != query.dtype:
        return False
    return isinstance(key, PackedKV) or key.dtype == value.dtype == query.dtype


def remember(signed: Signature, call: Call, tensors: Tensors) -> None:
    """Keep a call that has succeeded, if it needs a kernel and no operand is copied for the operator of the extension
    that takes bf16 and fp16 operands."""
    plan = resolve(call, tensors.q, tensors.k)
    run = ready(plan, tensors)
    if run is None:
        return
    if len(_known) >= LIMIT:
        _known.clear()
    granularity = tuple(plan.granularity[name] for name in "qkv")
    _known[signed] = _KNOWN[call.kind](run, granularity)


def forget() -> None:
    """Forget all calls, as what they would choose has changed."""
    _known.clear()


def _half(run: Callable[[Tensors], Outputs], granularity: tuple[str, ...]) -> Known:
    return lambda q, k, v: run(Tensors(q, k, v))


def _fp8(run: Callable[[Tensors], Outputs], granularity: tuple[str, ...]) -> Known:
    return lambda q, k, v, *descales: run(Tensors(q, k, v, *all_canonical(descales, granularity, (q, k, v))))


def _packed(run: Callable[[Tensors], Outputs], granularity: tuple[str, ...]) -> Known:
    return lambda q, kv, _: run(Tensors(q, kv.k, kv.v, None, kv.k_descale, kv.v_descale, None, kv.k_mean))


_KNOWN = {"half": _half, "fp8": _fp8, "packed": _packed}
