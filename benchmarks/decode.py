"""Decode: one to sixteen queries a sequence over a paged cache, its operands, and the rows that are kept.

Bytes are those of K and V that are read. `cold` launches take turns on copies of the cache that together are larger
than any L2 cache; `hot` ones read the same pages every time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from fp8cutlass.timing import Capture

from .grid import Settings
from .results import FAILED, OK, UNAVAILABLE, Timed, first_line
from .steps import PAGE, Step
from .turns import checked, in_turns

COLD_BYTES = 256 << 20  # of the copies that take turns, or of the one that has as many
SMALL_PAGE = 16
DESCALE = 4.0 / 448.0  # of K and V, which are normal numbers
Q_DESCALE = 6.0 / 448.0


@dataclass(frozen=True)
class DecodeData:
    """Random queries in bf16, a cache in bf16 pages, its e4m3 and its descales, by the same page tables: one for each
    copy of the cache."""

    step: Step
    q: torch.Tensor  # (tokens, H, D)
    k: torch.Tensor  # (pages, PAGE, Hkv, D) bf16
    v: torch.Tensor
    k8: torch.Tensor  # float8_e4m3fn
    v8: torch.Tensor
    descale: torch.Tensor  # (1,) of both
    tables: tuple[torch.Tensor, ...]  # (sequences, entries) int32
    small_tables: tuple[torch.Tensor, ...]  # other copies, of pages of SMALL_PAGE tokens of the same bytes
    lengths: torch.Tensor
    cu_q: torch.Tensor

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.step.head_dim)

    def tables_of(self, page: int) -> tuple[torch.Tensor, ...]:
        return self.tables if page == PAGE else self.small_tables

    def error(self, out: torch.Tensor, table: torch.Tensor, page: int = PAGE) -> float:
        """Relative L2 error of (tokens, H, D) on some sequences, against float32 on the bf16 cache. ``table`` numbers
        pages of ``page`` tokens."""
        step, off, size = self.step, 0.0, 0.0
        longest = step.lengths.index(max(step.lengths))
        for s in dict.fromkeys((0, longest, len(step.lengths) - 1)):
            keys, rows = step.lengths[s], slice(s * step.queries, (s + 1) * step.queries)
            at = table[s, : -(-keys // page)].long()
            k, v = (x.view(-1, page, *x.shape[2:])[at].flatten(0, 1)[:keys].float() for x in (self.k, self.v))
            q = self.q[rows].float().unflatten(1, (step.kv_heads, -1))
            scores = torch.einsum("qngd,knd->ngqk", q, k) * self.scale
            own = torch.arange(step.queries, device=k.device)[:, None] + keys - step.queries
            scores = scores.masked_fill(torch.arange(keys, device=k.device) > own, -torch.inf)
            expected = torch.einsum("ngqk,knd->qngd", scores.softmax(-1), v).flatten(1, 2)
            off += float((out[rows].float() - expected).square().sum())
            size += float(expected.square().sum())
        return or_infinite(math.sqrt(off / size))


def or_infinite(error: float) -> float:
    """NaN counts as infinite, so that it fails every limit."""
    return error if error == error else math.inf


def make(step: Step, cold: bool, device: torch.device | str = "cuda", seed: int = 0) -> DecodeData:
    """Draw the operands, standard normal; pages in random order. ``cold``: as many copies as leave the L2 cache."""
    generator = torch.Generator(device).manual_seed(seed)
    copies = -(-COLD_BYTES // step.bytes_of(1)) if cold else 1
    pages = copies * sum(_used(step, PAGE))
    size = (pages, PAGE, step.kv_heads, step.head_dim)
    k, v = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    tables, small = (_draw_tables(step, page, copies, pages * PAGE, generator) for page in (PAGE, SMALL_PAGE))
    descale = torch.full((1,), DESCALE, device=device)
    k8, v8 = (to_fp8(x, DESCALE) for x in (k, v))
    tokens = step.queries * len(step.lengths)
    q = torch.randn(tokens, step.heads, step.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device=device)
    cu_q = torch.arange(0, tokens + 1, step.queries, dtype=torch.int32, device=device)
    return DecodeData(step, q, k, v, k8, v8, descale, tables, small, lengths, cu_q)


def to_fp8(x: torch.Tensor, descale: float) -> torch.Tensor:
    return (x / descale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _used(step: Step, page: int) -> list[int]:
    return [-(-n // page) for n in step.lengths]


def _draw_tables(
    step: Step, page: int, copies: int, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """A table for each copy of the cache; no page is in two."""
    used, device = _used(step, page), generator.device
    order = torch.randperm(tokens // page, generator=generator, device=device).to(torch.int32)
    tables = torch.zeros(copies, len(used), max(used), dtype=torch.int32, device=device)
    pieces = iter(order[: copies * sum(used)].split(used * copies))
    for of_copy in tables:
        for entries, count in zip(of_copy, used, strict=True):
            entries[:count] = next(pieces)
    return tuple(tables)


@dataclass(frozen=True)
class Way:
    """One way to compute a step, or a part of it. ``element``: bytes of an element of the cache that it reads, 0 where
    it does not read it. ``page``: tokens of a page of the tables that it takes. ``out_descale`` multiplies its output.
    ``error``: of what it gives, with a table, where that is not attention.
    """

    name: str
    precision: str
    launch: Callable[[torch.Tensor], torch.Tensor]  # with a page table
    element: int
    page: int = PAGE
    out_descale: float = 1.0
    error: Callable[[torch.Tensor, torch.Tensor], float] | None = None


class Turns:
    """A launch that takes the page tables in turn; ``table`` is the last one's."""

    def __init__(self, way: Way, tables: tuple[torch.Tensor, ...]) -> None:
        self._way, self._tables, self._count = way, tables, 0
        self.table = tables[0]

    def __call__(self) -> torch.Tensor:
        self.table = self._tables[self._count % len(self._tables)]
        self._count += 1
        return self._way.launch(self.table)


class Refused(RuntimeError):
    """A source does not serve a step; the message says why."""


class Source(Protocol):
    """Where ways come from. What it raises is the reason why there are none."""

    def __call__(self, data: DecodeData, /) -> Sequence[Way]: ...


@runtime_checkable
class PagedPeer(Source, Protocol):
    """A source that is another package's. Importing its module needs nothing but torch."""

    name: str

    def available(self) -> str | None:
        """The reason why it cannot run here, or None."""

    def version(self) -> str:
        """What stands in the stamp."""


@dataclass(frozen=True)
class DecodeTime(Timed):
    """What was found of one way on one step; ``tb_s`` is bytes of K and V over time, in 10^12 a second."""

    step: str
    sequences: int
    keys: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    l2: str
    contender: str
    precision: str
    status: str
    reason: str = ""
    tb_s: float | None = None


def row_of(step: Step, l2: str, name: str, precision: str, status: str, reason: str = "", **more: Any) -> DecodeTime:
    sizes = (len(step.lengths), sum(step.lengths), step.queries, step.heads, step.kv_heads, step.head_dim)
    return DecodeTime(step.name, *sizes, l2, name, precision, status, reason, **more)


def _error(data: DecodeData, way: Way, turns: Turns, out: torch.Tensor) -> float:
    if way.error is not None:
        return or_infinite(way.error(out, turns.table))
    return data.error(out.float() * way.out_descale, turns.table, way.page)


def measure(step: Step, cold: bool, sources: Mapping[str, Source], settings: Settings) -> list[DecodeTime]:
    """Rows of one step, taken in turns."""
    gc.collect()  # not during a capture, where a graph that goes may call the driver
    torch.cuda.empty_cache()
    data, l2 = make(step, cold), "cold" if cold else "hot"
    rows: list[DecodeTime] = []
    running: list[tuple[DecodeTime, int, Capture]] = []
    for name, source in sources.items():
        try:
            ways = source(data)
        except (ImportError, OSError, LookupError, RuntimeError, ValueError) as refusal:
            rows.append(row_of(step, l2, name, "", UNAVAILABLE, first_line(refusal)))
            continue
        except Exception as failure:  # a source that breaks must not end the run
            rows.append(row_of(step, l2, name, "", FAILED, first_line(failure)))
            continue
        for way in ways:
            turns, row = Turns(way, data.tables_of(way.page)), row_of(step, l2, way.name, way.precision, OK)
            row, recorded = checked(row, turns, partial(_error, data, way, turns), settings)
            if recorded is None:
                rows.append(row)
            else:
                running.append((row, way.element, recorded))
    for row, element, us in in_turns(running, settings):
        rows.append(replace(row, tb_s=step.bytes_of(element) / us * 1e-6 if element else None))
    return rows
