"""The accuracy table as text and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import TextIO

from .measure import Row

COLUMNS = {
    "inputs": 8,
    "shape": 14,
    "mode": 16,
    "precision": 9,
    "rel L2": 7,
    "gate": 7,
    "RMSE": 9,
    "max err": 9,
    "min cos": 8,
    "own err": 9,
    "z rms": 6,
    "z max": 6,
    "z row": 6,
    "z mean": 7,
}
NAMES = 4  # the first columns are names, the others figures
CSV_TITLES = (
    "inputs shape mode precision kernel status relative_l2 gate rmse max_error min_row_cosine own_error z_rms z_max "
    "z_row_rms z_mean reason"
).split()


def header() -> str:
    """The line of titles."""
    return _line(COLUMNS) + "  result"


def line(row: Row) -> str:
    """One row; what it missed, or why it was skipped, at its end."""
    cells = [row.inputs, _shape(row), row.mode, row.precision]
    figures = row.figures
    if figures is None:
        return _line((*cells, *[""] * (len(COLUMNS) - len(cells)))) + f"  skip: {row.skipped}"
    cells += [f"{figures.relative_l2:.4f}", f"{row.gate:.4f}", f"{figures.rmse:.2e}", f"{figures.max_error:.2e}"]
    cells += [f"{figures.min_row_cosine:.4f}", "-" if figures.own_error is None else f"{figures.own_error:.2e}"]
    z = figures.z
    cells += ["-"] * 4 if z is None else [f"{z.rms:.2f}", f"{z.max:.2f}", f"{z.row_rms:.2f}", f"{z.mean:+.4f}"]
    return _line(cells) + f"  {row.status}" + (": " + "; ".join(row.refusals) if row.refusals else "")


def _line(cells: Iterable[str]) -> str:
    padded = [
        cell.ljust(width) if i < NAMES else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, COLUMNS.values(), strict=True))
    ]
    return " ".join(padded)


def _shape(row: Row) -> str:
    return "({},{},{},{})".format(*row.shape)


def summary(rows: Iterable[Row]) -> str:
    """How many rows passed, failed and were skipped."""
    statuses = [row.status for row in rows]
    passed, failed, skipped = (statuses.count(name) for name in ("pass", "FAIL", "skip"))
    return f"{passed} rows passed, {failed} failed, {skipped} skipped"


def beside(rows: Iterable[Row], other: TextIO) -> str:
    """A Markdown table of this run's rows, and in the same line what the CSV of another run (on a card, say) has for
    each: relative L2 and RMSE against float64 on the original inputs, the kernel's own largest error."""
    there = {tuple(row[name] for name in CSV_TITLES[:NAMES]): row for row in csv.DictReader(other)}
    titles = ["inputs", "shape", "mode", "precision", "gate", "rel L2", "there", "RMSE", "there", "own error", "there"]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * NAMES + " ---: |" * (len(titles) - NAMES)]
    for row in rows:
        names = (row.inputs, _shape(row), row.mode, row.precision)
        found, figures = there.get(names, {}), row.figures
        mine = (None,) * 3 if figures is None else (figures.relative_l2, figures.rmse, figures.own_error)
        cells = [*names, f"{row.gate:.4f}"]
        for value, title, form in zip(mine, ("relative_l2", "rmse", "own_error"), (".4f", ".2e", ".2e"), strict=True):
            theirs = found.get(title)
            cells += ["" if value is None else f"{value:{form}}", f"{float(theirs):{form}}" if theirs else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_csv(file: TextIO, rows: Iterable[Row]) -> None:
    """One line a row in full precision; what was not measured is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_TITLES)
    for row in rows:
        cells: list[object] = [row.inputs, _shape(row), row.mode, row.precision, row.kernel, row.status]
        figures = row.figures
        if figures is None:
            cells += ["", row.gate, *[""] * 8]
        else:
            z = figures.z
            cells += [figures.relative_l2, row.gate, figures.rmse, figures.max_error, figures.min_row_cosine]
            cells.append("" if figures.own_error is None else figures.own_error)
            cells += [""] * 4 if z is None else [z.rms, z.max, z.row_rms, z.mean]
        writer.writerow([*cells, row.skipped or "; ".join(row.refusals)])
