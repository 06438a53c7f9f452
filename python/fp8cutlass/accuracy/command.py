"""``accuracy``: the command that measures the accuracy table and applies its gates."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click
import torch

from ..validate import CHOICES
from .measure import Row, table
from .report import beside, header, line, summary, write_csv

PRECISIONS = CHOICES["precision"]


@click.command()
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="cpu runs the emulator."
)
@click.option("--quick", is_flag=True, help="Small shapes only: under a minute on one core.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    default=PRECISIONS,
    help="Repeatable; default all.",
)
@click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write the table to FILE."
)
@click.option(
    "--beside",
    "others",
    type=(click.File(encoding="utf-8"), click.File("w", encoding="utf-8", lazy=True)),
    metavar="CSV FILE",
    help="Write a table of this run beside that of CSV, from another device, to FILE, as Markdown.",
)
def accuracy(
    device: str,
    quick: bool,
    precisions: tuple[str, ...],
    csv_file: Path | None,
    others: tuple[TextIO, TextIO] | None,
) -> None:
    """Measure what each scaling mode loses, and hold it to its gates.

    relative L2, RMSE, largest error and worst row cosine are against float64 on the original inputs. The kernel's own
    largest error and z are against float64 on the quantised inputs, z in units of the error that FP8 must make. The
    exit status is 1 when a gate is missed or nothing was measured.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device")
    click.echo(header())
    rows: list[Row] = []
    with torch.no_grad():
        for row in table(device, precisions, quick=quick):
            click.echo(line(row))
            rows.append(row)
    if csv_file is not None:
        with csv_file.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, rows)
    if others is not None:
        others[1].write(beside(rows, others[0]))
    click.echo(summary(rows))
    measured = [row for row in rows if row.kernel not in ("", "torch")]
    if not measured:
        click.echo("no kernel was measured")
    if not measured or any(row.status == "FAIL" for row in rows):
        raise click.exceptions.Exit(1)
