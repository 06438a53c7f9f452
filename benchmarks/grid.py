"""Runs contenders over shapes: prepare, check, time in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8cutlass.timing import Capture, Timing, capture, interleave

from .data import ERROR_LIMIT, Data, make_data
from .machine import Monitor
from .peers import Contender, Peer, Refused
from .report import brief
from .results import FAILED, OK, UNAVAILABLE, WRONG, Row, Writer, first_line
from .shapes import Shape


@dataclass(frozen=True)
class Settings:
    """How long to measure: microseconds of work in a replay, and replays, of which there are fewer where a single
    launch takes so long that a contender would need more than ``most_us``."""

    target_us: float = 4000.0
    replays: int = 20
    most_us: float = 600_000.0

    def replays_of(self, longest_us: float) -> int:
        """How often to replay contenders of which the slowest takes ``longest_us``; 3 at least, for a median."""
        return min(self.replays, max(3, int(self.most_us / max(longest_us, 1.0))))

    @property
    def quantise(self) -> Settings:
        """Memory-bound and not compared to a percent: less will do."""
        return replace(self, target_us=self.target_us / 4, replays=max(5, self.replays // 2))


QUICK = Settings(target_us=1500.0, replays=10, most_us=200_000.0)


def absent(peers: Iterable[Peer]) -> dict[str, str]:
    """The peers that cannot run here, and why."""
    return {peer.name: reason.splitlines()[0] for peer in peers if (reason := peer.available()) is not None}


def prepare(peers: Iterable[Peer], data: Data) -> tuple[list[Contender], list[Row]]:
    """The contenders that are ready, and a row for each peer that is not."""
    ready: list[Contender] = []
    rows = []
    for peer in peers:
        try:
            ready += peer.prepare(data)
        except Refused as refusal:
            rows.append(Row(data.shape, peer.name, peer.precision, UNAVAILABLE, first_line(refusal)))
        except Exception as error:  # a peer that breaks must not end the run
            rows.append(Row(data.shape, peer.name, peer.precision, FAILED, first_line(error)))
    return ready, rows


def _poison(out: torch.Tensor) -> None:
    """All bits set is NaN in bf16, fp16 and e4m3: what a replay does not write is not taken for a result."""
    out.view(torch.uint8).fill_(0xFF)


def _check(contender: Contender, recorded: Capture, data: Data) -> float:
    """The relative L2 error of what a replay writes."""
    out = recorded.out
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{contender.name} returned {type(out).__name__}, expected its output")
    _poison(out)
    recorded.graph.replay()
    torch.cuda.synchronize()
    return data.error(contender.as_bhsd(out), contender.out_descale)


def _record(contender: Contender, data: Data, settings: Settings) -> tuple[Row, Capture | None]:
    row = Row(data.shape, contender.name, contender.precision, OK, kernel=contender.kernel, chosen=contender.chosen)
    try:
        recorded = capture(contender.launch, settings.target_us)
        error = _check(contender, recorded, data)
    except Exception as failure:  # as in prepare
        return replace(row, status=FAILED, reason=first_line(failure)), None
    row = replace(row, error=error)
    limit = ERROR_LIMIT[contender.precision]
    if error > limit:
        reason = f"relative L2 error {error:.3g}, the limit is {limit:g}"
        return replace(row, status=WRONG, reason=reason), None
    return row, recorded


def _with_quantisation(row: Row, contender: Contender, settings: Settings) -> Row:
    if contender.quantise is None:
        return row
    try:
        recorded = capture(contender.quantise, settings.quantise.target_us)
        (timing,) = interleave([recorded], settings.quantise.replays)
    except Exception as failure:  # as in prepare; the kernel's own time stands
        return replace(row, reason=f"quantisation was not timed: {first_line(failure)}")
    return replace(row, quantise_us=timing.median_us)


def timed(timing: Timing, monitor: Monitor) -> dict[str, Any]:
    """The fields of a row that a timing fills."""
    return {
        "launches": timing.launches,
        "replays": timing.replays,
        "median_us": timing.median_us,
        "min_us": timing.min_us,
        "spread": timing.spread,
        "clock_mhz": monitor.clock_mhz,
        "power_w": monitor.power_w,
    }


def measure(shape: Shape, peers: Sequence[Peer], settings: Settings) -> list[Row]:
    """Rows of one shape. An error of the device itself ends the run: nothing after it can be trusted."""
    gc.collect()  # not during a capture, where a graph that goes may call the driver
    torch.cuda.empty_cache()
    data = make_data(shape)
    ready, rows = prepare(peers, data)
    torch.cuda.synchronize()
    running: list[tuple[Contender, Row, Capture]] = []
    for contender in ready:
        row, recorded = _record(contender, data, settings)
        torch.cuda.synchronize()
        if recorded is None:
            rows.append(row)
        else:
            running.append((contender, row, recorded))
    monitor = Monitor()
    captures = [recorded for _, _, recorded in running]
    replays = settings.replays_of(max((recorded.replay_us for recorded in captures), default=0.0))
    timings = interleave(captures, replays, monitor.sample)
    for (contender, row, _), timing in zip(running, timings, strict=True):
        rows.append(_with_quantisation(replace(row, **timed(timing, monitor)), contender, settings))
    return rows


def run(shapes: Iterable[Shape], peers: Sequence[Peer], settings: Settings) -> Iterator[list[Row]]:
    """The rows of one shape after the other; a peer that cannot run here gives its reason for each."""
    reasons = absent(peers)
    present = [peer for peer in peers if peer.name not in reasons]
    for shape in shapes:
        missing = [
            Row(shape, peer.name, peer.precision, UNAVAILABLE, reasons[peer.name])
            for peer in peers
            if peer.name in reasons
        ]
        yield missing + measure(shape, present, settings)


def record(
    path: Path,
    stamp: Mapping[str, str],
    shapes: Sequence[Shape],
    peers: Sequence[Peer],
    settings: Settings,
    budget: float,
    say: Callable[[str], object],
) -> tuple[list[Row], int]:
    """Measure shapes, writing rows to ``path`` as they come, until ``budget`` seconds have passed; returns the rows,
    and how many shapes are left."""
    begun = time.monotonic()
    rows: list[Row] = []
    left = len(shapes)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = Writer(file, stamp)
        for found in run(shapes, peers, settings):
            writer.write(found)
            rows += found
            left -= 1
            elapsed = time.monotonic() - begun
            say(f"{elapsed:5.0f} s  {brief(found)}")
            if left and elapsed > budget:
                say(f"{elapsed:.0f} s of {budget:g} s are spent: {left} of {len(shapes)} shapes are left out")
                break
    return rows, left
