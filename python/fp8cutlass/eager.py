"""Calls that were made before, of bf16 or fp16 operands on a card in eager mode.

What ``attention`` checks and chooses depends on the operands' metadata and the options alone. A call that agrees in
them with an earlier one goes straight to the operator of the extension; everything else takes the long way, which
refuses, explains and serves torch.compile: calls with ``out``, ``out_descale`` or descales, operands that are copied
first, subclasses. What has run runs on, whatever the environment says since then about libraries and tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .attend import Attend
from .fused import readable
from .launch import Call, prepared_call
from .memory import ALIGNMENT
from .plan import choose, options_of
from .request import Plan, Request

LIMIT = 4096  # calls that are kept; then all are forgotten, as a program with ever new shapes gains nothing

Signature = tuple[Any, ...]

_known: dict[Signature, Attend] = {}


def signature(request: Request) -> Signature | None:
    """What the checks and choices of a call depend on, or None where it takes the long way in any case."""
    query, key, value, *options = vars(request).values()
    # Subclasses, modes and transforms want to see the operator that torch knows by its fake kernel.
    if not (type(query) is type(key) is type(value) is torch.Tensor) or not query.is_cuda:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():  # a sign that only the dispatcher knows of
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    try:
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT:
            return None
        return (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            *options,
            *map(type, options),  # 1 is not True
        )
    except RuntimeError:  # a layout without strides or data
        return None


def look_up(signed: Signature) -> Attend | None:
    """The call with this signature; None where there was none."""
    try:
        return _known.get(signed)
    except TypeError:  # an option that cannot be hashed; the long way refuses it
        return None


def remember(signed: Signature, request: Request, plan: Plan) -> None:
    """Keep a call that has succeeded, if the operator of the extension can serve it as it is."""
    operands = (plan.q, plan.k, plan.v)
    if not plan.half or any(isinstance(option, torch.Tensor) for option in signed):
        return
    if request.out_descale is not None or not all(x.numel() and readable(x) is x for x in operands):
        return
    if len(_known) >= LIMIT:
        _known.clear()
    variant, number, _ = choose(request, plan)
    # No descales: the operands are quantised inside.
    arguments: tuple[Any, ...] = (*operands, None, None, None, *options_of(request, plan))
    call = replace(Call(*arguments), smooth_k=request.smooth_k, hadamard=request.hadamard)
    _known[signed] = prepared_call(call, variant, number, dict(zip("qkv", plan.granularity, strict=True)))


def forget() -> None:
    """Forget all calls, as what they would choose has changed."""
    _known.clear()
