"""``accuracy``: the command that measures the accuracy table and applies its gates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import click
import torch
from click.core import ParameterSource

from .. import __version__
from ..call.options import CHOICES
from .measure import table
from .page import page
from .report import header, line, read_csv, record, summary, write_csv

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
@click.option(
    "--from",
    "source",
    type=click.File(encoding="utf-8"),
    metavar="CSV",
    help="Measure nothing: the run is that of CSV.",
)
@click.option("--commit", default="", help="For the stamp of --csv: the state of the sources.")
def accuracy(
    device: str,
    quick: bool,
    precisions: tuple[str, ...],
    csv_file: Path | None,
    others: tuple[TextIO, TextIO] | None,
    source: TextIO | None,
    commit: str,
) -> None:
    """Measure what each scaling mode loses, and hold it to its gates.

    relative L2, RMSE, largest error and worst row cosine are against float64 on the original inputs. The kernel's own
    largest error and z are against float64 on the quantised inputs, z in units of the error that FP8 must make. On a
    card outliers at (2, 8, 4096, 128) are measured too. The exit status is 1 when a gate is missed or nothing was
    measured.
    """
    if source is not None:
        _measures_nothing()
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device")
    try:
        there = None if others is None else read_csv(others[0])  # before minutes are spent
        if csv_file is not None:
            csv_file.open("a").close()
        stamp, records = _measure(device, precisions, quick, commit) if source is None else read_csv(source)
    except OSError as error:
        raise click.UsageError(f"--csv {csv_file}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if csv_file is not None:
        with csv_file.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, stamp, records)
    if others is not None and there is not None:
        links = [_link(file, others[1]) for file in (source or csv_file, others[0])]
        others[1].write(page((stamp, records), there, (links[0], links[1])))
    click.echo(summary(records))
    measured = [row for row in records if row["kernel"] not in ("", "torch")]
    if not measured:
        click.echo("no kernel was measured")
    if not measured or any(row["status"] == "FAIL" for row in records):
        raise click.exceptions.Exit(1)


def _measures_nothing() -> None:
    """Usage error where --from stands beside an option of a measurement."""
    context = click.get_current_context()
    for name in ("device", "quick", "precisions", "csv_file", "commit"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise click.UsageError(f"--from measures nothing: leave out {option}")


def _measure(
    device: str, precisions: tuple[str, ...], quick: bool, commit: str
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Print rows as they come; the stamp and all records."""
    name = "the CPU emulator" if device == "cpu" else torch.cuda.get_device_name()
    stamp = {"device": name, "commit": commit, "fp8cutlass": __version__, "torch": torch.__version__}
    click.echo(header())
    records = []
    with torch.no_grad():
        for row in table(device, precisions, quick=quick):
            click.echo(line(row))
            records.append(record(row))
    return {key: value for key, value in stamp.items() if value}, records


def _link(file: TextIO | Path | None, beside: TextIO) -> str:
    """A Markdown link from the page to a CSV, by a path from the one to the other."""
    if file is None:
        return "not kept"
    path = file if isinstance(file, Path) else Path(file.name)
    return f"[{path.name}]({Path(os.path.relpath(path, Path(beside.name).parent)).as_posix()})"
