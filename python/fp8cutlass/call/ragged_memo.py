"""Calls of ``attention_varlen`` that were made before, on a card in eager mode: a batch then launches at once.

What is checked depends on options and on metadata other than the numbers of tokens and of sequences, so that batches of
other sizes are known as well. Which kernel is the fastest for their sizes is asked each time. The operator checks the
tensors that it is given; what it refuses takes the long way, which says why. As :mod:`.memo` has it for dense calls,
these are never kept: tensors with a gradient, subclasses, modes and transforms, operands that are copied first, and
under torch.compile. Nor are calls while ``FP8CUTLASS_CHECK`` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checking import checked
from ..choose.target import target
from ..memory import ALIGNMENT
from .kept import Kept, Signature
from .memo import SINKS
from .ragged import choose, keeping, precision_for, precision_of
from .ragged_call import RaggedCall
from .ragged_launch import is_legible, launch_of, leaves_q

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# q, k and v; cu_seqlens of q and k, seqused of both; the descales of q, k and v; sinks; max_seqlen of q and k
Known = Callable[[Tensors, tuple[Any, ...], tuple[Any, ...], torch.Tensor | None, tuple[int, int]], Result]

_known: Kept[Known] = Kept()
look_up = _known.look_up
_Tensor = torch.Tensor
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_SCALES = (type(None), float, int)


def signature(
    operands: tuple[Any, ...],
    lengths: tuple[Any, ...],
    descales: tuple[Any, ...],
    sinks: Any,
    longest: tuple[Any, ...],
    options: tuple[Any, ...],
) -> Signature | None:
    """What the checks and choices of a call depend on, or None where it is never kept.

    ``longest``: max_seqlen of q and k, which what is kept looks at again. ``options``: the arguments after these that
    are no tensors, softmax_scale first and window_size third.
    """
    q, k, v = operands
    if type(q) is not _Tensor or type(k) is not _Tensor or type(v) is not _Tensor or not q.is_cuda:
        return None
    if _modes() or _transforms() or torch.autograd.forward_ad._current_level >= 0 or checked():
        return None
    if type(longest[0]) is not int or type(longest[1]) is not int or type(options[0]) not in _SCALES:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    try:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT or type(options[2]) is not tuple:
            return None
        return (
            q.shape[1:],
            k.shape[1:],
            v.shape[1:],
            k.shape[0] == v.shape[0] > 0 < q.shape[0],
            q.stride(),
            k.stride(),
            v.stride(),
            q.dtype,
            k.dtype,
            v.dtype,
            q.get_device(),
            k.get_device(),
            v.get_device(),
            *_of_lengths(lengths),
            *map(_of_descale, descales),
            None if sinks is None else _of_sinks(sinks),
            options,
            *map(type, options),
            *map(type, options[2]),
        )
    except (_Unknown, RuntimeError, IndexError):  # a layout without strides or data, too few dimensions
        return None


class _Unknown(Exception):
    """An argument that takes the long way."""


def _of_lengths(lengths: tuple[Any, ...]) -> list[Any]:
    """Of each table what it is, and whether all are for as many sequences as the first one."""
    found: list[Any] = []
    sequences = None
    for x, more in zip(lengths, (1, 1, 0, 0), strict=True):
        if x is None:
            found.append(None)
            continue
        if type(x) is not _Tensor or x.dim() != 1 or not x.is_contiguous():
            raise _Unknown
        count = x.shape[0] - more
        sequences = count if sequences is None else sequences
        found.append((x.dtype, x.get_device(), count == sequences > 0))
    return found


def _of_descale(x: Any) -> Any:
    if x is None:
        return None
    if type(x) is not _Tensor or not x.is_contiguous() or (torch.is_grad_enabled() and x.requires_grad):
        raise _Unknown
    return x.shape, x.dtype, x.get_device()


def _of_sinks(x: Any) -> Any:
    """Those that kernels read as they are."""
    if (
        type(x) not in SINKS
        or x.dtype is not torch.float32
        or not x.is_contiguous()
        or (torch.is_grad_enabled() and x.requires_grad)
    ):
        raise _Unknown
    return type(x), x.shape, x.get_device()


def forget() -> None:
    """Forget all calls, as what they would choose has changed."""
    _known.clear()


def remember(signed: Signature, call: RaggedCall, descales: tuple[Any, ...]) -> None:
    """Keep a call that has succeeded, if its operands were read as they were given. ``descales`` are as they came."""
    operands = (call.q, call.k, call.v)
    if not call.q.shape[0] or not call.k.shape[0] or not all(map(is_legible, operands)):
        return
    if any(made is not given for made, given in zip(call.descales, descales, strict=False)):
        return  # they were spread over heads
    at = target(call.q.device)
    variant, width = choose(at, call)[0], call.q.shape[2]
    names = {call.precision, "accurate"} if call.descales else {precision_of(call)}
    ways = {name: launch_of(call, *choose(at, call, name)) for name in names}
    kind = call.precision, bool(call.descales), bool(call.softcap), width
    whole, wants_lse = variant.head_dim == width, call.return_lse
    short = [(x, launch_of(call, x.variant, x.variant_number, x.number)) for x in keeping(at, call)]

    def run(
        operands: Tensors, lengths: tuple[Any, ...], descales: tuple[Any, ...], sinks: Any, longest: tuple[int, int]
    ) -> Result:
        q, k, v = operands
        rows, sequences = q.shape[0], lengths[0].shape[0] - 1
        of = (longest[1], sequences, q.shape[1], k.shape[1], at.sm_count)
        usual = ways[precision_for(*kind, k.shape[0], sequences, longest[1])]
        launch = next((launch for kept, launch in short if kept.serves(*of)), usual)
        lse = q.new_empty((q.shape[1], rows), dtype=torch.float32) if wants_lse else None
        out = launch(q, k, v, lengths, descales, sinks, lse, leaves_q(rows, sequences))
        if not whole:
            out = out[..., :width].contiguous()
        return out if lse is None else (out, lse)

    _known.keep(signed, run)
