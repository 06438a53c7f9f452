"""From which length on adapters' calls pay: SDPA and the adapter at many lengths, as graphs and launched one by one.

As graphs, the card alone takes time. One by one the host takes its share, which decides small calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from ..grid import Settings
from ..report import heading, table
from ..results import OK
from .cases import TRANSFORMERS, Case
from .measure import OURS, SDPA, SERVED, FamilyTime, by_adapter, by_sdpa, make, measure

LENGTHS = (128, 197, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
WIDTH, TOKENS = 2048, 16384  # heads x head_dim; tokens of a large batch
PAYS = 1.02  # times as fast, the least that counts as faster
EAGER_CALLS, EAGER_TURNS = 40, 3


@dataclass(frozen=True)
class Kind:
    """Calls that have a minimum length of their own."""

    head_dim: int
    window: tuple[int, int] = (-1, -1)
    value_dim: int = 0
    padded: bool = False

    @property
    def label(self) -> str:
        values = f"/{self.value_dim}" if self.value_dim else ""
        return f"{self.head_dim}{values}"


CAUSAL, LOCAL = (-1, 0), (255, 0)
KINDS = (
    *(Kind(d, window) for d in (64, 128, 256) for window in ((-1, -1), CAUSAL)),
    *(Kind(192, window, 128) for window in ((-1, -1), CAUSAL)),
    *(Kind(d, window, padded=True) for d in (64, 128, 256) for window in ((-1, -1), CAUSAL)),
    *(Kind(d, LOCAL) for d in (64, 128, 256)),
)
BATCHES = (1, 4, 0)  # 0: of TOKENS


@dataclass(frozen=True)
class LengthTime(FamilyTime):
    """``eager_us``: of a call among many that are launched one after the other."""

    eager_us: float | None = None


def cases(kinds: Sequence[Kind] = KINDS, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Every kind at every length, in batches of 1, of 4 and of TOKENS. Padding needs several sequences."""
    found = []
    for kind in kinds:
        heads = WIDTH // (kind.value_dim or kind.head_dim)
        for n in lengths:
            for batch in BATCHES:
                size = batch or TOKENS // n
                if kind.padded and size < 2:
                    continue
                found.append(
                    Case(kind.label, _size(batch), "", TRANSFORMERS, 1, size, heads, heads, n, n, kind.head_dim,
                         kind.value_dim, kind.window, kind.padded)
                )  # fmt: skip
    return found


def _size(batch: int) -> str:
    return f"batch {batch}" if batch else f"{TOKENS // 1024}k tokens"


def measured(case: Case, device: torch.device, settings: Settings) -> list[LengthTime]:
    """The rows of ``measure``, with eager times."""
    rows = measure(case, device, settings)
    eager: dict[str, float] = {}
    if all(row.status == OK for row in rows):
        with torch.no_grad():
            o = make(case, device)
            ways: dict[str, Callable[[], object]] = {SDPA: lambda: by_sdpa(o), OURS: lambda: by_adapter(o)}
            names = [row.contender for row in rows]
            for _ in range(EAGER_TURNS):
                for name in names:
                    us = _one_by_one(ways[name], device)
                    eager[name] = min(us, eager.get(name, us))
    return [
        LengthTime(**{f.name: getattr(row, f.name) for f in fields(FamilyTime)}, eager_us=eager.get(row.contender))
        for row in rows
    ]


def _one_by_one(launch: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call."""
    calls = EAGER_CALLS if device.type == "cuda" else 1
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    launch()
    wait()
    begun = time.perf_counter()
    for _ in range(calls):
        launch()
    wait()
    return (time.perf_counter() - begun) * 1e6 / calls


Group = tuple[str, str, str]  # head_dim, mask, batch
Speedup = tuple[float, float]  # as graphs, one by one


def speedups(rows: Sequence[LengthTime]) -> dict[Group, dict[int, Speedup]]:
    """By length. A call that the adapter leaves to SDPA is as fast."""
    cells: dict[Group, dict[int, dict[str, LengthTime]]] = {}
    for row in rows:
        group = row.family, row.mask, row.part
        cells.setdefault(group, {}).setdefault(row.rows, {})[row.contender] = row
    found: dict[Group, dict[int, Speedup]] = {}
    for group, lengths in cells.items():
        for n, cell in lengths.items():
            base, ours = cell.get(SDPA), cell.get(OURS)
            if base is not None and base.choice != SERVED:
                found.setdefault(group, {})[n] = 1.0, 1.0
            elif base and ours and base.median_us and ours.median_us and base.eager_us and ours.eager_us:
                pair = base.median_us / ours.median_us, base.eager_us / ours.eager_us
                found.setdefault(group, {})[n] = pair
    return found


def least(by_length: Mapping[int, Speedup]) -> int | None:
    """The length from which on all are faster both ways; None where the longest is not."""
    found = None
    for n in sorted(by_length, reverse=True):
        if min(by_length[n]) < PAYS:
            break
        found = n
    return found


def markdown(stamp: Mapping[str, str], rows: Sequence[LengthTime]) -> str:
    """A line for each kind and batch, a column for each length."""
    lengths = sorted({row.rows for row in rows})
    lines = [
        *heading("The adapters' minimum length", stamp),
        "",
        f"Speedup of the adapter over SDPA by query tokens, whole calls from bf16, heads x head_dim = {WIDTH}: in a",
        "CUDA graph / launched one after the other, where the host takes time too. The last column is the length from",
        f"which on both are at least {PAYS:g}. Head_dim 192/128 is that of keys and of values.",
        "",
    ]
    body = []
    for (width, mask, size), by_length in speedups(rows).items():
        cells = [f"{by_length[n][0]:.2f} / {by_length[n][1]:.2f}" if n in by_length else "" for n in lengths]
        body.append([width, mask, size, *cells, str(least(by_length) or "none")])
    lines += table(["head_dim", "mask", "size", *(f"{n:,}" for n in lengths), "pays from"], body)
    bad = [f"* {row.family}, {row.mask}, {row.part}, {row.rows}: {row.contender} {row.status}: {row.reason}"
           for row in rows if row.reason]  # fmt: skip
    return "\n".join([*lines, *(["", *bad] if bad else [])]) + "\n"
