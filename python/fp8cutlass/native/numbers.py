"""The first argument of the extension's operators: all numbers of a call in one tensor, as each argument costs the host
0.2 us between Python and the extension."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..errors import UnsupportedError
from .extension import BUILD_HINT


@lru_cache(maxsize=4096)
def _tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def constants(fields: tuple[str, ...], **values: float) -> torch.Tensor:
    """The numbers in the order of ``fields``, those of the built library; UnsupportedError where it wants others."""
    if set(fields) != set(values):
        other = ", ".join(sorted(set(fields) ^ set(values)))
        raise UnsupportedError(
            f"the built library and this package differ in the numbers of a call: {other}", BUILD_HINT
        )
    return _tensor(*(values[name] for name in fields))
