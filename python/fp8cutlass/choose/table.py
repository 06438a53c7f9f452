"""The dispatch table, read from ``table.txt``: from a problem to a cell, and from a cell to a kernel or a reason.

docs/design/formats.md defines the file. Why a kernel was chosen is in another one: see :mod:`.why`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ..errors import UnsupportedError
from ..manifest import broken, read_blocks
from .problem import Problem

NAME = "table.txt"
FORMAT = 2
CLASS = ("arch", "head_dim", "dtype", "out", "scaling", "causal", "precision")  # axes that choose among which kernels
MASKS = {"full": False, "causal": True}  # what values of `causal` are called in the file
UNBOUNDED = "-"  # the last bucket of keys


@dataclass(frozen=True)
class Cell:
    """One answer of the table: the kernel, or None and the rule that refuses.

    ``rivals`` are all kernels that were compared; ``seqlen`` and ``load`` are positions on their axes.
    """

    arch: str
    seqlen: int
    load: int
    variant: str | None
    rivals: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class _Class:
    """The kernels of a class and, for each bucket of keys, the position of the chosen one for each load."""

    rivals: tuple[str, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    reason: str = ""


class Table:
    """A total function from problems to cells.

    Raises ValueError, with what to do about it, for a directory whose file cannot be read, is damaged, or leaves a cell
    open.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        head, *blocks = read_blocks(path, FORMAT)
        try:
            self.axes: dict[str, list[object]] = {}
            self._read_head(head)
            self._classes: dict[tuple[object, ...], _Class] = {}
            for block in blocks:
                self._read_class(block)
        except (ValueError, KeyError, IndexError) as error:
            raise broken(path, error) from error
        size = 1
        for axis in CLASS:
            size *= len(self.axes[axis])
        if len(self._classes) != size:
            raise broken(path, f"{len(self._classes)} classes, its axes have {size}")

    def _read_head(self, head: list[str]) -> None:
        lines = [line.split(" ") for line in head]
        texts = {words[1]: words[2:] for words in lines if words[0] == "axis"}
        self.axes = {axis: list(texts[axis]) for axis in (*CLASS, "seqlen", "load")}
        self.axes["head_dim"] = [int(text) for text in texts["head_dim"]]
        self.axes["causal"] = [MASKS[text] for text in texts["causal"]]
        self._values = {axis: dict(zip(texts[axis], self.axes[axis], strict=True)) for axis in CLASS}
        if texts["seqlen"].pop() != UNBOUNDED:
            raise ValueError(f"the last bucket of seqlen is not {UNBOUNDED}")
        self._bounds = [int(text) for text in texts["seqlen"]]
        self.axes["seqlen"] = [*self._bounds, None]
        load = dict(pair.split("=") for words in lines if words[0] == "load" for pair in words[1:])
        self._rows, self._most, self._short = int(load.pop("rows")), load.pop("most"), load.pop("short")
        bounds = ((name, part.split("/")) for name, part in load.items())
        self._loads = [(name, int(part), int(whole)) for name, (part, whole) in bounds]
        self._load_position = {str(name): i for i, name in enumerate(self.axes["load"])}

    def _read_class(self, lines: list[str]) -> None:
        word, _, name = lines[0].partition(" ")
        if word != "class":
            raise ValueError(f"{lines[0]!r} names no class")
        body = [line.split(" ", 1) for line in lines[1:]]
        rivals = [(key, text) for key, text in body if len(key) == 1 and key.isalpha()]
        kernels, rest = tuple(kernel for _, kernel in rivals), body[len(rivals) :]
        if rest and rest[0][0] == "none":
            found = _Class(reason=rest[0][1])
        elif rest and rest[0][0] == "as":
            found = _Class(kernels, self._classes[next(self._named(rest[0][1]))].rows)
        else:
            found = _Class(kernels, self._grid(rivals, rest))
        if found.rows and max(map(max, found.rows)) >= len(kernels):
            raise ValueError(f"class {name} chooses more kernels than it has")
        for of in self._named(name):
            self._classes[of] = found

    def _grid(self, rivals: list[tuple[str, str]], rows: list[list[str]]) -> tuple[tuple[int, ...], ...]:
        """Positions of kernels, from rows of letters; without rows, of the only kernel."""
        buckets, loads = [*map(str, self._bounds), UNBOUNDED], len(self.axes["load"])
        if not rows and len(rivals) == 1:
            return ((0,) * loads,) * len(buckets)
        letters = {letter: i for i, (letter, _) in enumerate(rivals)}
        if [bucket for bucket, _ in rows] != buckets or any(len(row) != loads for _, row in rows):
            raise ValueError(f"{rivals} have no {loads} letters for each of {', '.join(buckets)} keys")
        return tuple(tuple(map(letters.__getitem__, row)) for _, row in rows)

    def _named(self, name: str) -> Iterator[tuple[object, ...]]:
        """The classes of a line: lists of values, or * for all."""
        parts = zip(CLASS, name.split(" "), strict=True)
        return product(
            *(
                self.axes[axis] if part == "*" else [self._values[axis][value] for value in part.split(",")]
                for axis, part in parts
            )
        )

    def load_of(self, problem: Problem) -> str:
        """How many query tiles of the lowest height there are for each multiprocessor, as a value of the axis; the last
        one if each is alone in its head."""
        tiles = problem.batch * problem.heads * -(-problem.seqlen_q // self._rows)
        over = sum(tiles * whole > part * problem.sm_count for _, part, whole in self._loads)  # they rise
        if over and problem.seqlen_q <= self._rows:
            return self._short
        return self._loads[over][0] if over < len(self._loads) else self._most

    def cell(self, *, seqlen: int, load: str, **values: object) -> Cell:
        """The cell at one value per axis; ``seqlen`` is a number of keys, not a bucket. UnsupportedError names a value
        that is not on its axis."""
        found = self._classes.get(tuple(values[axis] for axis in CLASS))
        if found is None:
            axis = next(axis for axis in CLASS if values[axis] not in self.axes[axis])
            accepted = ", ".join(map(str, self.axes[axis]))
            raise UnsupportedError(f"{axis}={values[axis]!r} is not in the dispatch table; it has {accepted}")
        bucket, at = bisect_left(self._bounds, seqlen), self._load_position[load]
        variant = found.rivals[found.rows[bucket][at]] if found.rivals else None
        return Cell(str(values["arch"]), bucket, at, variant, found.rivals, found.reason)

    def lookup(self, problem: Problem) -> Cell:
        """The cell of a problem whose head_dim is on the axis; UnsupportedError when a value is not."""
        return self.cell(seqlen=problem.seqlen_k, load=self.load_of(problem), **self._class_of(problem))

    def over_lengths(self, **values: object) -> list[Cell]:
        """Every cell that some length and load can reach, the other axes being fixed."""
        return [
            self.cell(seqlen=seqlen, load=load, **values) for seqlen in self._lengths for load in self._load_position
        ]

    def near(self, problem: Problem) -> Iterator[Cell]:
        """The cells for the same operands, result and mask at every length and load, the nearest first; then those of
        ``accurate``, as keys that were made for f16 scores are in their range too."""
        values = self._class_of(problem)
        here = bisect_left(self._bounds, problem.seqlen_k), self._load_position[self.load_of(problem)]
        away = [
            (abs(i - here[0]), abs(j - here[1]), seqlen, load)
            for (i, seqlen), (load, j) in product(enumerate(self._lengths), self._load_position.items())
        ]
        others = () if problem.precision == "high" else ("accurate",)  # nothing less precise takes its place
        for precision in dict.fromkeys((problem.precision, *others)):
            for _, _, seqlen, load in sorted(away, key=lambda cell: cell[:2]):
                yield self.cell(seqlen=seqlen, load=load, **(values | {"precision": precision}))

    @property
    def kernels(self) -> frozenset[str]:
        """Every kernel that some cell chooses."""
        return frozenset(c.rivals[at] for c in self._classes.values() for row in c.rows for at in row)

    @property
    def _lengths(self) -> tuple[int, ...]:
        """A number of keys of each bucket."""
        return (*self._bounds, max(self._bounds, default=0) + 1)

    @staticmethod
    def _class_of(problem: Problem) -> dict[str, object]:
        return {axis: getattr(problem, axis) for axis in CLASS}
