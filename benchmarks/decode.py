"""Decode: one to sixteen queries a sequence over a paged cache, its contenders, and the rows that are kept.

Ours is ``attention_with_kvcache`` split as a step of a model runs it: the kernel alone, with work that was cut before,
and the kernel with the one that cuts. Bytes are those of K and V that are read. `cold` launches take turns on copies of
the cache that together are larger than any L2 cache; `hot` ones read the same pages every time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8cutlass.choose.target import target
from fp8cutlass.manifest import Decode, load_manifest
from fp8cutlass.native import decode, extension
from fp8cutlass.timing import Capture

from .grid import Settings
from .results import OK, UNAVAILABLE, first_line
from .turns import checked, in_turns

PAGE = 64
COLD_BYTES = 256 << 20  # of the copies that take turns, or of the one that has as many


@dataclass(frozen=True)
class Step:
    """A decode step: sequences of these lengths, ``queries`` each, (tokens, heads, head_dim)."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1

    @property
    def label(self) -> str:
        more = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.name}, {self.heads}/{self.kv_heads} heads x {self.head_dim}{more}"

    def bytes_of(self, element: int) -> int:
        """Of K and V, whose elements have so many bytes."""
        return 2 * element * sum(self.lengths) * self.kv_heads * self.head_dim


def even(batch: int, keys: int) -> Step:
    return Step(f"{batch} x {keys}", (keys,) * batch)


STEPS = (
    *(even(1, n) for n in (1024, 8192, 32768, 131072)),
    even(8, 8192), even(8, 32768), even(16, 16384), even(32, 4096), even(64, 4096), even(128, 2048),
    Step("32 x 128 + 32 x 4096", (128,) * 32 + (4096,) * 32),
    Step("1 x 65536 + 7 x 4096", (65536,) + (4096,) * 7),
    replace(even(32, 4096), queries=4), replace(even(8, 8192), queries=16),
    replace(even(32, 4096), head_dim=64), replace(even(16, 8192), head_dim=256, heads=16, kv_heads=4),
)  # fmt: skip


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
    lengths: torch.Tensor
    cu_q: torch.Tensor

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.step.head_dim)

    def error(self, out: torch.Tensor, table: torch.Tensor) -> float:
        """Relative L2 error of (tokens, H, D) on some sequences, against float32 on the bf16 cache."""
        step, off, size = self.step, 0.0, 0.0
        longest = step.lengths.index(max(step.lengths))
        for s in dict.fromkeys((0, longest, len(step.lengths) - 1)):
            keys, rows = step.lengths[s], slice(s * step.queries, (s + 1) * step.queries)
            at = table[s, : -(-keys // PAGE)].long()
            k, v = (x[at].flatten(0, 1)[:keys].float().repeat_interleave(step.heads // step.kv_heads, 1)
                    for x in (self.k, self.v))  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].float(), k) * self.scale
            own = torch.arange(step.queries, device=k.device)[:, None] + keys - step.queries
            scores = scores.masked_fill(torch.arange(keys, device=k.device) > own, -torch.inf)
            wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            off += float((out[rows].float() - wanted).square().sum())
            size += float(wanted.square().sum())
        error = math.sqrt(off / size)
        return error if error == error else math.inf


def make(step: Step, cold: bool, device: torch.device | str = "cuda", seed: int = 0) -> DecodeData:
    """Draw the operands, standard normal; pages in random order. ``cold``: as many copies as leave the L2 cache."""
    generator = torch.Generator(device).manual_seed(seed)
    used = [-(-n // PAGE) for n in step.lengths]
    copies = -(-COLD_BYTES // step.bytes_of(1)) if cold else 1
    size = (copies * sum(used), PAGE, step.kv_heads, step.head_dim)
    k, v = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(size[0], generator=generator, device=device).to(torch.int32)
    tables = torch.zeros(copies, len(used), max(used), dtype=torch.int32, device=device)
    pieces = iter(order.split(used * copies))
    for of_copy in tables:
        for entries, count in zip(of_copy, used, strict=True):
            entries[:count] = next(pieces)
    descale = torch.full((1,), 4.0 / 448.0, device=device)
    k8, v8 = ((x / descale.to(x.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))
    tokens = step.queries * len(used)
    q = torch.randn(tokens, step.heads, step.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device=device)
    cu_q = torch.arange(0, tokens + 1, step.queries, dtype=torch.int32, device=device)
    return DecodeData(step, q, k, v, k8, v8, descale, tuple(tables), lengths, cu_q)


@dataclass(frozen=True)
class Way:
    """One way to compute a step. ``element``: bytes of an element of its cache."""

    name: str
    precision: str
    launch: Callable[[torch.Tensor], torch.Tensor]  # with a page table
    element: int


class Turns:
    """A launch that takes the page tables in turn; ``table`` is the last one's."""

    def __init__(self, way: Way, tables: tuple[torch.Tensor, ...]) -> None:
        self._way, self._tables, self._count = way, tables, 0
        self.table = tables[0]

    def __call__(self) -> torch.Tensor:
        self.table = self._tables[self._count % len(self._tables)]
        self._count += 1
        return self._way.launch(self.table)


def ours(data: DecodeData) -> list[Way]:
    """The kernel alone, and with the kernel that cuts its work."""
    step, at = data.step, target(data.q.device)
    rows = step.queries * step.heads // step.kv_heads
    return _ways(data, *decode.kernel_for(at.directory, at.arch, step.head_dim, rows), "ours")


def candidates(data: DecodeData) -> list[Way]:
    """Built kernels of other shapes, with as many rows."""
    step, at = data.step, target(data.q.device)
    chosen, _ = decode.kernel_for(at.directory, at.arch, step.head_dim, step.queries * step.heads // step.kv_heads)
    return [
        _ways(data, kernel, number, kernel.id)[0]
        for number, kernel in enumerate(load_manifest(at.directory).decodes)
        if kernel.candidate and (kernel.arch, kernel.head_dim, kernel.rows) == (at.arch, step.head_dim, chosen.rows)
    ]


def _ways(data: DecodeData, kernel: Decode, number: int, name: str) -> list[Way]:
    step, at = data.step, target(data.q.device)
    extension.load()
    caches = decode.Caches(data.k8.view(torch.uint8), data.v8.view(torch.uint8), data.descale, data.descale, None, None)
    sizes: dict[str, Any] = {
        "tokens": data.q.shape[0], "most_keys": data.tables[0].shape[1] * PAGE, "heads": step.heads,
        "kv_heads": step.kv_heads,
    }  # fmt: skip

    def cut() -> decode.Work:
        return decode.cut(kernel, number, at.sm_count, data.lengths, data.cu_q, **sizes, left=-1, right=0, share=True)

    def attend(work: decode.Work, table: torch.Tensor) -> torch.Tensor:
        return decode.attend(work, data.q, caches, table, data.lengths, data.cu_q, scale=data.scale, left=-1, right=0)[
            0
        ]

    work = cut()
    return [
        Way(name, "fp8", lambda table: attend(work, table), 1),
        Way(f"{name} with the cut", "fp8", lambda table: attend(cut(), table), 1),
    ]


def fa3(precision: str) -> Callable[[DecodeData], list[Way]]:
    """FlashAttention-3 over the same pages, in FP8 or bf16, its own choice of splits."""

    def source(data: DecodeData) -> list[Way]:
        import importlib

        attention = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache
        step, fp8 = data.step, precision == "fp8"
        q = data.q.view(len(step.lengths), step.queries, step.heads, step.head_dim)
        caches, more = (data.k, data.v), {}
        if fp8:
            q_descale = torch.full((len(step.lengths), step.kv_heads), 6.0 / 448.0, device=q.device)
            q = (q / q_descale[0, 0].to(q.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn)
            shared = data.descale.expand(len(step.lengths), step.kv_heads)
            caches, more = (data.k8, data.v8), {"q_descale": q_descale, "k_descale": shared, "v_descale": shared}

        def launch(table: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attention(
                q, *caches, cache_seqlens=data.lengths, page_table=table, softmax_scale=data.scale, causal=True,
                **more,
            )  # fmt: skip
            return out.view(data.q.shape)

        return [Way(f"fa3_{precision}", precision, launch, 1 if fp8 else 2)]

    return source


@dataclass(frozen=True)
class DecodeTime:
    """What was found of one way on one step. Times are those of a launch in microseconds; ``tb_s`` is bytes of K and V
    over time, in 10^12 a second."""

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
    launches: int | None = None
    replays: int | None = None
    median_us: float | None = None
    min_us: float | None = None
    spread: float | None = None
    error: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    tb_s: float | None = None


def row_of(step: Step, l2: str, name: str, precision: str, status: str, reason: str = "", **more: Any) -> DecodeTime:
    sizes = (len(step.lengths), sum(step.lengths), step.queries, step.heads, step.kv_heads, step.head_dim)
    return DecodeTime(step.name, *sizes, l2, name, precision, status, reason, **more)


def _error(data: DecodeData, turns: Turns, out: torch.Tensor) -> float:
    return data.error(out, turns.table)


Source = Callable[[DecodeData], list[Way]]  # what it raises is the reason why there are no ways


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
        except (ImportError, LookupError, RuntimeError, ValueError) as refusal:
            rows.append(row_of(step, l2, name, "", UNAVAILABLE, first_line(refusal)))
            continue
        for way in ways:
            turns, row = Turns(way, data.tables), row_of(step, l2, way.name, way.precision, OK)
            row, recorded = checked(row, turns, partial(_error, data, turns), settings)
            if recorded is None:
                rows.append(row)
            else:
                running.append((row, way.element, recorded))
    for row, element, us in in_turns(running, settings):
        rows.append(replace(row, tb_s=step.bytes_of(element) / us * 1e-6))
    return rows
