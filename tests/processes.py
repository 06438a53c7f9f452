"""What a test process does that shares the machine with others of its kind."""

from __future__ import annotations

import os

import torch


def one_of_many() -> None:
    """One thread, as the processes fill the cores, and no files of compiled torch kernels. torch compiles a few
    operations at their first use, `exp2` on a card among them, and keeps them in a folder that all processes read;
    one that reads too early gets a RuntimeError (pytorch issues 132756 and 156010). Before torch's first use."""
    torch.set_num_threads(1)
    os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
