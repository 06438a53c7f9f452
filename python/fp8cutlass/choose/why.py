"""Why the dispatch table chose a kernel, from ``times.txt``: the time of each kernel that competes, and its source.

Criterion and runner-up are not stored. They follow from the times by the order that the generator ranks kernels by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase

from ..manifest import Manifest, broken, read_blocks
from .problem import Decision
from .table import Cell

NAME = "times.txt"
FORMAT = 1
LEAST_CRITERIA = 5  # those of a single kernel, of evidence, of time measured and modelled, and a last one


@dataclass(frozen=True)
class _Time:
    us: float
    evidence: str

    @property
    def measured(self) -> bool:
        return self.evidence.startswith("measured")


class Times:
    """Microseconds by kernel and cell. Raises ValueError, with what to do about it, for a file that is damaged."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        head, *blocks = read_blocks(self._path, FORMAT)
        lines = [line.split(" ", 1) for line in head]
        self.criteria = [text for word, text in lines if word == "criterion"]
        self._evidence = dict(text.split(" ", 1) for word, text in lines if word == "evidence" and " " in text)
        if len(self.criteria) < LEAST_CRITERIA:
            raise broken(self._path, f"{len(self.criteria)} criteria")
        self._emulated = {text for word, text in lines if word == "emulated"}  # "family arch"
        # Parsed where they are asked for: a call asks for a handful of them.
        self._rows: dict[str, list[str]] = {}
        for block in blocks:
            rows = [line for line in block if line[:1].isdigit()]
            self._rows.update(dict.fromkeys((line for line in block if not line[:1].isdigit()), rows))

    def time(self, kernel: str, cell: Cell) -> _Time:
        try:
            text = self._rows[kernel][cell.seqlen].split(" ")[cell.load]
            number = text.rstrip(ascii_lowercase)
            return _Time(float(number), self._evidence[text[len(number) :]])
        except (KeyError, IndexError, ValueError) as error:
            raise broken(self._path, f"{kernel}: {error}") from error

    def explain(self, cell: Cell, manifest: Manifest) -> Decision:
        """The decision behind a cell: what the chosen kernel takes, what decided, and which one comes next."""
        if cell.variant is None:
            return Decision(variant=None, reason=cell.reason)
        times = {kernel: self.time(kernel, cell) for kernel in cell.rivals}

        def order(kernel: str) -> tuple[object, ...]:
            v, t = manifest.find(kernel), times[kernel]
            return (not t.measured, round(t.us, 3), v.smem_bytes, v.warps, kernel)

        mine, family = times[cell.variant], cell.variant.partition("_")[0]
        emulated = f", emulated on {cell.arch}" if f"{family} {cell.arch}" in self._emulated else ""
        second = min((kernel for kernel in cell.rivals if kernel != cell.variant), key=order, default=None)
        return Decision(
            variant=cell.variant,
            criterion=self._criterion(order(cell.variant), None if second is None else order(second)),
            evidence=mine.evidence + ("" if mine.measured else emulated),
            cost_us=round(mine.us, 2),
            runner_up=second,
            runner_up_cost_us=None if second is None else round(times[second].us, 2),
        )

    def _criterion(self, best: tuple[object, ...], second: tuple[object, ...] | None) -> str:
        """What put one before the other, in the words of the generator."""
        only, not_measured, measured, modelled, *rest = self.criteria
        if second is None:
            return only
        decided = next((i for i, (x, y) in enumerate(zip(best, second, strict=True)) if x != y), len(best) - 1)
        return [not_measured, modelled if best[0] else measured, *rest][decided]


@cache
def load_times(directory: Path) -> Times:
    """Read ``directory/times.txt`` once."""
    return Times(directory)


def explained(cells: Iterator[Cell], manifest: Manifest) -> Iterator[Decision]:
    """The decisions behind cells, each made when it is asked for."""
    return (load_times(manifest.directory).explain(cell, manifest) for cell in cells)
