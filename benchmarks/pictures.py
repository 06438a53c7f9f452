"""Pictures of the documentation, drawn from committed measurements: how much faster whole calls are than bf16
attention, and what each mode and peer loses for its speed. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from . import plot
from .options import read_csv, stop
from .report import BF16_PEERS, CALL, CONTENDERS, FP8_PEERS, OTHERS, OWN, best_peer, cells, short
from .results import Row
from .shapes import GRID_HEAD_DIMS, GRID_SEQLENS, Shape

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
SIZE = (4096, 128, False)  # keys, head_dim and mask of the picture of errors

Speedups = dict[tuple[int, bool], dict[int, float]]  # by head_dim and mask: by keys


def speedups(rows: Iterable[Row]) -> Speedups:
    """Of a whole call from bf16 tensors, quantisation included, over the fastest bf16 attention of the same run."""
    found: Speedups = {}
    for shape, cell in sorted(cells(rows).items()):
        own, peer = cell.get(CALL), best_peer(cell, BF16_PEERS)
        if shape.in_grid and own and peer and own.median_us and peer.median_us:
            found.setdefault((shape.head_dim, shape.causal), {})[shape.seqlen_k] = peer.median_us / own.median_us
    return found


def losses(rows: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """TFLOPS of the kernel alone and relative L2 error against float32 of each contender, at one size of the grid."""

    def wanted(shape: Shape) -> bool:
        return shape.in_grid and (shape.seqlen_k, shape.head_dim, shape.causal) == SIZE

    by_shape = {shape: cell for shape, cell in cells(rows).items() if wanted(shape)}
    return {
        name: (row.tflops, row.error)
        for cell in by_shape.values()
        for name, row in cell.items()
        if name in (*CONTENDERS, *OTHERS) and row.tflops is not None and row.error is not None
    }


def draw_speedups(found: Speedups, said: str, path: Path) -> None:
    """A line for each head_dim and mask. PlotError without matplotlib or without points."""
    if not found:
        raise plot.PlotError("no whole call was measured beside bf16 attention: nothing to plot")
    pyplot = plot.open_pyplot()
    figure, ax = pyplot.subplots(figsize=(8, 4.5))
    for (head_dim, causal), by_keys in found.items():
        colour = f"C{GRID_HEAD_DIMS.index(head_dim)}"
        label = f"head_dim {head_dim}, {'causal' if causal else 'no mask'}"
        ax.plot(list(by_keys), list(by_keys.values()), "--s" if causal else "-o", color=colour, ms=4, label=label)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(GRID_SEQLENS, [short(keys) for keys in GRID_SEQLENS])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens of a sequence (16,384 in all)")
    ax.set_ylabel("times the fastest bf16 attention")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, ncols=2, loc="lower right")
    _save(figure, f"Whole calls from bf16 tensors\n{said}", path)


def draw_losses(found: dict[str, tuple[float, float]], said: str, path: Path) -> None:
    """A point for each contender, faster to the right and more exact downward; errors as those above."""
    if not found:
        raise plot.PlotError("no contender was measured at the size of the picture: nothing to plot")
    pyplot = plot.open_pyplot()
    figure, ax = pyplot.subplots(figsize=(8, 4.5))
    for name, (tflops, error) in found.items():
        own = name.startswith(OWN)
        text = f"{OWN} {name[len(OWN) + 1 :] or 'fast'}" if own else name
        colour = "tab:red" if own else "tab:blue" if name in FP8_PEERS else "tab:gray"
        ax.plot(tflops, 100 * error, "o" if own else "s", color=colour)
        ax.annotate(text, (tflops, 100 * error), xytext=(4, 6), textcoords="offset points", rotation=35, fontsize=8)
    keys, head_dim, causal = SIZE
    ax.set_ylim(bottom=0, top=140 * max(error for _, error in found.values()))
    ax.set_xlim(left=0, right=1.25 * max(tflops for tflops, _ in found.values()))
    ax.set_xlabel("useful TFLOPS, kernel alone")
    ax.set_ylabel("relative L2 error, percent")
    ax.grid(alpha=0.3)
    size = f"{keys} tokens, head_dim {head_dim}, {'causal' if causal else 'no mask'}, normal numbers"
    _save(figure, f"Error against speed: {size}\n{said}", path)


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})  # the same bytes from the same matplotlib
    plot.open_pyplot().close(figure)


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Default: beside the measurements."
)
def pictures(out: Path) -> None:
    """Draw the pictures of the documentation from the committed grid.csv and precision.csv."""
    stamp, rows = read_csv(RESULTS / "grid.csv")
    again, modes = read_csv(RESULTS / "precision.csv")
    grid_said = f"{stamp['card']}, commit {stamp['commit']}"
    others = [row for row in modes if row.contender in OTHERS]
    try:
        draw_speedups(speedups(rows), grid_said, out / "speedup.png")
        said = f"{grid_said}; balanced, accurate and high: {again['card']}, commit {again['commit']}"
        draw_losses(losses(rows) | losses(others), said, out / "error_speed.png")
    except plot.PlotError as error:
        stop(str(error))
    click.echo(f"{out / 'speedup.png'}\n{out / 'error_speed.png'}")
