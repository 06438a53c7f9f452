"""Launches beside one another: where the last CTAs of one leave multiprocessors idle, those of another begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

Results = list[torch.Tensor]


def abreast(calls: Sequence[Callable[[], Results]], device: torch.device) -> list[Results]:
    """What calls return, in their order. On a card the last one, which ought to be the longest, is launched first, and
    the others on a second stream. The current stream waits for both."""
    if len(calls) < 2 or device.type != "cuda":
        return [call() for call in calls]
    here, beside = torch.cuda.current_stream(device), _second_stream(device)
    beside.wait_stream(here)
    try:
        last = calls[-1]()
        with torch.cuda.stream(beside):
            others = [call() for call in calls[:-1]]
    finally:  # what a call has launched before it failed reads tensors that are freed after this
        here.wait_stream(beside)
    for x in (x for result in others for x in result):
        x.record_stream(here)
    return [*others, last]


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
