"""Whether a kernel serves a request, and which. Answers are kept; torch.compile traces the question."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from ..cache.packed import LEAVES, SETTLED, PackedKV
from ..choose.target import device_of
from ..dtypes import operand_name
from ..errors import UnsupportedError
from ..manifest import SCORE_AMAX
from ..native.extension import assumed
from ..quant.quantize import FP8_MAX
from ..tracing import constant
from .call import parse
from .plan import resolve, resolve_for
from .request import Request, request_of
from .settle import settle

Answer = tuple[bool, str]
Key = tuple[Any, ...]

LIMIT = 4096  # answers that are kept; then all are forgotten
VARIABLES = ("FP8CUTLASS_LIBRARY", "FP8CUTLASS_GENERATED")
AUTOCAST = ("cpu", "cuda")
PLAIN = (type(None), bool, int, float, str, torch.dtype)
_answers: dict[Key, Answer] = {}


def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    """Of ``attention(*args, **kwargs)``: yes and the kernel, or no and every reason.

    Where torch.compile traces, yes comes without the name of the kernel: the choice depends on sizes, which need have
    no value there.
    """
    if torch.compiler.is_compiling():
        return _traced(request_of(*args, **kwargs))
    key = _key(args, kwargs)
    known = None if key is None else _answers.get(key)
    if known is not None:
        return known
    try:
        call, tensors = settle(request_of(*args, **kwargs))
        plan = resolve(call, tensors.q, tensors.k)
        found = True, f"{plan.variant.id} ({plan.decision.criterion})"
    except UnsupportedError as error:
        found = False, str(error)
    if key is not None:
        if len(_answers) >= LIMIT:
            _answers.clear()
        _answers[key] = found
    return found


def forget() -> None:
    """Forget all answers, as what they name has changed."""
    _answers.clear()


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """What an answer depends on; None where it is not kept: with ``out``, whose memory counts, and with arguments of
    other kinds than tensors, numbers and words."""
    if kwargs.get("out") is not None:
        return None
    grad = torch.is_grad_enabled()
    try:
        found = [_of(x, grad) for x in args]
        for name, x in kwargs.items():
            found += (name, _of(x, grad))
        device = found[0][2].type if found else kwargs["query"].device.type
        cast = device in AUTOCAST and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        key = (*found, cast, torch.autograd.forward_ad._current_level, assumed(), *map(os.environ.get, VARIABLES))
        hash(key)
    except (_Unknown, KeyError, TypeError, RuntimeError, AttributeError, IndexError):
        return None
    return key


class _Unknown(Exception):
    """An argument of which too little is known."""


def _of(x: Any, grad: bool) -> Any:
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return x.shape, x.dtype, x.device, x.layout, grad and x.requires_grad
    if kind in PLAIN:
        return kind, x
    if kind is tuple:
        return kind, x, *map(type, x)
    if kind is PackedKV:
        return tuple(_of(getattr(x, name), grad) for name in LEAVES), tuple(getattr(x, name) for name in SETTLED)
    raise _Unknown


def _traced(request: Request) -> Answer:
    try:
        call, tensors = settle(request)
    except UnsupportedError as error:
        return False, str(error)
    if call.kernel or call.kind == "packed":
        device, dtype = tensors.q.device, operand_name(tensors.q.dtype, call.precision)
        # Plain numbers where torch.compile traces: a range's length, and what a branch chooses.
        sizes = (tensors.q.shape[3], tensors.k.shape[3], call.key_block)
        head_dim, columns, block = (len(range(size)) for size in sizes)
        beyond = 1 if call.amax > SCORE_AMAX else 0
        ends = call.left is not None, call.right is not None, 1 if call.softcap else 0
        refused = _refused(device.type, device.index, head_dim, columns, block, beyond, dtype, call.text(), *ends)
        if refused:
            return False, refused
    return True, "a kernel that is chosen by the sizes"


@constant
def _refused(
    kind: str,
    index: int | None,
    head_dim: int,
    columns: int,
    key_block: int,
    beyond: int,
    dtype: str,
    text: str,
    left: bool,
    right: bool,
    capped: int,
) -> str:
    """Why a pinned kernel, or any kernel that reads these packed keys, does not serve such a call, whatever its sizes;
    "" if it does. ``beyond``: K was quantised to more than f16 scores hold."""
    amax = FP8_MAX[torch.float8_e4m3fn] if beyond else SCORE_AMAX
    call = replace(parse(text), left=0 if left else None, right=0 if right else None, key_block=key_block, amax=amax)
    call = replace(call, softcap=1.0 if capped else 0.0)
    try:
        resolve_for(call, device_of(kind, index), (1, 1, 1, head_dim), (1, 1, 1, columns), dtype)
    except UnsupportedError as error:
        return str(error)
    return ""
