"""What a build says before it compiles, and while it does."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from scripts import cubins

SECONDS_A_KERNEL = 3.0  # of a core; 1.5 to 4 were seen
SECONDS_OF_THE_LIBRARY = 30.0


class Progress:
    """A line for each finished kernel: its name, k/n, the time so far and the time left."""

    def __init__(self, kernels: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """kernels: how many this run will compile. write: takes a line. clock: seconds."""
        self._kernels = kernels
        self._done = 0
        self._write = write
        self._clock = clock
        self._start = clock()

    def done(self, name: str, log: str) -> None:
        """One more is finished, of which the compiler said `log`: its warnings are passed on."""
        self._done += 1
        elapsed = self._clock() - self._start
        left = elapsed / self._done * (self._kernels - self._done)
        more = f", ETA {duration(left)}" if self._done < self._kernels else ""
        self._write(f"[{self._done}/{self._kernels}] {name}  {duration(elapsed)}{more}")
        for line in log.splitlines():
            if re.search(r"\bwarning\b", line) and not line.startswith("ptxas info"):
                self._write(line)


def duration(seconds: float) -> str:
    """Minutes and seconds, as people write them."""
    whole = int(seconds + 0.5)
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def forecast(manifest: Mapping[str, Any], kernels: Mapping[str, Mapping[str, cubins.Job]], jobs: int) -> str:
    """What is about to be compiled and how long that may take; and, of a release, what would be sooner done."""

    def minutes(count: int) -> str:
        return duration(count * SECONDS_A_KERNEL / jobs + SECONDS_OF_THE_LIBRARY)

    count = sum(map(len, kernels.values()))
    text = f"building {count} kernels for {' '.join(manifest['archs'])}, {jobs} at a time: about {minutes(count)}"
    entries = [*manifest["packs"], *manifest["variants"]]
    small = {entry["id"] for entry in entries if entry["profile"] != "release"}
    fewer = sum(name in small for of_target in kernels.values() for name in of_target)
    if manifest["profile"] == "release" and fewer < count / 2:
        text += f". FP8CUTLASS_PROFILE=ci builds {fewer} that serve fewer calls, in about {minutes(fewer)}"
    return text
