"""What was measured: tuning/h200.csv, one row for a kernel and a problem. Where rows exist, they rank before the model.

Rows are of scaling `block`, e4m3 operands and bf16 output, the fastest modes; they speak for every kernel with the same
head_dim, mask, softmax, tile, stages, schedule and cluster, except those of scaling `token`, whose scores cost more.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from codegen.arch import CARDS, FAMILIES
from codegen.keys import load_of, seqlen_bucket
from codegen.matrix import undeclared
from codegen.spec import Kind, Scaling, Softmax, Variant, parse_id

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
        return load_of(self.batch * self.heads, self.seqlen_q, CARDS[FAMILIES[FAMILY].model_card].sms)

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, {self.heads} heads, {self.kv_heads} of K and V, "
            f"{self.seqlen_q} queries, {self.seqlen_k} keys"
        )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """us: median of a launch in microseconds; min_us: the shortest. clock_mhz: of the SMs while it was measured."""

    problem: Problem
    us: float
    min_us: float
    card: str
    clock_mhz: int
    toolchain: str
    commit: str


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
    mask = "causal" if row["causal"] == "true" else "full"
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
    """The rows of a file; nothing for one that is not there or empty. Raises EvidenceError."""
    table: dict[Class, dict[Problem, dict[str, Measurement]]] = defaultdict(lambda: defaultdict(dict))
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
    return table


@cache
def evidence() -> Table:
    """What the committed file says."""
    return read(PATH)


@cache
def _rows(of: Class, seqlen: int, load: str) -> Mapping[str, Measurement]:
    """The measurements that speak for a cell: of the problem in it, or nearest to it, with the most rows."""
    near = [
        (abs(seqlen_bucket(problem.seqlen_k) - seqlen), -len(shapes), problem)
        for problem, shapes in evidence().get(of, {}).items()
        if problem.load == load
    ]
    distance, _, problem = min(near, default=(NEAR + 1, 0, None))
    return {} if problem is None or distance > NEAR else evidence()[of][problem]


def measured(v: Variant, seqlen: int, load: str) -> Measurement | None:
    """What was measured of a kernel for a cell of its class. seqlen: a position among the buckets."""
    if v.family != FAMILY or v.kind is not Kind.FWD or v.scaling is Scaling.TOKEN:
        return None
    return _rows((v.head_dim, v.causal, v.softmax), seqlen, load).get(v.shape)
