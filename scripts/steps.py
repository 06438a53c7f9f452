"""Runs targets of the Makefile one after the other, says how long each took, and stops at the first that fails.

python scripts/steps.py lint+check compile

Targets joined by a plus run side by side, where each would keep one core busy: their output is shown when they end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def run(step: str) -> dict[str, tuple[int, float, str]]:
    """Exit status, seconds and output of each target of a step. The output of a target on its own is shown at once."""
    targets = step.split("+")
    pipe = None if len(targets) == 1 else subprocess.PIPE
    started = time.monotonic()

    def make(target: str) -> tuple[int, float, str]:
        command = ["make", "--no-print-directory", target]
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT if pipe else None, text=True)
        return ran.returncode, time.monotonic() - started, ran.stdout or ""

    with ThreadPoolExecutor(len(targets)) as pool:
        return dict(zip(targets, pool.map(make, targets), strict=True))


def main(steps: list[str]) -> int:
    """The exit status of the first target that failed, or 0."""
    began = time.monotonic()
    took: list[tuple[str, float]] = []
    status = 0
    for step in steps:
        print(f"== {step}", flush=True)
        for target, (returned, seconds, output) in run(step).items():
            sys.stdout.write(output)
            took.append((target, seconds))
            status = status or returned
        if status:
            break
    print(f"== {'failed' if status else 'passed'} in {(time.monotonic() - began) / 60:.1f} min:", end="")
    print(*(f" {target} {seconds:.0f} s" for target, seconds in took), sep=",")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
