"""What ``attention`` returns of its outputs."""

from __future__ import annotations

import torch

from ..call.call import Outputs


def deliver(outputs: Outputs, layout: str, out: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What was asked for, the result in the layout of query."""
    result, lse, amax = outputs
    if layout == "bshd":
        result = result.transpose(1, 2)
    if out is not None:
        result = out.copy_(result)
    if lse is not None:
        return (result, lse) if amax is None else (result, lse, amax)
    return result if amax is None else (result, amax)
