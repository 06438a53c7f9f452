"""One thread: the tensors of these models are so small that threads only wait for one another.

With FP8CUTLASS_TEST_DEVICE=cuda models and tensors are made on the card, and kernels attend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    """Where tensors are made that name no device."""
    device = os.environ.get("FP8CUTLASS_TEST_DEVICE", "")
    torch.set_default_device(device or None)
    yield
    torch.set_default_device(None)
