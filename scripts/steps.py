"""Runs targets of the Makefile one after the other, says how long each took, and stops at the first that fails.

python scripts/steps.py lint check
"""

from __future__ import annotations

import subprocess
import sys
import time


def main(steps: list[str]) -> int:
    """The exit status of the last step that ran."""
    took: list[tuple[str, float]] = []
    status = 0
    for step in steps:
        print(f"== {step}", flush=True)
        started = time.monotonic()
        status = subprocess.run(["make", "--no-print-directory", step]).returncode
        took.append((step, time.monotonic() - started))
        if status:
            break
    print(f"== {'failed' if status else 'passed'} in {sum(s for _, s in took) / 60:.1f} min:", end="")
    print(*(f" {step} {seconds:.0f} s" for step, seconds in took), sep=",")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
