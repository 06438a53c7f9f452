"""One thread: the tensors of these models are so small that threads only wait for one another.

On a card (``where.py``) tensors are made on it unless they name a device, and adapters leave no call alone for being
short: so the same calls are served as on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from where import DEVICE, ON_CARD

from fp8cutlass.integrations import set_minimum_length

if ON_CARD:  # before the modules with tests are imported, which make tensors too
    torch.set_default_device(DEVICE)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_calls() -> Iterator[None]:
    """Are served, as is the default on the CPU."""
    set_minimum_length(0 if ON_CARD else None)
    yield
    set_minimum_length(None)
