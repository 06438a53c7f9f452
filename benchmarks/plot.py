"""The figures of a run: TFLOPS over sequence length for each head_dim and mask, quantisation in and out; and what each
contender loses on each kind of inputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import CONTENDERS, FP8_PEERS, OWN, SAGE, cells, short
from .results import Row
from .shapes import GRID_HEAD_DIMS, GRID_SEQLENS

if TYPE_CHECKING:
    from .accuracy import Loss

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


def open_pyplot() -> Any:
    """matplotlib, drawing into files. PlotError where there is none."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(WITHOUT_MATPLOTLIB) from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _title(figure: Any, stamp: Mapping[str, str]) -> None:
    names = ("card", "driver", "cuda", "torch", "commit", "date")
    figure.suptitle(", ".join(f"{name} {stamp[name]}" for name in names if name in stamp), fontsize=9)


def draw(stamp: Mapping[str, str], rows: Iterable[Row], path: Path) -> None:
    """Write the figure; the suffix of ``path`` is the format. PlotError without matplotlib or without grid rows."""
    by_shape = {shape: cell for shape, cell in cells(rows).items() if shape.in_grid}
    if not by_shape:
        raise PlotError("no shape of the grid was measured: nothing to plot")
    pyplot = open_pyplot()
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
    _title(figure, stamp)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 0.98))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_losses(stamp: Mapping[str, str], losses: Iterable[Loss], path: Path) -> None:
    """Write a bar for each contender and case, on a logarithmic axis; errors as those of ``draw``."""
    found = {(x.contender, f"{x.inputs}\n{x.shape.removesuffix(' full')}"): x.relative_l2 for x in losses}
    found = {key: loss for key, loss in found.items() if loss is not None}
    if not found:
        raise PlotError("no contender gave a result: nothing to plot")
    pyplot = open_pyplot()
    names, cases = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))
    figure, ax = pyplot.subplots(figsize=(2 * len(cases) + 1, 5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        mine = [(at + width * i, found[name, case]) for at, case in enumerate(cases) if (name, case) in found]
        ax.bar(*zip(*mine, strict=True), width, label=name)
    ax.set_xticks([at + 0.4 - width / 2 for at in range(len(cases))], cases, fontsize=8)
    ax.set_yscale("log")
    ax.set_ylabel("relative L2 against float32")
    ax.grid(axis="y", alpha=0.3)
    ax.legend(fontsize=8, ncols=2)
    _title(figure, stamp)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
