"""What was found out about single kernels by trying: tuning/kernels.csv, one row a finding.

spills: the register estimate admits it, and the compiler was seen to spill it or to serialise its products.
Accumulators of wgmma are whole blocks of neighbouring registers, and at the limit the blocks leave gaps. The gates find
what is missing here.
spilled: so many registers may go through local memory: a few words of a tile, stored behind the scores and read back
under the products, and of an item.
unrolled: forms of the kernel with an item's tiles unrolled, two or more, by the most keys of each.
plain: forms for calls without LSE, sinks and amax, as a jump past the code of these waits for instructions: those of
`unrolled` by their keys, and 0 one for any number of keys.
prepares: what a tile's softmax needs beside its scores is made ready before they are there.
early: P V of a tile is added to O while the next Q K^T runs, not after it.
middle: tiles in the middle of an item have a loop of their own, which has fewer jumps.
narrows: where rows see few keys of a tile, its softmax is made of these. Beside `prepares`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from codegen.axes import Mask, Out, Schedule, Softmax, Walk
from codegen.variant import Variant, axis_text

PATH = Path(__file__).resolve().parent.parent / "tuning" / "kernels.csv"
FINDINGS = ("spills", "spilled", "unrolled", "plain", "prepares", "early", "middle", "narrows")
_WHERE = ("tile", "softmax", "schedule", "out", "mask", "walk")
_NAMES = {"softmax": Softmax, "schedule": Schedule, "out": Out, "mask": Mask, "walk": Walk}
COLUMNS = ("family", "what", "head_dim", *_WHERE, "value", "evidence")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """where: of each axis the values that it is about, `|` between them and `*` for any text."""

    where: tuple[tuple[str, tuple[str, ...]], ...]
    value: tuple[int, ...]

    def covers(self, v: Variant) -> bool:
        return all(
            any(fnmatchcase(axis_text(getattr(v, axis)), pattern) for pattern in patterns)
            for axis, patterns in self.where
        )


Findings = Mapping[tuple[str, str, int], list[Finding]]  # by family, what was found, head_dim


def read(path: Path) -> Findings:
    """The rows of a file. Raises ValueError for one that cannot be used."""
    found: dict[tuple[str, str, int], list[Finding]] = defaultdict(list)
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path.name}: columns are {rows.fieldnames}, expected {','.join(COLUMNS)}")
        for row in rows:
            line = f"{path.name}, line {rows.line_num}"
            if row["what"] not in FINDINGS or not row["evidence"]:
                raise ValueError(f"{line}: a row says what was found ({', '.join(FINDINGS)}) and where it is shown")
            where = tuple((axis, tuple(row[axis].split("|"))) for axis in _WHERE)
            for axis, patterns in where:
                if axis in _NAMES and (unknown := {*patterns} - {"*", *map(str, _NAMES[axis])}):
                    raise ValueError(f"{line}: {axis} {', '.join(sorted(unknown))} is not known")
            value = tuple(map(int, row["value"].split()))
            found[row["family"], row["what"], int(row["head_dim"])].append(Finding(where=where, value=value))
    return found


@cache
def _findings() -> Findings:
    return read(PATH)


def found(v: Variant, what: str) -> Finding | None:
    """The finding of a kind that a variant has, if any."""
    return next((f for f in _findings().get((v.family, what, v.head_dim), ()) if f.covers(v)), None)


def numbers(v: Variant, what: str) -> tuple[int, ...]:
    """What the finding says; nothing where there is none."""
    finding = found(v, what)
    return finding.value if finding else ()
