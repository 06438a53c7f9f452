"""CUDA graph timing: many launches to a replay, contenders taking turns."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UPS = 3
MAX_LAUNCHES = 1000


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch over the replays; ``spread`` is (max - min) / median."""

    launches: int
    replays: int
    median_us: float
    min_us: float
    spread: float


def summarise(launches: int, microseconds: Sequence[float]) -> Timing:
    """Reduce the time of one launch in each replay."""
    median = statistics.median(microseconds)
    low, high = min(microseconds), max(microseconds)
    return Timing(launches, len(microseconds), median, low, (high - low) / median)


@dataclass
class Capture:
    """A graph of ``launches`` equal launches; ``out`` is what the last of them writes at each replay, which takes about
    ``replay_us``. ``launch`` keeps the tensors that a replay reads."""

    graph: torch.cuda.CUDAGraph
    launches: int
    out: object
    launch: Callable[[], object]
    replay_us: float = 0.0


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _record(launch: Callable[[], object], launches: int, stream: torch.cuda.Stream) -> Capture:
    graph = torch.cuda.CUDAGraph()
    out: object = None
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(launches):
                out = launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one that explains
                graph.capture_end()
            raise
        graph.capture_end()
    return Capture(graph, launches, out, launch)


def capture(launch: Callable[[], object], target_us: float) -> Capture:
    """Capture as many launches as make a replay of about ``target_us``.

    ``launch`` must work on the current stream, without synchronising. It runs a few times outside the graph first,
    where it may still compile, load and allocate.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            launch()
        one = _elapsed_us(launch)
    launches = 1
    recorded = None
    # The first estimate holds the host's time, which a replay does not: short kernels need a second look.
    for _ in range(2):
        wanted = max(1, min(MAX_LAUNCHES, round(target_us / one)))
        if recorded is not None and wanted < 1.5 * launches:
            break
        launches = wanted
        recorded = _record(launch, launches, stream)
        recorded.graph.replay()
        recorded.replay_us = _elapsed_us(recorded.graph.replay)
        one = recorded.replay_us / launches
    if recorded is None:
        raise RuntimeError("nothing was captured")
    return recorded


def interleave(captures: Sequence[Capture], replays: int, sample: Callable[[], None] | None = None) -> list[Timing]:
    """Time captures in turns, so that clocks and temperature are shared; one Timing for each.

    Turns are shuffled, the same way each time: a card at its power limit lowers and raises its clock in a rhythm of its
    own, and who comes at the same place of each turn may meet the same side of it. Everything is queued before anything
    is waited for. ``sample`` is called meanwhile, to read clocks under load.
    """
    for item in captures:
        item.graph.replay()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in captures]
    shuffled = random.Random(0)
    for _ in range(replays):
        for i in shuffled.sample(range(len(captures)), len(captures)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            captures[i].graph.replay()
            end.record()
            events[i].append((start, end))
    done = torch.cuda.Event()
    done.record()
    while sample is not None and not done.query():
        sample()
        time.sleep(0.005)
    done.synchronize()
    return [
        summarise(item.launches, [start.elapsed_time(end) * 1e3 / item.launches for start, end in pairs])
        for item, pairs in zip(captures, events, strict=True)
    ]
