"""A tiny attention on one device, against float64."""

from __future__ import annotations

import math

SHAPE = (1, 2, 200, 64)  # more than a key block, and no multiple of any tile
# Of the relative L2 error in the default mode from bf16; these values give 0.047, most of it from quantising the
# operands. A wrong tile, mask or layout makes many times that.
LIMIT = 0.08


def error_on(device: str) -> float:
    """The relative L2 error of causal attention of SHAPE on ``device``, "cpu" or "cuda:N"; NaN counts as infinite.

    Raises what attention raises.
    """
    import torch

    from .. import attention
    from ..accuracy.measures import relative_l2
    from ..accuracy.reference import attention64

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for _ in range(3))
    expected = attention64(q, k, v, SHAPE[3] ** -0.5, 0).out
    out = attention(q.to(device), k.to(device), v.to(device), is_causal=True)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"attention returned {type(out).__name__}")
    error = relative_l2(out.cpu(), expected)
    return math.inf if math.isnan(error) else error
