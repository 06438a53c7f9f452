"""Context parallel attention of diffusers: the sequence is spread over several devices.

``fp8cutlass.parallel`` runs it: keys and values travel packed. What that refuses goes to diffusers' own template, piece
by piece, with bf16 on the wire.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from ...errors import UnsupportedError
from ...stats import count_served
from ..dense import Accuracy, attend, effort

METHODS = ("gather", "ring")  # of what diffusers calls a ring


def spread(
    accuracy: Accuracy,
    door: str,
    method: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    config: Any,
) -> Any:
    """The whole call over all devices: (B, S, H, D) in and out, the LSE (B, S, H). None where ``fp8cutlass.parallel``
    refuses it, on every device alike."""
    from ... import parallel

    context = config.context_parallel_config
    found = {"ring": getattr(context, "_ring_mesh", None), "ulysses": getattr(context, "_ulysses_mesh", None)}
    groups = {name: mesh.get_group() for name, mesh in found.items() if mesh is not None and mesh.size() > 1}
    if not groups or getattr(context, "ulysses_anything", False):  # heads that the devices do not divide
        return None
    way = method if "ring" in groups else "ulysses"
    try:
        result = parallel.attention(
            query, key, value, tuple(groups.values()), method=way, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, layout="bshd", return_lse=return_lse, **accuracy,
        )  # fmt: skip
    except UnsupportedError:
        return None
    count_served(door, "parallel", work=effort(query, key, value, is_causal, "bshd"), at=query)
    return (result[0], result[1].transpose(1, 2)) if return_lse else result


def forward(
    accuracy: Accuracy,
    door: str,
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Any:
    """One piece: (B, S, H, D) in and out; the LSE, which a ring asks for, (B, S, H) float32."""
    result = attend(
        door, "parallel", query, key, value,
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        layout="bshd", return_lse=return_lse, short=True, accuracy=accuracy,
    )  # fmt: skip
    if result is None:
        raise UnsupportedError(f"no FP8 kernel serves this piece of context parallel attention: {tuple(query.shape)}")
    return (result[0], result[1].transpose(1, 2)) if return_lse else result


def backward(ctx: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """There is none; calls that need a gradient are not served before that."""
    raise UnsupportedError("FP8 attention has no backward")


def operators(accuracy: Accuracy, door: str) -> dict[str, Any]:
    """What diffusers' template for context parallel attention takes."""
    return {"forward_op": partial(forward, accuracy, door), "backward_op": backward}
