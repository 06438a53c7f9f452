"""The environment variable ``FP8CUTLASS_CHECK``: ``1`` has calls look at the numbers that only the card knows.

These are page numbers, lengths, ends of sequences and slots. Elsewhere the kernels clamp or ignore what is out of
range. With ``1`` it is refused by name, as on the CPU, and each such call waits for the card. Calls that are captured
in a CUDA graph or traced by torch.compile look at nothing. The variable is read in each call.
"""

from __future__ import annotations

import os

import torch
from torch._subclasses.fake_tensor import FakeTensor

VARIABLE = "FP8CUTLASS_CHECK"
OFF = ("", "0")


def checked() -> bool:
    """Whether calls on a card are to be checked."""
    return os.environ.get(VARIABLE, "") not in OFF


def looks_at(x: torch.Tensor) -> bool:
    """Whether a call looks at the values of a tensor: on the CPU, where nobody waits, or where that is wanted."""
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return x.device.type == "cpu" or (checked() and waits_for(x))


def waits_for(x: torch.Tensor) -> bool:
    """Whether the host may wait for a tensor's values."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()
