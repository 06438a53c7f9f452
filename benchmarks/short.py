"""Whole calls from bf16 on short sequences, beside the best bf16 kernels and the time that memory needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from fp8cutlass.timing import capture, interleave

from .data import Data
from .grid import Settings
from .peers import Own
from .peers.base import Contender
from .peers.own import whole_call
from .plot import COLOURS, PlotError, _title, open_pyplot
from .report import BF16_PEERS, CALL, best_peer, cells, geometric_mean, heading, not_timed, table
from .results import Row
from .shapes import TOKENS, WIDTH, Shape, square

SEQLENS = (64, 128, 197, 256, 384, 512, 768, 1024)
HEAD_DIMS = (64, 128)
FEWEST_CELL, MEAN, FIRST, FLOOR = 1.0, 1.4, 1.8, 1.35  # the targets, in the order of `verdict`
FIRST_CELL = square(TOKENS // 512, WIDTH // 64, 512, 64, False)
FLOOR_KEYS = 256
BYTES = 2  # an element of Q, K, V and O
COPIED = 1 << 28  # bytes that are copied to find what memory gives
COPY = "copy_tb_per_s"  # in the stamp


def batches() -> list[Shape]:
    """The cells of the tables: 16,384 tokens, or as many whole sequences as they hold, heads x head_dim = 2048."""
    return [
        square(TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, causal)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for seqlen in SEQLENS
    ]


def singles() -> list[Shape]:
    """Small batches of encoders, and queries against the tokens of a prompt."""
    models = ((12, 197, 64), (12, 512, 64), (16, 512, 128), (32, 1024, 128))
    few = [square(batch, heads, seqlen, head_dim, False) for heads, seqlen, head_dim in models for batch in (1, 2, 8)]
    prompts = [
        Shape(head_dim, False, 4096, keys, 2, heads, heads) for head_dim, heads in ((64, 16), (128, 8))
        for keys in (77, 256)
    ]  # fmt: skip
    return [*few, *prompts]


class Calls:
    """``attention`` from bf16 tensors to its output."""

    name, precision = CALL, Own.precision

    def available(self) -> str | None:
        return Own().available()

    def version(self) -> str:
        return Own().version()

    def prepare(self, data: Data) -> list[Contender]:
        return [whole_call(data, CALL)]


def copy_tb_per_s(settings: Settings) -> float:
    """10^12 bytes a second, read and written, that a copy of ``COPIED`` bytes moves: the best replay."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    made = torch.empty_like(source)
    (timing,) = interleave([capture(lambda: made.copy_(source), settings.target_us)], settings.replays)
    return 2 * COPIED / timing.min_us * 1e-6


def floor_us(shape: Shape, stamp: Mapping[str, str]) -> float:
    """Microseconds to read Q, K and V and to write O at the bandwidth of the stamp; NaN where it has none."""
    rows = 2 * shape.heads * shape.seqlen_q + 2 * shape.kv_heads * shape.seqlen_k
    moved = BYTES * shape.batch * rows * shape.head_dim
    return moved / float(stamp.get(COPY, "nan")) * 1e-6


def ratios(rows: Iterable[Row]) -> dict[Shape, float]:
    """The time of the best bf16 kernel over ours, of each shape where both ran."""
    found = {}
    for shape, cell in cells(rows).items():
        peer, ours = best_peer(cell, BF16_PEERS), cell.get(CALL)
        if peer is not None and ours is not None and peer.median_us and ours.median_us:
            found[shape] = peer.median_us / ours.median_us
    return found


def verdict(stamp: Mapping[str, str], rows: Sequence[Row]) -> list[tuple[str, float, float, bool]]:
    """Each target of the tables' cells: what it is, what was seen, what is wanted, whether it is met. A target whose
    cells were not all measured is not met, and seen as NaN."""
    grid = batches()
    of = {shape: ratio for shape, ratio in ratios(rows).items() if shape in grid}
    whole = len(of) == len(grid)
    near = [shape for shape in of if shape.seqlen_k <= FLOOR_KEYS]
    times = {shape: cell[CALL].median_us or math.nan for shape, cell in cells(rows).items() if CALL in cell}
    least = min(of.values()) if whole else math.nan
    mean = geometric_mean(list(of.values())) if whole else math.nan
    first = of.get(FIRST_CELL, math.nan)
    floor = max(times[shape] / floor_us(shape, stamp) for shape in near) if whole else math.nan
    return [
        ("least of the cells", least, FEWEST_CELL, least >= FEWEST_CELL),
        ("geometric mean of the cells", mean, MEAN, mean >= MEAN),
        (f"{FIRST_CELL.label}", first, FIRST, first >= FIRST),
        (f"most times the floor of memory, up to {FLOOR_KEYS} keys", floor, FLOOR, floor <= FLOOR),
    ]


def markdown(stamp: Mapping[str, str], rows: Sequence[Row]) -> str:
    """All tables of a run, under the stamp that says where it ran."""
    by_shape, of = cells(rows), ratios(rows)
    lines = heading("Whole calls from bf16 on short sequences", stamp)
    judged = [
        [name, f"{seen:.2f}", f"{wanted:g}", "met" if met else "missed"]
        for name, seen, wanted, met in verdict(stamp, rows)
    ]
    lines += ["", *table(["", "seen", "target", ""], judged)]
    lines += ["", "### the best bf16 kernel's time / ours, 16,384 tokens, heads x head_dim = 2048", ""]
    body = []
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            shapes = [s for s in batches() if (s.head_dim, s.causal) == (head_dim, causal)]
            texts = [f"{of[s]:.2f}" if s in of else "" for s in shapes]
            body.append([f"{head_dim} {'causal' if causal else 'full'}", *texts])
    lines += table(["head_dim", *map(str, SEQLENS)], body)
    lines += ["", "### us; the floor is what memory needs for Q, K, V and O in 16 bits", ""]
    names = (CALL, *BF16_PEERS)
    times = []
    for shape, cell in by_shape.items():
        texts = [f"{cell[name].median_us:.1f}" if name in cell else "" for name in names]
        ratio = f"{of[shape]:.2f}" if shape in of else ""
        times.append([shape.label, *texts, f"{floor_us(shape, stamp):.1f}", ratio])
    lines += table(["batch, heads, seqlen, head_dim", *names, "floor", "best bf16 / ours"], times)
    lines += not_timed(rows, lambda row: row.shape.label)
    return "\n".join(lines) + "\n"


def draw(stamp: Mapping[str, str], rows: Sequence[Row], path: Path) -> None:
    """Write the times of the cells over the floor of memory; the suffix of ``path`` is the format. PlotError without
    matplotlib or without cells."""
    grid = batches()
    by_shape = {shape: cell for shape, cell in cells(rows).items() if shape in grid}
    if not by_shape:
        raise PlotError("no cell of the tables was measured: nothing to plot")
    pyplot = open_pyplot()
    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4.5), squeeze=False, sharey=True)
    handles = {}
    sides = [(head_dim, causal) for head_dim in HEAD_DIMS for causal in (False, True)]
    for ax, (head_dim, causal) in zip(axes[0], sides, strict=True):
        shapes = sorted(s for s in by_shape if (s.head_dim, s.causal) == (head_dim, causal))
        for name in (CALL, *BF16_PEERS):
            points = [
                (s.seqlen_k, (by_shape[s][name].median_us or math.nan) / floor_us(s, stamp))
                for s in shapes
                if name in by_shape[s]
            ]
            if points:
                colour = "tab:red" if name == CALL else COLOURS[name]
                (handles[name],) = ax.plot(*zip(*points, strict=True), "-o", color=colour, markersize=3)
        ax.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(SEQLENS, [str(seqlen) for seqlen in SEQLENS], fontsize=7)
        ax.set_xlabel("sequence length, 16,384 tokens in all")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("time / time that memory needs")
    axes[0][0].set_ylim(bottom=0)
    _title(figure, stamp)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
