"""Ragged batches and windows: what is timed, how it is checked, and the rows that are kept.

Ours is the kernel with its plan, operands ready, as `grid` times dense ones, and the whole of ``attention_varlen`` from
bf16. Useful operations count the keys that a mask leaves.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fp8cutlass.timing import Capture

from . import turns
from .grid import Settings
from .results import OK, UNAVAILABLE, Timed, columns, first_line
from .turns import checked, in_turns

SAMPLED_ROWS = 64  # of the first and the last head of three sequences


@dataclass(frozen=True)
class Mix:
    """Self-attention of sequences of these lengths, (tokens, heads, head_dim); ``left`` keys before a row's own are
    seen, -1 for all."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    left: int = -1

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def mask(self) -> str:
        return f"window {self.left + 1}" if self.left >= 0 else "causal" if self.causal else "full"

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.name}, {heads} heads x {self.head_dim}, {self.mask}"

    @property
    def flops(self) -> float:
        """Useful operations: 4 H D for each pair of a row and a key that it sees; half of all pairs when causal."""
        pairs = 0.0
        for n in self.lengths:
            within = min(self.left + 1, n) if self.left >= 0 else n
            pairs += n * within - within * within / 2 if self.causal else n * n
        return 4.0 * self.heads * self.head_dim * pairs


def cells(mix: Mix, tile_m: int, tile_n: int) -> int:
    """Pairs of a row and a key in the tiles that a kernel visits, of one head; by plain arithmetic."""
    found = 0
    for n in mix.lengths:
        for row in range(0, n, tile_m):
            end = -(-(min(row + tile_m, n) if mix.causal else n) // tile_n)
            begin = max(0, row - mix.left) // tile_n if mix.left >= 0 else 0
            found += (end - begin) * tile_m * tile_n
    return found


def lognormal(count: int, longest: int, seed: int = 1) -> tuple[int, ...]:
    """Lengths of a log-normal law around 665 tokens, cut at ``longest``."""
    drawn = random.Random(seed)
    return tuple(min(longest, max(1, round(drawn.lognormvariate(6.5, 1.3)))) for _ in range(count))


def between(count: int, least: int, most: int, seed: int = 1) -> tuple[int, ...]:
    """Lengths that are equally likely in a range."""
    drawn = random.Random(seed)
    return tuple(drawn.randint(least, most) for _ in range(count))


EQUAL = "8 x 4096"
LENGTHS = {
    EQUAL: (4096,) * 8,
    "log-normal to 8k": lognormal(64, 8192),
    "64 x 77..1024": between(64, 77, 1024),
    "images 128 x 256..1024": between(128, 256, 1024),
    "256 x 64..512": between(256, 64, 512),
    "texts 512 x 16..128": between(512, 16, 128),
}
HEADS = {64: (16, 16), 128: (32, 8), 256: (16, 4)}  # of unequal lengths; equal ones have 2048 / head_dim
WIDTH = 2048


def mixes(head_dims: Iterable[int] = ()) -> list[Mix]:
    """Every batch of every head_dim, or of these, with and without a causal mask."""
    wanted = list(head_dims) or list(HEADS)
    found = []
    for head_dim in wanted:
        for name, lengths in LENGTHS.items():
            heads = (WIDTH // head_dim,) * 2 if name == EQUAL else HEADS[head_dim]
            found += [Mix(name, lengths, *heads, head_dim, causal) for causal in (False, True)]
    return found


@dataclass(frozen=True)
class RaggedData:
    """Random bf16 ``q`` (tokens, H, D), ``k`` and ``v`` (tokens, Hkv, D), and where sequences begin and end."""

    mix: Mix
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor  # (sequences + 1,) int32

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.mix.head_dim)

    def error(self, out: torch.Tensor) -> float:
        """Relative L2 error of an output (tokens, H, D) on some rows, against float32; NaN counts as infinite."""
        mix, ends = self.mix, list(accumulate(self.mix.lengths, initial=0))
        longest = mix.lengths.index(max(mix.lengths))
        off, size = 0.0, 0.0
        for s in dict.fromkeys((0, longest, len(mix.lengths) - 1)):
            n, part = mix.lengths[s], slice(ends[s], ends[s + 1])
            rows = torch.linspace(0, n - 1, min(SAMPLED_ROWS, n), device=out.device).round().long()
            key = torch.arange(n, device=out.device)
            for head in dict.fromkeys((0, mix.heads - 1)):
                kv_head = head // (mix.heads // mix.kv_heads)
                scores = self.q[part, head][rows].float() @ self.k[part, kv_head].float().T * self.scale
                if mix.causal:
                    scores = scores.masked_fill(key > rows[:, None], -torch.inf)
                if mix.left >= 0:
                    scores = scores.masked_fill(key < rows[:, None] - mix.left, -torch.inf)
                wanted = scores.softmax(-1) @ self.v[part, kv_head].float()
                off += float((out[part, head][rows].float() - wanted).square().sum())
                size += float(wanted.square().sum())
        error = math.sqrt(off / size)
        return error if error == error else math.inf


def make_ragged(mix: Mix, device: torch.device | str = "cuda", seed: int = 0) -> RaggedData:
    """Draw the operands of a batch, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        size = (mix.tokens, heads, mix.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    cu = torch.tensor([0, *accumulate(mix.lengths)], dtype=torch.int32, device=device)
    return RaggedData(mix, draw(mix.heads), draw(mix.kv_heads), draw(mix.kv_heads), cu)


@dataclass(frozen=True)
class Way:
    """One way to compute a batch. ``launch`` returns its output, (tokens, H, D) once ``ragged`` has seen it;
    ``cells`` are the pairs of rows and keys in the tiles that it visits, of a kernel of ours."""

    name: str
    precision: str
    mix: Mix
    launch: Callable[[], torch.Tensor]
    ragged: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    kernel: str = ""
    cells: int | None = None


@dataclass(frozen=True)
class WalkTime(Timed):
    """What was found of one contender on one batch; ``error`` is that against float32."""

    mix: str
    sequences: int
    tokens: int
    longest: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    contender: str
    precision: str
    status: str
    reason: str = ""
    kernel: str = ""
    cells: int | None = None
    tflops: float | None = None


def row_of(mix: Mix, name: str, precision: str, status: str, reason: str = "", **more: Any) -> WalkTime:
    where = (mix.name, len(mix.lengths), mix.tokens, max(mix.lengths), mix.heads, mix.kv_heads, mix.head_dim, mix.mask)
    return WalkTime(*where, name, precision, status, reason, **more)


def _record(way: Way, data: RaggedData, settings: Settings) -> tuple[WalkTime, Capture | None]:
    row = row_of(way.mix, way.name, way.precision, OK, kernel=way.kernel, cells=way.cells)
    of = replace(data, mix=way.mix)
    return checked(row, way.launch, lambda out: of.error(way.ragged(out)), settings)


Source = Callable[[RaggedData], list[Way]]  # of contenders; what it raises is the reason why there are none


def measure(mix: Mix, sources: Mapping[str, Source], settings: Settings) -> list[WalkTime]:
    """Rows of one batch, taken in turns."""
    gc.collect()
    torch.cuda.empty_cache()
    data = make_ragged(mix)
    rows: list[WalkTime] = []
    running: list[tuple[WalkTime, Mix, Capture]] = []
    for name, source in sources.items():
        try:
            ways = source(data)
        except (ImportError, LookupError, RuntimeError, ValueError) as refusal:
            rows.append(row_of(mix, name, "", UNAVAILABLE, first_line(refusal)))
            continue
        for way in ways:
            row, recorded = _record(way, data, settings)
            if recorded is None:
                rows.append(row)
            else:
                running.append((row, way.mix, recorded))
    for row, of, us in in_turns(running, settings):
        rows.append(replace(row, tflops=of.flops / us * 1e-6))
    return rows


def record(
    path: Path,
    stamp: Mapping[str, str],
    problems: Sequence[Mix],
    sources: Mapping[str, Source],
    settings: Settings,
    budget: float,
    say: Callable[[str], object],
) -> tuple[list[WalkTime], int]:
    """Measure batches until ``budget`` seconds have passed, writing the rows so far after each; returns the rows, and
    how many batches are left."""
    return turns.record(
        path, stamp, WalkTime, problems, lambda mix: measure(mix, sources, settings), lambda mix: mix.label, "batches",
        budget, say,
    )  # fmt: skip


COLUMNS = columns(WalkTime)
