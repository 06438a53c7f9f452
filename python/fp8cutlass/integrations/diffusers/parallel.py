"""Context parallel attention of diffusers: the sequence is spread over several devices."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from ...errors import UnsupportedError
from ..dense import Accuracy, attend


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
