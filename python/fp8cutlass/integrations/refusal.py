"""Why a call of another library's attention cannot be served, by attributes of its operands alone.

Nothing waits for a device, and torch.compile traces it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dtypes import HALF_DTYPES
from ..stats import Reason

WIDEST = 256  # head_dim


class Refusal(NamedTuple):
    """Why a call is not served."""

    reason: Reason
    text: str = ""


def refusal_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Refusal | None:
    """What no kernel takes, whatever the order of heads and tokens; None where there is nothing against the operands.

    How many batches and heads there may be, and how wide values, each adapter says by itself.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return Refusal(Reason.GRAD)
    if q.is_nested or q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
        return Refusal(Reason.LAYOUT)
    device, dtype = q.device, q.dtype
    if device.type not in ("cpu", "cuda") or k.device != device or v.device != device:
        return Refusal(Reason.DEVICE)
    if dtype not in HALF_DTYPES or k.dtype is not dtype or v.dtype is not dtype:
        return Refusal(Reason.DTYPE, f"{dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] > WIDEST:
        return Refusal(Reason.HEAD_DIM, f"{q.shape[-1]}")
    return None
