"""Contenders that take turns: each is recorded and checked, then all are timed, and rows are kept as they come."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from fp8cutlass.timing import Capture, capture, interleave

from .data import ERROR_LIMIT
from .grid import Settings, timed
from .machine import Monitor
from .results import FAILED, WRONG, first_line, write_records

HOST_REPLAYS = 2

Row = TypeVar("Row", bound=Any)  # a dataclass with the fields of a contender, a status and a timing
Problem = TypeVar("Problem")
Other = TypeVar("Other")


def judged(row: Row, error: float, limits: Mapping[str, float] = ERROR_LIMIT) -> tuple[Row, bool]:
    """The row with its error, and whether that is within the limit of its precision."""
    limit = limits[row.precision]
    if error > limit:
        reason = f"relative L2 error {error:.3g}, the limit is {limit:g}"
        return replace(row, status=WRONG, reason=reason, error=error), False
    return replace(row, error=error), True


def checked(
    row: Row,
    launch: Callable[[], torch.Tensor],
    error_of: Callable[[torch.Tensor], float],
    settings: Settings,
    limits: Mapping[str, float] = ERROR_LIMIT,
) -> tuple[Row, Capture | None]:
    """Record a contender and compare what a replay writes; no capture where it fails or is wrong."""
    try:
        recorded = capture(launch, settings.target_us)
        if not isinstance(recorded.out, torch.Tensor):
            raise TypeError(f"{row.contender} returned {type(recorded.out).__name__}, expected its output")
        recorded.out.view(torch.uint8).fill_(0xFF)  # NaN: what a replay does not write is no result
        recorded.graph.replay()
        torch.cuda.synchronize()
        error = error_of(recorded.out)
    except Exception as failure:  # a contender that breaks must not end the run
        return replace(row, status=FAILED, reason=first_line(failure)), None
    row, good = judged(row, error, limits)
    return row, recorded if good else None


def on_host(
    row: Row,
    launch: Callable[[], torch.Tensor],
    error_of: Callable[[torch.Tensor], float],
    limits: Mapping[str, float] = ERROR_LIMIT,
) -> Row:
    """The row of a contender on the CPU, with its error and the time that the CPU takes. That shows that a command
    works, and nothing about speed."""
    row, good = judged(row, error_of(launch()), limits)
    if not good:
        return row
    times = []
    for _ in range(HOST_REPLAYS):
        begun = time.perf_counter()
        launch()
        times.append((time.perf_counter() - begun) * 1e6)
    median, least = statistics.median(times), min(times)
    spread = (max(times) - least) / median
    return replace(row, launches=1, replays=len(times), median_us=median, min_us=least, spread=spread)


def in_turns(running: Sequence[tuple[Row, Other, Capture]], settings: Settings) -> Iterator[tuple[Row, Other, float]]:
    """Each row with its times, what stood beside it, and the microseconds of a launch."""
    monitor = Monitor()
    captures = [recorded for _, _, recorded in running]
    replays = settings.replays_of(max((recorded.replay_us for recorded in captures), default=0.0))
    for (row, other, _), timing in zip(running, interleave(captures, replays, monitor.sample), strict=True):
        yield replace(row, **timed(timing, monitor)), other, timing.median_us


Launch = Callable[[], torch.Tensor]
ErrorOf = Callable[[torch.Tensor], float]


def all_timed(
    contenders: Sequence[tuple[Row, Launch, ErrorOf]],
    device: torch.device,
    settings: Settings,
    limits: Mapping[str, float] = ERROR_LIMIT,
) -> list[Row]:
    """The rows of all, those without a time first: on a card as graphs that take turns, on the CPU one by one."""
    if device.type != "cuda":
        return [on_host(row, launch, error_of, limits) for row, launch, error_of in contenders]
    rows: list[Row] = []
    running: list[tuple[Row, None, Capture]] = []
    for row, launch, error_of in contenders:
        row, recorded = checked(row, launch, error_of, settings, limits)
        if recorded is None:
            rows.append(row)
        else:
            running.append((row, None, recorded))
    return rows + [row for row, _, _ in in_turns(running, settings)] if running else rows


def record(
    path: Path,
    stamp: Mapping[str, str],
    kind: type[Row],
    problems: Sequence[Problem],
    measured: Callable[[Problem], list[Row]],
    label: Callable[[Problem], str],
    what: str,
    budget: float,
    say: Callable[[str], object],
) -> tuple[list[Row], int]:
    """Measure problems, ``what`` in the plural, until ``budget`` seconds have passed, writing the rows so far after
    each; returns the rows, and how many problems are left."""
    begun = time.monotonic()
    rows: list[Row] = []
    left = len(problems)
    for problem in problems:
        found = measured(problem)
        rows += found
        left -= 1
        with path.open("w", encoding="utf-8", newline="") as file:
            write_records(file, stamp, kind, rows)
        elapsed = time.monotonic() - begun
        shown = (f"{r.contender} {r.status if r.median_us is None else f'{r.median_us:.1f}'}" for r in found)
        say(f"{elapsed:5.0f} s  {label(problem)}, us: {', '.join(shown)}")
        if left and elapsed > budget:
            say(f"{elapsed:.0f} s of {budget:g} s are spent: {left} of {len(problems)} {what} are left out")
            break
    return rows, left
