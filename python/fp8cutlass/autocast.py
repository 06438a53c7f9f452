"""What autocast makes of the operands of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .dtypes import HALF_DTYPES

FLOATS = (*HALF_DTYPES, torch.float32)  # what is cast


def under_autocast(operands: Sequence[Any], *, as_torch: bool = False) -> Sequence[Any]:
    """The operands as autocast makes them for torch's attention; the same object where nothing is cast.

    Operands of one 16-bit dtype stay as they are, though, unless ``as_torch``: what takes the place of torch's
    attention has to give its dtype. Where an operand is FP8, float64 or an integer none is cast, and a check says why.
    What is no tensor stays.
    """
    given = [x for x in operands if isinstance(x, torch.Tensor)]
    device = given[0].device.type if given else ""
    if not is_on(device):
        return operands
    dtype, kinds = torch.get_autocast_dtype(device), {x.dtype for x in given}
    stays = {dtype} if as_torch else set(HALF_DTYPES)
    if not kinds <= set(FLOATS) or (len(kinds) == 1 and kinds <= stays):
        return operands
    return [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in operands]


def is_on(device: str) -> bool:
    """Whether autocast changes what runs on such a device."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
