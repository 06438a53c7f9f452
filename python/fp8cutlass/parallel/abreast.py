"""Launches beside one another: where the last CTAs of one leave multiprocessors idle, those of another begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch


def abreast(calls: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Make calls whose results go to tensors of the current stream. On a card the last one, which ought to be the
    longest, is launched first, and the others on a second stream. The current stream waits for both."""
    if len(calls) < 2 or device.type != "cuda":
        for call in calls:
            call()
        return
    here, beside = torch.cuda.current_stream(device), _second_stream(device)
    beside.wait_stream(here)
    try:
        calls[-1]()
        with torch.cuda.stream(beside):
            for call in calls[:-1]:
                call()
    finally:  # what a call has launched before it failed reads tensors that are freed after this
        here.wait_stream(beside)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
