"""Sinks: logits without a value, one a head, which join the sum of a row's exponentials once.

Kernels add them to the sum that O is divided by. Their LSE is that of the keys; it gets the sinks here.
"""

from __future__ import annotations

import torch


def join_lse(lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Turn the LSE of the keys, (..., H, S) float32, into that of keys and sinks (H,) float32, in place. A row without
    keys stays -inf."""
    lse.copy_(torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks[:, None])))
