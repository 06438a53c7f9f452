"""What commands leave behind beside their CSV, and how they read one again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from .options import stop
from .plot import PlotError
from .results import Record, read_records

from_option = click.option(
    "--from", "csv", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write tables and plot of this CSV again; nothing is measured.",
)  # fmt: skip


def write_tables(path: Path, text: str, draw: Callable[[Path], None] | None = None) -> None:
    """Tables and figure beside a CSV, and the tables on the screen."""
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    if draw is None:
        return
    try:
        draw(path.with_suffix(".png"))
    except PlotError as error:
        click.echo(f"no plot: {error}")


def read_rows(csv: Path, kind: type[Record]) -> tuple[dict[str, str], Sequence[Record]]:
    """The stamp and the rows of a CSV of this kind; ends with 2 where it is none."""
    try:
        return read_records(csv, kind)
    except ValueError as error:
        stop(str(error))
        raise
