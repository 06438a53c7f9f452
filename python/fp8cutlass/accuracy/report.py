"""The accuracy table as text and as CSV; ``page`` has it as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
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


def summary(records: Iterable[Mapping[str, str]]) -> str:
    """How many rows passed, failed and were skipped."""
    statuses = [record["status"] for record in records]
    passed, failed, skipped = (statuses.count(name) for name in ("pass", "FAIL", "skip"))
    return f"{passed} rows passed, {failed} failed, {skipped} skipped"


# ---- CSV ------------------------------------------------------------------------------------------------------------


def record(row: Row) -> dict[str, str]:
    """A row as a line of the CSV, in full precision; what was not measured is empty."""
    cells: list[object] = [row.inputs, _shape(row), row.mode, row.precision, row.kernel, row.status]
    figures = row.figures
    if figures is None:
        cells += ["", row.gate, *[""] * 8]
    else:
        z = figures.z
        cells += [figures.relative_l2, row.gate, figures.rmse, figures.max_error, figures.min_row_cosine]
        cells.append("" if figures.own_error is None else figures.own_error)
        cells += [""] * 4 if z is None else [z.rms, z.max, z.row_rms, z.mean]
    cells.append(row.skipped or "; ".join(row.refusals))
    return dict(zip(CSV_TITLES, map(str, cells), strict=True))


def write_csv(file: TextIO, stamp: Mapping[str, str], records: Iterable[Mapping[str, str]]) -> None:
    """The stamp in comment lines, then the records."""
    for name, value in stamp.items():
        file.write(f"# {name}: {value}\n")
    writer = csv.DictWriter(file, CSV_TITLES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def read_csv(file: TextIO) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The stamp and the records of a CSV. A column that an earlier one lacks is empty; ValueError where the columns
    that name a row, its kernel or its status are not there."""
    lines = file.readlines()
    stamp = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#"))
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    if missing := {*CSV_TITLES[: NAMES + 2]} - {*(reader.fieldnames or ())}:
        raise ValueError(f"{file.name} is no accuracy table: it has no column {', '.join(sorted(missing))}")
    return stamp, [dict.fromkeys(CSV_TITLES, "") | row for row in reader]
