"""Biases as callers lay them out, for tests of kernels that add one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

Bias = Callable[[int, int], torch.Tensor]  # of so many rows and keys


def normal(deviation: float, *shape: int) -> torch.Tensor:
    return deviation * torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def layouts(heads: int, deviation: float) -> dict[str, Bias]:
    """For a batch of two, normal numbers of this standard deviation."""
    noise = partial(normal, deviation)

    def hiding(rows: int, keys: int) -> torch.Tensor:
        """Single keys, whole rows, and all of a head's first keys are hidden."""
        bias = noise(2, heads, rows, keys)
        bias[:, :, rows // 2] = -torch.inf
        bias[:, 1, :, : keys // 2] = -torch.inf
        bias[bias > 4 / 3 * deviation] = -torch.inf
        return bias

    return {
        "full": lambda rows, keys: noise(2, heads, rows, keys),
        "hiding": hiding,
        "of all batches": lambda rows, keys: noise(1, heads, rows, keys),
        "of all heads": lambda rows, keys: noise(2, 1, rows, keys),
        "of all rows": lambda rows, keys: noise(2, 1, 1, keys),
        "of all keys": lambda rows, keys: noise(2, heads, rows, 1),
        "rows last": lambda rows, keys: noise(2, heads, keys, rows).mT,
        "begins at an odd key": lambda rows, keys: noise(2, heads, rows, keys + 1)[..., 1:],
        "cut from wider rows": lambda rows, keys: noise(2, heads, rows, keys + 8)[..., :keys],
    }


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the same strides and the same place in its storage."""
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).to(dtype)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())
