"""Arguments that ``scaled_dot_product_attention`` takes, brought to the one form that checks and kernels know.

:func:`opened` changes values: packed keys, a scale that is no Python number, a causal bias, operands under autocast.
:func:`reshaped` changes shapes: (B, H, S, D) with equal batches, heads and head_dim, and the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real  # what numpy's numbers are, float32 too
from typing import Any

import torch
import torch.nn.functional as F

from ..autocast import FLOATS, under_autocast
from ..cache.packed import HELD, PackedKV
from ..errors import UnsupportedError
from .masks import flattened
from .request import DEFAULTS, Request

NAMES = ("query", "key", "value")


def opened(request: Request) -> Request:
    """The request itself; where its key is packed one on tensors, so that everything that is known of calls holds for
    it: ``like`` stands for key and value, and what packing has settled is filled in.

    UnsupportedError for arguments that say otherwise.
    """
    request = _translated(request)
    packed = request.key
    if not isinstance(packed, PackedKV):
        return request
    wrong = []
    if request.value is not None:
        wrong.append(f"value must be None where key is a PackedKV, which holds it, got {type(request.value).__name__}")
    for name in HELD:
        given, held = getattr(request.options, name), getattr(packed, name)
        if not any(type(given) is type(fits) and given == fits for fits in (held, getattr(DEFAULTS, name))):
            wrong.append(
                f"{name}={given!r} is not what key was packed with, {name}={held!r}: leave it out, or pack again"
            )
    if wrong:
        raise UnsupportedError(*wrong)
    like = packed.like.transpose(1, 2) if request.options.layout == "bshd" else packed.like
    options = request.options._replace(**{name: getattr(packed, name) for name in HELD})
    return replace(request, key=like, value=like, packed=packed, options=options)


def number(given: Any) -> Any:
    """A Python float for a number of numpy or of a tensor without dimensions, as SDPA takes both; else what was given.

    A tensor on a card is waited for."""
    if given is None or type(given) in (float, int, bool):
        return given
    if isinstance(given, torch.Tensor):
        plain = given.dim() == 0 and not (given.requires_grad or given.is_complex() or given.dtype == torch.bool)
        return float(given) if plain and not given.is_meta else given
    return float(given) if isinstance(given, Real) and not isinstance(given, int) else given


def _translated(request: Request) -> Request:
    """The request with a scale that is a Python number, without a causal bias, its operands cast."""
    options = request.options
    scale = number(options.scale)
    if scale is not options.scale:
        options = options._replace(scale=scale)
        request = replace(request, options=options)
    if request.attn_mask is not None and type(request.attn_mask).__name__ == "CausalBias":
        request = _causal(request)
    if isinstance(request.key, PackedKV):
        if isinstance(request.query, torch.Tensor) and request.query.dtype != request.key.dtype:
            query, _ = under_autocast((request.query, request.key.k.new_empty((), dtype=torch.float32)))
            return replace(request, query=query)
        return request
    given = (request.query, request.key, request.value)
    operands = under_autocast(given)
    if operands is not given:
        request = replace(request, query=operands[0], key=operands[1], value=operands[2])
    return request


def _causal(request: Request) -> Request:
    """``is_causal`` and its alignment for a bias of ``torch.nn.attention.bias``; UnsupportedError where it is for other
    sizes, or where another argument says what rows see."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias, options, axis = request.attn_mask, request.options, -3 if request.options.layout == "bshd" else -2
    if not isinstance(bias, CausalBias):
        return request
    lower_right = bias.variant == CausalVariant.LOWER_RIGHT
    said = {
        "is_causal": (options.is_causal, (False,)),
        "window_size": (options.window_size, ((-1, -1), [-1, -1])),
        "causal_alignment": (options.causal_alignment, ("top_left", "bottom_right") if lower_right else ("top_left",)),
    }
    wrong = [
        f"attn_mask is a {bias.variant.name.lower()} causal bias, which excludes {name}={given!r}"
        for name, (given, fits) in said.items()
        if given not in fits
    ]
    if isinstance(request.query, torch.Tensor) and hasattr(request.key, "shape") and request.query.dim() >= 2:
        key_axis = -2 if isinstance(request.key, PackedKV) else axis
        sizes = tuple(x.shape[max(at, -len(x.shape))] for x, at in ((request.query, axis), (request.key, key_axis)))
        if sizes != (bias.seq_len_q, bias.seq_len_kv):
            wrong.append(
                f"attn_mask is a causal bias for {bias.seq_len_q} rows and {bias.seq_len_kv} keys, "
                f"query and key have {sizes[0]} and {sizes[1]}"
            )
    if wrong:
        raise UnsupportedError(*wrong)
    alignment = "bottom_right" if lower_right else "top_left"
    return replace(request, attn_mask=None, options=options._replace(is_causal=True, causal_alignment=alignment))


@dataclass(frozen=True)
class Form:
    """The result of a call whose tensors were reshaped: ``shape``, with the batch dimensions ``lead`` before the last
    three, and ``heads`` where there is a dimension for them."""

    shape: tuple[int, ...]
    lead: tuple[int, ...]
    heads: bool
    layout: str

    def leave(self, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the plain call returned, as the call that was made returns it; LSE (..., H, Sq), amax as it is."""
        if isinstance(outputs, torch.Tensor):
            return self._of(outputs)
        lse = (self._leading(x, 1) if x.dim() == 3 else x for x in outputs[1:])
        return (self._of(outputs[0]), *lse)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[3] != self.shape[-1]:
            x = x[..., : self.shape[-1]].clone()  # dense, in the order that it had
        return self._leading(x, 2 if self.layout == "bshd" else 1)

    def _leading(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """``heads`` is the dimension that one query without heads has not."""
        if not self.heads:
            x = x.squeeze(heads)
        return x.squeeze(0) if not self.lead else x if len(self.lead) == 1 else x.unflatten(0, self.lead)


def reshaped(request: Request) -> tuple[Request, Form] | None:
    """A request on tensors (B, H, S, D) of one batch size and head_dim that gives what this one asks for, without its
    ``out``. None where the tensors have this form, or where nothing brings them to it: the checks say why.

    Dimensions before heads are batches; batches and heads of size 1 are shared. Narrow values, or narrow queries and
    keys, get columns of zeros: those of values are cut off again, the others change no score.
    """
    q, k, v = given = (request.query, request.key, request.value)
    if request.packed is not None or not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        return None
    if not isinstance(request.options.enable_gqa, bool):
        return None
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    bshd = request.options.layout == "bshd"
    at = -2 if bshd else -3
    shapes = q.shape, k.shape, v.shape
    ranks = [len(shape) for shape in shapes]
    if ranks == [4, 4, 4]:
        (batch, *_, columns), (k_batch, *_, k_columns), (v_batch, *_, v_columns) = shapes
        heads, k_heads, v_heads = shapes[0][at], shapes[1][at], shapes[2][at]
        same = batch == k_batch == v_batch and columns == k_columns == v_columns
        if same and (request.options.enable_gqa or heads == k_heads == v_heads):
            return None
    if min(ranks) < 2 or not q.shape[-1] or k.shape[-1] != q.shape[-1]:
        return None
    if q.dtype not in (*FLOATS, torch.float64) or any(x.layout != torch.strided for x in given):
        return None
    no_heads = max(ranks) == 2
    q, k, v = (x.unsqueeze(at) if x.dim() == 2 else x for x in given)
    lead = _broadcast([tuple(x.shape[:-3]) for x in (q, k, v)])
    shared = _heads(request, q.shape[at], k.shape[at], v.shape[at])
    if lead is None or shared is None:
        return None
    gqa, *counts = shared
    q, k, v = (_expanded(x, lead, n, at) for x, n in zip((q, k, v), counts, strict=True))
    columns, scale = v.shape[-1], request.options.scale
    if columns != q.shape[-1]:
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1])
        width = max(columns, q.shape[-1])
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    shape = (*lead, *q.shape[1:3], columns)
    if no_heads:
        shape = (q.shape[1 if bshd else 2], columns)
    options = request.options._replace(enable_gqa=gqa, scale=scale, fallback="error")
    form = Form(shape, lead, not no_heads, request.options.layout)
    mask = flattened(request.attn_mask, lead)
    return replace(request, query=q, key=k, value=v, attn_mask=mask, out=None, options=options), form


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that all of these are broadcast to, None where there is none."""
    found = []
    for i in range(max(len(shape) for shape in shapes), 0, -1):
        sizes = [shape[-i] for shape in shapes if len(shape) >= i]
        wide = [size for size in sizes if size != 1]
        if any(size != wide[0] for size in wide):
            return None
        found.append(wide[0] if wide else 1)
    return tuple(found)


def _heads(request: Request, q: int, k: int, v: int) -> tuple[bool, int, int, int] | None:
    """Whether heads are shared in groups, and how many of query, key and value there are to be."""
    if request.options.enable_gqa or q == k == v:
        return request.options.enable_gqa, q, k, v
    if k == 1 and v == 1:
        return True, q, k, v
    found = _broadcast([(q,), (k,), (v,)])
    return None if found is None else (False, *found * 3)  # type: ignore[return-value]


def _expanded(x: torch.Tensor, lead: tuple[int, ...], heads: int, at: int) -> torch.Tensor:
    """Expand batches to ``lead`` and heads to ``heads``, then make one batch of all; a view where strides allow it."""
    middle = (x.shape[-3], heads) if at == -2 else (heads, x.shape[-2])
    x = x.expand(*lead, *middle, x.shape[-1])
    return x.unsqueeze(0) if not lead else x if len(lead) == 1 else x.flatten(0, len(lead) - 1)
