"""A cache of checked calls, on a card in eager mode.

What ``attention`` checks and chooses depends on the operands' metadata and the options alone. A call whose metadata and
options equal those of an earlier one skips the checks and launches. These calls are never cached: with
``out_descale``, with an ``out`` that is no ``room``, with bf16 and fp16 operands that are copied first, with masks of
packed keys, with tensor subclasses, and under torch.compile.
A cached call does not notice later changes of the environment variables that name libraries and tables.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from ..cache.packed import PackedKV
from ..masks.block_mask import BlockMask
from ..memory import ALIGNMENT
from ..native.fused import is_readable
from .call import Call, Tensors
from .card import Known, known
from .checks import writable
from .kept import Kept, Signature
from .options import Options
from .plan import resolve

_FLAGS = ("is_causal", "enable_gqa", "smooth_k", "hadamard", "return_lse", "return_amax")
_TYPED = ("dropout_p", "scale", "softcap", "causal_offset", *_FLAGS)
_numbers = itemgetter(*map(Options._fields.index, _TYPED))  # their types count as well: 1 is not True

SINKS = (torch.Tensor, torch.nn.Parameter)
_known: Kept[Known] = Kept()
look_up = _known.look_up
_Tensor = torch.Tensor
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def signature(
    query: Any, key: Any, value: Any, descales: tuple[Any, ...], options: Options, sinks: Any = None, mask: Any = None
) -> Signature | None:
    """What the checks and choices of a call depend on, or None where it is never cached.

    ``descales`` are those of query, key and value, () where there is none. The arguments that are neither these nor
    ``options`` have their defaults.
    """
    if mask is not None:
        of_mask = _of_mask(mask)
        plain = None if of_mask is None else signature(query, key, value, descales, options, sinks)
        return None if plain is None else (*plain, of_mask)
    if sinks is not None:
        plain = signature(query, key, value, descales, options)
        fits = type(sinks) in SINKS and sinks.is_contiguous() and not (torch.is_grad_enabled() and sinks.requires_grad)
        return (*plain, sinks.shape, sinks.dtype, sinks.device) if plain is not None and fits else None
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
            return (*signed, *_of_descales(descales, grad)) if descales else signed
        if type(key) is PackedKV and value is None and not descales:
            mean = key.k_mean
            if grad and (key.k_descale.requires_grad or key.v_descale.requires_grad):
                return None
            if query.data_ptr() % ALIGNMENT or (grad and mean is not None and mean.requires_grad):
                return None
            return (
                query.shape,
                query.stride(),
                query.dtype,
                query.get_device(),
                key.metadata,
                options,
                *map(type, _numbers(options)),
            )
    except (_Unknown, RuntimeError):  # a layout without strides or data
        return None
    return None


def _of_mask(mask: Any) -> tuple[Any, ...] | None:
    """The part of a mask that is a tensor, or of a packed one that kernels read as it lies; None for others."""
    if type(mask) is _Tensor:
        known = mask.is_cuda and mask.layout is torch.strided and not (mask.is_nested or mask.requires_grad)
        return (mask.shape, mask.stride(), mask.dtype, mask.get_device()) if known else None
    if type(mask) is not BlockMask:
        return None
    tensors = (mask.tiles, mask.counts) if mask.bits is None else (mask.tiles, mask.counts, mask.bits)
    if not all(type(x) is _Tensor and x.is_cuda and x.is_contiguous() for x in tensors):
        return None
    # The shapes, and the dtypes with them, are those that the long way has checked.
    return (mask.extent.shape, mask.tiles.get_device(), *((x.shape, x.dtype) for x in tensors))


def room(out: Any, query: Any, key: Any, options: Options) -> torch.Tensor | None:
    """``out`` in layout bhsd where the kernel can write the result of a call on packed keys into it, a call that
    ``signature`` knows; else None, and the result is copied."""
    if type(key) is not PackedKV or type(query) is not _Tensor or type(out) is not _Tensor or out.dim() != 4:
        return None
    alike = out.shape == query.shape and out.shape[3] == key.head_dim and out.get_device() == query.get_device()
    typed = out.dtype is (options.out_dtype or query.dtype)
    if not (alike and typed) or (torch.is_grad_enabled() and out.requires_grad):
        return None
    made = out.transpose(1, 2) if options.layout == "bshd" else out
    return made if is_readable(made) and writable(made, query, *key.tensors().values()) else None


class _Unknown(Exception):
    """An argument of which too little is known."""


def _of_descales(descales: tuple[Any, ...], grad: bool) -> tuple[Any, ...]:
    """The part of the signature of numbers, and of tensors that they are some: :func:`refused` has the rest.

    Anything else is _Unknown, as are tensors with a gradient, which the long way refuses.
    """
    found: list[Any] = []
    for x in descales:
        kind = type(x)
        if kind is _Tensor:
            if grad and x.requires_grad:
                raise _Unknown
            found.append(kind)
        elif kind is float:
            found.append(x)
        else:
            raise _Unknown
    return tuple(found)


def refused(error: RuntimeError, descales: tuple[Any, ...]) -> bool:
    """Whether the operator has refused a descale: it looks at dtype, device, shape and strides of each before it
    launches. The long way then says what is wrong."""
    return bool(descales) and "_descale" in str(error)


def taken_as_given(tensors: Tensors, query: torch.Tensor, key: Any, value: Any, scale: Any) -> bool:
    """Whether a call was made of these arguments themselves: autocast is no part of the signature, nor is the value of
    a scale that is a tensor."""
    if isinstance(scale, torch.Tensor) or tensors.q.dtype != query.dtype:
        return False
    return isinstance(key, PackedKV) or key.dtype == value.dtype == query.dtype


def remember(signed: Signature, call: Call, tensors: Tensors, descales: tuple[Any, ...] = ()) -> None:
    """Keep a call that has succeeded, if it needs a kernel and bf16 or fp16 operands are not copied for the operator.
    ``descales`` are those of FP8 operands as they were given."""
    run = known(resolve(call, tensors.q, tensors.k), tensors, descales)
    if run is None:
        return
    _known.keep(signed, run)


def forget() -> None:
    """Forget all calls, as what they would choose has changed."""
    _known.clear()
