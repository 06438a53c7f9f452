"""What was measured: tuning/h200.csv, one row for a kernel and a problem. Where rows exist, they rank before the model.

Rows are of scaling `block`, e4m3 operands and bf16 output, the fastest modes; they speak for every kernel with the same
head_dim, mask, softmax, tile, stages, schedule and cluster, except those of scaling `token`, whose scores cost more.
Kernels are compared on the problems of a cell, so all problems of a class and a load have rows of the same kernels.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from codegen.axes import Change, Kind, Mask, Scaling, Softmax
from codegen.families import FAMILIES
from codegen.keys import LOADS, load_of, seqlen_bucket
from codegen.legal import check
from codegen.matrix import undeclared
from codegen.variant import Variant, parse_id

FAMILY = "sm90a"
PATH = Path(__file__).resolve().parent.parent / "tuning" / "h200.csv"
NEAR = 1  # buckets of seqlen over which a measurement still speaks for a cell


class EvidenceError(ValueError):
    """A row that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """What a kernel was timed on: lengths in tokens, heads of Q and of K and V."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def load(self) -> str:
        return load_of(self.batch * self.heads, self.seqlen_q, FAMILIES[FAMILY].card.sms)

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, {self.heads} heads, {self.kv_heads} of K and V, "
            f"{self.seqlen_q} queries, {self.seqlen_k} keys"
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """us: median of a launch in microseconds; min_us: the shortest. clock_mhz: of the SMs while it was measured.

    others: how many more problems of a cell the times are the geometric means of; the rest is that of `problem`.
    """

    problem: Problem
    us: float
    min_us: float
    card: str
    clock_mhz: int
    toolchain: str
    commit: str
    others: int = 0


Class = tuple[int, bool, Softmax]  # head_dim, causal, softmax
Table = Mapping[Class, Mapping[Problem, Mapping[str, Measurement]]]  # the last key is Variant.shape

_PROBLEM = tuple(f.name for f in fields(Problem))
_KERNEL = ("head_dim", "causal", "softmax", "tile", "stages", "schedule", "cluster")
_RESULT = ("us", "min_us", "card", "clock_mhz", "toolchain", "commit")
COLUMNS = (
    *("head_dim", "seqlen_q", "seqlen_k", "batch", "heads", "kv_heads", "causal", "softmax"),
    *("tile", "stages", "schedule", "cluster", *_RESULT),
)


def _variant(row: dict[str, str]) -> Variant:
    """The declared kernel of a row. Raises ValueError."""
    if row["causal"] not in ("true", "false"):
        raise ValueError(f"causal is {row['causal']!r}, not true or false")
    mask = Mask.of(row["causal"] == "true")
    v = parse_id(
        f"{FAMILY}_{Kind.FWD}_d{row['head_dim']}_{row['tile']}_s{row['stages']}_{Scaling.BLOCK}_{mask}_e4m3_bf16_"
        f"{row['softmax']}_{row['schedule']}_{row['cluster']}"
    )
    if reason := undeclared(v):
        raise ValueError(f"{v.id}: {reason}")
    return v


def _measurement(row: dict[str, str]) -> Measurement:
    """Raises ValueError."""
    problem = Problem(**{name: int(row[name]) for name in _PROBLEM})
    m = Measurement(
        problem=problem,
        us=float(row["us"]),
        min_us=float(row["min_us"]),
        card=row["card"],
        clock_mhz=int(row["clock_mhz"]),
        toolchain=row["toolchain"],
        commit=row["commit"],
    )
    if min(problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k) < 1:
        raise ValueError(f"no problem: {problem}")
    if not 0 < m.min_us <= m.us < float("inf"):
        raise ValueError(f"us {m.us} and min_us {m.min_us} are no median and minimum")
    if not m.card:
        raise ValueError("no card is named")
    return m


def read(path: Path) -> Table:
    """The rows of a file; nothing for one that is not there or empty. Raises EvidenceError for a row that cannot be
    used, names a kernel that is not declared or is there twice, and for one that is missing."""
    table: dict[Class, dict[Problem, dict[str, Measurement]]] = defaultdict(lambda: defaultdict(dict))
    variants: set[Variant] = set()
    if not path.is_file():
        return table
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is not None and tuple(rows.fieldnames) != COLUMNS:
            raise EvidenceError(f"{path.name}: columns are {','.join(rows.fieldnames)}, expected {','.join(COLUMNS)}")
        for row in rows:
            try:
                if None in row or None in row.values():
                    raise ValueError(f"not {len(COLUMNS)} fields")
                v, measured = _variant(row), _measurement(row)
                shapes = table[v.head_dim, v.causal, v.softmax][measured.problem]
                if v.shape in shapes:
                    raise ValueError(f"{v.id} was measured before on {measured.problem}")
            except ValueError as error:
                raise EvidenceError(f"{path.name}, line {rows.line_num}: {error}") from error
            shapes[v.shape] = measured
            variants.add(v)
    _check_holes(path, table, variants)
    return table


def _check_holes(path: Path, table: Table, variants: Iterable[Variant]) -> None:
    """EvidenceError where a kernel has rows for some problems of a class and load, but not for all of them. Kernels
    that a rule has forbidden since they were measured do not compete, and may lack any."""
    legal = {(v.head_dim, v.causal, v.softmax, v.shape) for v in variants if check(v) is None}
    for (head_dim, causal, softmax), problems in table.items():
        for load in LOADS:
            alike = {problem: shapes for problem, shapes in problems.items() if problem.load == load}
            found = {shape for shapes in alike.values() for shape in shapes}
            kernels = sorted(shape for shape in found if (head_dim, causal, softmax, shape) in legal)
            for problem in sorted(alike):
                if missing := [shape for shape in kernels if shape not in alike[problem]]:
                    mask = Mask.of(causal)
                    raise EvidenceError(
                        f"{path.name}: no row of {missing[0]} (head_dim {head_dim}, {mask}, {softmax}) for {problem}, "
                        f"although it was measured on other problems of {load} load: times of kernels are compared on "
                        "the same problems"
                    )


def digest() -> str:
    """What identifies the committed file: its name, rows and the start of its SHA-256."""
    text = PATH.read_bytes() if PATH.is_file() else b""
    rows = max(0, len(text.splitlines()) - 1)
    return f"tuning/{PATH.name}, {rows:,} rows, sha256 {hashlib.sha256(text).hexdigest()[:16]}"


@cache
def evidence() -> Table:
    """What the committed file says."""
    return read(PATH)


@cache
def _rows(of: Class, seqlen: int, load: str) -> Mapping[str, Measurement]:
    """The measurements that speak for a cell: of the problems in it, or in the nearest bucket of seqlen, the longer of
    two."""
    problems = sorted(problem for problem in evidence().get(of, {}) if problem.load == load)
    buckets = {seqlen_bucket(problem.seqlen_k) for problem in problems}
    nearest = min(buckets, key=lambda bucket: (abs(bucket - seqlen), -bucket), default=None)
    if nearest is None or abs(nearest - seqlen) > NEAR:
        return {}
    found = [evidence()[of][problem] for problem in problems if seqlen_bucket(problem.seqlen_k) == nearest]
    everywhere = [shape for shape in found[0] if all(shape in shapes for shapes in found)]
    return {shape: _together([shapes[shape] for shapes in found]) for shape in everywhere}


def _together(measured: Sequence[Measurement]) -> Measurement:
    """One measurement for several problems: kernels rank by it as by the mean of their times over the best ones."""
    first, *others = measured
    if not others:
        return first
    us, min_us = (
        math.exp(math.fsum(math.log(x) for x in times) / len(measured))
        for times in ([m.us for m in measured], [m.min_us for m in measured])
    )
    return replace(first, us=us, min_us=min_us, others=len(others))


def _spoken_for(v: Variant) -> bool:
    """Whether rows may speak for a kernel."""
    others = v.family != FAMILY or v.kind.diagnostic or v.scaling.per_key or v.windowed or v.listed
    return not others and v.change is Change.NONE


def measured(v: Variant, seqlen: int, load: str) -> Measurement | None:
    """What was measured of a kernel for a cell of its class. seqlen: a position among the buckets."""
    return _rows((v.head_dim, v.causal, v.softmax), seqlen, load).get(v.shape) if _spoken_for(v) else None


def measured_of(v: Variant, cells: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Measurement]:
    """The same for those of many cells in which it was measured."""
    if not _spoken_for(v) or (of := (v.head_dim, v.causal, v.softmax)) not in evidence():
        return {}
    found = ((cell, _rows(of, *cell).get(v.shape)) for cell in cells)
    return {cell: m for cell, m in found if m is not None}
