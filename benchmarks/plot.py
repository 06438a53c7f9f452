"""The figure of a run: TFLOPS over sequence length for each head_dim and mask, quantisation in and out."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from .report import CONTENDERS, FP8_PEERS, OWN, SAGE, cells, short
from .results import Row
from .shapes import GRID_HEAD_DIMS, GRID_SEQLENS

COLOURS = {
    OWN: "tab:red",
    "fa3_fp8": "tab:blue",
    "cudnn_fp8": "tab:green",
    "fa3_bf16": "tab:cyan",
    "cudnn_bf16": "tab:olive",
    "fa2_bf16": "tab:gray",
    SAGE: "tab:purple",
}
WITHOUT_MATPLOTLIB = "the plot needs matplotlib: install it, or draw the plot elsewhere from the CSV"


class PlotError(RuntimeError):
    """There is nothing to draw, or nothing to draw with."""


def draw(stamp: Mapping[str, str], rows: Iterable[Row], path: Path) -> None:
    """Write the figure; the suffix of ``path`` is the format. PlotError without matplotlib or without grid rows."""
    by_shape = {shape: cell for shape, cell in cells(rows).items() if shape.in_grid}
    if not by_shape:
        raise PlotError("no shape of the grid was measured: nothing to plot")
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(WITHOUT_MATPLOTLIB) from error
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    head_dims = [d for d in GRID_HEAD_DIMS if any(shape.head_dim == d for shape in by_shape)]
    figure, axes = pyplot.subplots(
        2, len(head_dims), figsize=(5 * len(head_dims), 8), squeeze=False, sharex=True, sharey="row"
    )
    handles = {}
    for column, head_dim in enumerate(head_dims):
        for line, causal in enumerate((False, True)):
            ax = axes[line][column]
            shapes = sorted(s for s in by_shape if (s.head_dim, s.causal) == (head_dim, causal))
            for name in CONTENDERS:
                mine = [by_shape[shape][name] for shape in shapes if name in by_shape[shape]]
                if not mine:
                    continue
                style = "-o" if name == OWN or name in FP8_PEERS else "--s"
                kernel = [(row.shape.seqlen_k, row.tflops) for row in mine]
                (handles[name],) = ax.plot(*zip(*kernel, strict=True), style, color=COLOURS[name], markersize=3)
                whole = [(row.shape.seqlen_k, row.shape.tflops(t)) for row in mine if (t := row.with_quantisation_us)]
                if whole:
                    label = f"{name}, quantisation included"
                    (handles[label],) = ax.plot(*zip(*whole, strict=True), ":", color=COLOURS[name])
            ax.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}")
            ax.set_xscale("log", base=2)
            ax.set_xticks(GRID_SEQLENS, [short(seqlen) for seqlen in GRID_SEQLENS])
            ax.grid(alpha=0.3)
            if column == 0:
                ax.set_ylabel("useful TFLOPS")
            if line == 1:
                ax.set_xlabel("sequence length, 16,384 tokens in all")
    for row in axes:
        row[0].set_ylim(bottom=0)  # shared by the row, and fixed from here on: after all lines are drawn
    names = ("card", "driver", "cuda", "torch", "commit", "date")
    figure.suptitle(", ".join(f"{name} {stamp[name]}" for name in names if name in stamp), fontsize=9)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 0.98))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
