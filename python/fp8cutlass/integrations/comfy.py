"""ComfyUI: an attention override for the models of a workflow. ``examples/comfyui`` has the node that sets it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..stats import Reason
from .dense import Accuracy, accuracy_of, attend

DOOR = "comfyui"
OPTION = "optimized_attention_override"  # of transformer_options, where ComfyUI looks for an override
# What ComfyUI passes to attention functions and what is no part of the result.
PASSED_ON = ("transformer_options", "_inside_attn_wrapper", "low_precision_attention", "enable_gqa")

AttentionFunction = Callable[..., torch.Tensor]


def patched(model: Any, **accuracy: Any) -> Any:
    """A clone of a ComfyUI model whose attention runs in FP8 where it can.

    Args:
        model: what a MODEL socket carries. It is not changed.
        accuracy: as in :func:`override`.
    """
    model = model.clone()
    options = dict(model.model_options.get("transformer_options", {}))
    options[OPTION] = override(options.get(OPTION), **accuracy)
    model.model_options = {**model.model_options, "transformer_options": options}
    return model


def override(previous: AttentionFunction | None = None, **accuracy: Any) -> AttentionFunction:
    """A function for ``transformer_options["optimized_attention_override"]``.

    Args:
        previous: the override that was there. It is called first, with this one in the place of ComfyUI's function. So
            its changes of arguments count, and this one is not called where ``previous`` computes by itself.
        accuracy: ``scaling``, ``precision``, ``smooth_k``, ``hadamard`` of :func:`fp8cutlass.attention`.

    Raises:
        TypeError: an unknown argument.
    """
    chosen = accuracy_of("override", accuracy)

    def attention_override(func: AttentionFunction, *args: Any, **kwargs: Any) -> torch.Tensor:
        if previous is None:
            return _attend(func, chosen, *args, **kwargs)
        return previous(functools.wraps(func)(functools.partial(_attend, func, chosen)), *args, **kwargs)

    return attention_override


def _attend(
    func: AttentionFunction,
    accuracy: Accuracy,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    **rest: Any,
) -> torch.Tensor:
    """(B, S, heads * D), or (B, H, S, D) with ``skip_reshape``; the result likewise, by ``skip_output_reshape``.

    ``func`` runs what is not served, with all the arguments. ``_inside_attn_wrapper`` among them keeps it from calling
    the override again.
    """
    reason = None
    if rest.get("low_precision_attention") is False or attn_precision == torch.float32:
        reason = Reason.POLICY
    elif any(value is not None for name, value in rest.items() if name not in PASSED_ON):
        reason = Reason.KEYWORD
    query, key, value = q, k, v
    if not skip_reshape and q.dim() == k.dim() == v.dim() == 3 and q.shape[2] % heads == 0:
        width = q.shape[2] // heads
        query, key, value = (x.unflatten(2, (-1, width)) for x in (q, k, v))
    out: torch.Tensor | None = attend(
        DOOR, "", query, key, value,
        attn_mask=mask, scale=scale, enable_gqa=bool(rest.get("enable_gqa")),
        layout="bhsd" if skip_reshape else "bshd", reason=reason, accuracy=accuracy,
    )  # fmt: skip
    if out is None:
        given = {"skip_output_reshape": True, **rest} if skip_output_reshape else rest  # not all versions have it
        given = given if scale is None else {"scale": scale, **given}
        return func(q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape, **given)
    if skip_output_reshape:
        return out if skip_reshape else out.transpose(1, 2)
    return (out.transpose(1, 2) if skip_reshape else out).flatten(2)
