"""Where the tests of the adapters run: on the CPU, where the emulator attends, or on a card, where kernels do.

    FP8CUTLASS_TEST_DEVICE=cuda python -m pytest tests/integrations

Random numbers come from the CPU's generator in both, so that models and operands are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import reference
import torch
from torch.utils._pytree import tree_map

DEVICE = torch.device(os.environ.get("FP8CUTLASS_TEST_DEVICE") or "cpu")
CPU = torch.device("cpu")
ON_CARD = DEVICE.type != "cpu"
Tree = TypeVar("Tree")


def moved(tree: Tree) -> Tree:
    """The same with its tensors and modules on the device."""

    def move(x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, (torch.Tensor, torch.nn.Module)) else x

    return tree_map(move, tree)


def drawn(make: Callable[[], Tree]) -> Tree:
    """What ``make`` makes, with random numbers of the CPU, on the device."""
    with CPU:
        found = make()
    return moved(found)


def randn(*shape: int, seed: int) -> torch.Tensor:
    """bf16 normal numbers."""
    return reference.randn(*shape, seed=seed, device=DEVICE)


@contextmanager
def no_default() -> Iterator[None]:
    """Without a default device, which is a mode of torch: Dynamo traces less inside of one."""
    torch.set_default_device(None)
    try:
        yield
    finally:
        torch.set_default_device(DEVICE if ON_CARD else None)


def cpu_alone(reason: str) -> pytest.MarkDecorator:
    """A test that has no meaning on a card, and why."""
    return pytest.mark.skipif(ON_CARD, reason=f"not on a card: {reason}")
