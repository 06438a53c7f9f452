"""``fp8cutlass.tune``: times every built kernel that serves a call, on the card that is there, and keeps the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..call import memo
from ..call.call import Call, Tensors
from ..call.plan import problem_of
from ..call.request import TENSORS, Request, request_of
from ..call.settle import settle
from ..call.supports import forget as forget_answers
from ..choose import dispatch, tuned
from ..choose.dispatch import decide, serving
from ..choose.problem import Problem
from ..choose.target import target
from ..dtypes import operand_name
from ..errors import UnsupportedError
from ..manifest import load_manifest
from ..timing import Timing, capture, interleave
from .attention import attention

TARGET_US = 2000.0  # of work in a replay
REPLAYS = 15
WORTH = 1.01  # another kernel must beat the table's by this, or the difference was noise
# Two right results differ by their roundings: each lies 5 to 6% from exact attention on random data, of which most is
# quantisation that they share. A wrong tile, descale or mask makes far more.
LIMIT = 0.10

Timer = Callable[[Sequence[Callable[[], object]]], list[Timing]]


@dataclass(frozen=True)
class Candidate:
    """A kernel that was tried: the time of a whole call, and the relative L2 of its result from that of the table's
    choice. Without a time, ``refused`` says why."""

    kernel: str
    timing: Timing | None = None
    difference: float = 0.0
    refused: str = ""

    @property
    def us(self) -> float:
        return math.inf if self.timing is None else self.timing.median_us


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` found: ``candidates`` by time, the refused ones last. ``path`` is None where nothing was
    stored."""

    problem: Problem
    default: str
    kernel: str
    candidates: tuple[Candidate, ...]
    path: Path | None

    def __str__(self) -> str:
        width = max(len(candidate.kernel) for candidate in self.candidates)
        lines = [f"{self.problem}, on {self.problem.card}"]
        for candidate in self.candidates:
            marks = [
                "chosen" if candidate.kernel == self.kernel else "",
                "by the table" if candidate.kernel == self.default else "",
            ]
            if candidate.timing is None:
                text = f"refused: {candidate.refused}"
            else:
                text = f"{candidate.us:9.2f} us +- {50 * candidate.timing.spread:.1f}%  {' '.join(filter(None, marks))}"
            lines.append(f"  {candidate.kernel:{width}} {text}".rstrip())
        return "\n".join([*lines, f"stored in {self.path}" if self.path else "not stored"])


def graph_timer(calls: Sequence[Callable[[], object]]) -> list[Timing]:
    """The time of each call in a CUDA graph, in turns."""
    return interleave([capture(call, TARGET_US) for call in calls], REPLAYS)


def tune(*args: Any, save: bool = True, **kwargs: Any) -> Tuning:
    """Find the fastest built kernel for ``attention(*args, **kwargs)`` on this card, and let calls like it use it.

    The tensors' sizes, types and device, and the options that the choice of a kernel depends on, are the problem;
    values hardly matter to the time. Each kernel that serves it runs as a whole call, quantisation included, is held to
    the result of the table's choice, and is timed in a CUDA graph. One that is 1% faster than the table's choice
    takes its place. With ``save`` the result goes to a file of yours (``fp8cutlass.tuned``; ``FP8CUTLASS_TUNED`` moves
    it or switches it off) that later calls of this and other processes go by; ``explain`` then says so. Graphs that
    were captured before keep their kernel. Takes about a second, longer for long problems.

    Raises:
        UnsupportedError: what ``attention`` would raise; ``kernel`` is given; the tensors are not on a card.
        ValueError: before anything is measured, where the file is of another kind.
        OSError: the file cannot be read, or after measuring, written.
    """
    request = request_of(*args, **kwargs)
    if request.options.kernel is not None:
        raise UnsupportedError(f"tune compares kernels, and kernel={request.options.kernel!r} pins one: leave it out")
    call, tensors = settle(request)
    q = tensors.q
    if call.kind == "packed":
        raise UnsupportedError("tune takes tensors: a PackedKV was made for certain kernels already")
    if call.mask == "window":
        raise UnsupportedError("tune compares kernels, and windows have one for each class: leave window_size out")
    if call.masked or call.biased:
        raise UnsupportedError("tune compares kernels, and masks have one for each class: leave attn_mask out")
    if call.softcap:
        raise UnsupportedError("tune compares kernels, and caps have one for each class: leave softcap out")
    if not q.is_cuda:
        raise UnsupportedError(
            f"tune times kernels on a card, and query is on {q.device}, where the emulator runs: pass CUDA tensors"
        )
    if tensors.empty:
        raise UnsupportedError("tune needs queries and keys: an empty problem launches no kernel")
    with torch.cuda.device(q.device):  # streams and events are the current card's
        return _search(request, call, tensors, graph_timer, save)


def _search(request: Request, call: Call, tensors: Tensors, timer: Timer, save: bool) -> Tuning:
    path = tuned.location() if save else None
    if path is not None:
        tuned.read(path)  # `store` keeps its rows, and would find out too late that it cannot
    q, k = tensors.q, tensors.k
    at = target(q.device)
    problem = problem_of(call, at, q.device, q.shape, k.shape, operand_name(q.dtype, call.precision))
    manifest = load_manifest(at.directory)
    default = decide(at.directory, replace(problem, card=""))[0].id  # what the table says, whatever was measured
    rivals = [v.id for v in serving(manifest, problem, default) if v.id != default]
    found = _measure(request, [default, *rivals], timer)
    best = found[0]
    us = next(candidate for candidate in found if candidate.kernel == default)
    if us.timing is None:
        raise UnsupportedError(f"the table's kernel {default} cannot be timed: {us.refused}")
    if us.us < WORTH * best.us:
        best = us
    if path is not None:
        tuned.store(path, [_row(manifest.directory, problem, found, best, us)])
        dispatch.forget()
        memo.forget()
        forget_answers()
    return Tuning(problem, default, best.kernel, tuple(found), path)


def _measure(request: Request, kernels: Sequence[str], timer: Timer) -> list[Candidate]:
    """Every kernel by time; the first is the one whose result the others are held to."""

    def run(kernel: str) -> torch.Tensor:
        tensors = {name: getattr(request, name) for name in TENSORS if name != "out"}
        options = request.options._replace(kernel=kernel, fallback="error")
        result = attention(**tensors, **options._asdict())
        return result if isinstance(result, torch.Tensor) else result[0]

    right: list[Candidate] = []
    refused: list[Candidate] = []
    expected = run(kernels[0]).float()
    norm = float(expected.norm())
    for kernel in kernels:
        try:
            off = float((run(kernel).float() - expected).norm()) / norm if norm else 0.0
        except (RuntimeError, UnsupportedError) as error:
            refused.append(Candidate(kernel, refused=str(error).splitlines()[0]))
            continue
        if off <= LIMIT:  # not of NaN
            right.append(Candidate(kernel, difference=off))
        else:
            refused.append(Candidate(kernel, refused=f"relative L2 {off:.3g} from the table's choice, over {LIMIT:g}"))
    timings = timer([lambda kernel=c.kernel: run(kernel) for c in right])  # type: ignore[misc]
    timed = [replace(candidate, timing=timing) for candidate, timing in zip(right, timings, strict=True)]
    return sorted(timed, key=lambda candidate: (candidate.us, candidate.kernel)) + refused


def _row(
    directory: Path, problem: Problem, found: Sequence[Candidate], best: Candidate, default: Candidate
) -> tuned.Row:
    others = [candidate for candidate in found if candidate.timing is not None and candidate.kernel != best.kernel]
    return tuned.Row(
        build=tuned.build_id(directory),
        problem=vars(problem),
        kernel=best.kernel,
        us=best.us,
        spread=0.0 if best.timing is None else best.timing.spread,
        default=default.kernel,
        default_us=default.us,
        runner_up=others[0].kernel if others else None,
        runner_up_us=others[0].us if others else None,
        kernels=len(others) + 1,
        versions=f"fp8cutlass {__version__}, torch {torch.__version__}",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
