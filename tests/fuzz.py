"""Random calls of ``attention``, with masks and without, ``attention_varlen`` and ``attention_with_kvcache``, judged; a
failure prints the line that runs it again.

    python -m tests.fuzz --count 200                       # on CPU tensors: the emulator against float64
    python -m tests.fuzz --device cuda --minutes 5 --jobs 8
    python -m tests.fuzz --device cuda --minutes 2 --call kvcache
    python -m tests.fuzz --device cuda --seed 1 --call varlen --case 45  # one case, in full

The exit status is 1 when a case failed or none was judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "python", ROOT / "tests", ROOT / "tests" / "serving"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from fuzz_cases import CELLS, draw  # noqa: E402
from fuzz_check import run_case  # noqa: E402
from fuzz_judge import Verdict  # noqa: E402
from fuzz_masks import draw_masked, run_masked_case  # noqa: E402
from fuzz_paged import draw_paged  # noqa: E402
from fuzz_paged_check import run_paged_case  # noqa: E402
from fuzz_varlen import draw_ragged  # noqa: E402
from fuzz_varlen_check import run_ragged_case  # noqa: E402
from processes import one_of_many  # noqa: E402

from fp8cutlass.call import memo as eager  # noqa: E402
from fp8cutlass.choose.resident import FEWEST_HEADS  # noqa: E402
from fp8cutlass.native import attend  # noqa: E402

ATTENTION, VARLEN, KVCACHE, MASKS = CALLS = ("attention", "varlen", "kvcache", "masks")


def call_of(number: int, only: str | None) -> str:
    """What case ``number`` calls: of four one each, unless ``only`` one of CALLS is wanted."""
    return only or (ATTENTION, KVCACHE, MASKS, VARLEN)[number % 4]


@dataclass
class Session:
    """What became of the cases of one run."""

    device: str
    seed: int
    only: str | None = None  # of CALLS
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, number: int, verdict: Verdict, say: Callable[[str], None]) -> None:
        """Count a verdict; a failure is said at once."""
        self.statuses[verdict.status] += 1
        if verdict.kernel:
            self.kernels[verdict.kernel] += 1
        if verdict.status == "failed":
            text = (
                f"{again(self.device, self.seed, number, self.only)}  # {verdict.kernel}: {'; '.join(verdict.details)}"
            )
            self.failures.append(text)
            say(text)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.statuses[s]} {s}" for s in ("passed", "failed", "unserved"))
        total = sum(self.statuses.values())
        return (
            f"fuzz: seed {self.seed} on {self.device}, {total} cases: {counts}; "
            f"{len(self.kernels)} kernels, {self.seconds:.0f} s"
        )


def again(device: str, seed: int, number: int, only: str | None) -> str:
    """The command that runs a case again."""
    return f"python -m tests.fuzz --device {device} --seed {seed} --call {call_of(number, only)} --case {number}"


# From which sizes on Q is left to the attention kernel, and K and V are handed over to it while it runs. The cases lie
# below what `attention` goes by, so they take turns: as it would, Q left, both.
LIMITS: tuple[dict[str, int], ...] = (
    {},
    {"LEAVE_FROM": 1, "LEAVE_ITEMS": 0, "HAND_OVER_FROM": 1 << 62},
    {"LEAVE_HANDED_FROM": 1, "LEAVE_FROM": 1, "LEAVE_ITEMS": 0, "HAND_OVER_FROM": 0},
)


def drawn(device: str, seed: int, number: int, call: str) -> Any:
    """A case of a call."""
    draws: dict[str, Callable[..., Any]] = {
        ATTENTION: draw, VARLEN: draw_ragged, KVCACHE: draw_paged, MASKS: draw_masked
    }  # fmt: skip
    return draws[call](seed, number, CELLS[device])


def judge_case(device: str, seed: int, number: int, call: str = ATTENTION) -> Verdict:
    """One case, in whatever process this is; one thread, as the tensors are small and threads wait for one another."""
    torch.set_num_threads(1)
    eager.forget()  # calls that went another way
    runs: dict[str, Callable[..., Verdict]] = {
        ATTENTION: run_case, VARLEN: run_ragged_case, KVCACHE: run_paged_case, MASKS: run_masked_case
    }  # fmt: skip
    keeps = {keys: (0, 0.0) for keys in FEWEST_HEADS} if number % 2 else {}  # however few sequences there are
    with torch.no_grad(), patch.dict(vars(attend), LIMITS[number % len(LIMITS)]), patch.dict(FEWEST_HEADS, keeps):
        return runs[call](drawn(device, seed, number, call), device)


def judged(
    device: str, seed: int, numbers: Iterator[int], jobs: int, until: float | None, only: str | None = None
) -> Iterator[tuple[int, Verdict]]:
    """Verdicts as they come, of ``jobs`` processes, or of this one if that is 1. No case is begun after ``until``
    (time.monotonic). Ends after a case that took the device with it."""

    def more() -> Iterator[int]:
        for number in numbers:
            if until is not None and time.monotonic() >= until:
                return
            yield number

    if jobs == 1:
        for number in more():
            verdict = judge_case(device, seed, number, call_of(number, only))
            yield number, verdict
            if verdict.lost:
                return
        return
    waiting = more()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=one_of_many) as pool:
        running: dict[Any, int] = {}
        lost = False
        while True:
            while not lost and len(running) < 2 * jobs and (number := next(waiting, None)) is not None:
                running[pool.submit(judge_case, device, seed, number, call_of(number, only))] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    verdict = future.result()
                except BrokenProcessPool as error:  # one of those that were running, maybe not this one
                    verdict = Verdict(
                        "failed", details=(f"a process died while this one ran or waited: {error}",), lost=True
                    )
                lost = lost or verdict.lost
                yield number, verdict


def fuzz(
    device: str,
    seed: int,
    *,
    first: int = 0,
    cases: int | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    only: str | None = None,
    say: Callable[[str], None] = print,
) -> Session:
    """Run cases ``first`` to ``first + cases``, or until ``minutes`` are over, whichever comes first; of CALLS ``only``
    one, or all in turns."""
    started = time.monotonic()
    session = Session(device, seed, only)
    numbers = count(first) if cases is None else iter(range(first, first + cases))
    until = None if minutes is None else started + 60 * minutes
    for number, verdict in judged(device, seed, numbers, jobs, until, only):
        session.add(number, verdict, say)
    session.seconds = time.monotonic() - started
    return session


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CELLS, default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, help="cases to run (default: 200, or as many as --minutes allow)")
    parser.add_argument("--minutes", type=float, help="begin no case after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--call", choices=CALLS, help="only these calls (default: all in turns)")
    parser.add_argument("--case", type=int, help="run this case alone, of `attention` without --call, and describe it")
    parser.add_argument("--json", type=Path, help="write what became of the cases")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no card")
    if options.case is not None:
        one = (options.device, options.seed, options.case, options.call or ATTENTION)
        verdict = judge_case(*one)
        print(drawn(*one))
        print(f"{verdict.status}: {verdict.kernel} {'; '.join(verdict.details)}")
        return 1 if verdict.status == "failed" else 0
    cases = 200 if options.count is None and options.minutes is None else options.count
    session = fuzz(
        options.device,
        options.seed,
        first=options.first,
        cases=cases,
        minutes=options.minutes,
        jobs=options.jobs,
        only=options.call,
        say=lambda text: print(text, flush=True),
    )
    print(session.summary())
    if options.json is not None:
        options.json.write_text(json.dumps(vars(session), indent=1), encoding="utf-8")
    return 0 if session.statuses["passed"] and not session.failures else 1


if __name__ == "__main__":
    sys.exit(main())
