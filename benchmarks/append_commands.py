"""The command of append, and its tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .outputs import from_option, read_rows, write_tables
from .report import heading, table
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .append import AppendTime

BYTES = 6  # of an element of K and of V: two of each are read, one of each is written


@click.command()
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds.")
@from_option
@out_option
@commit_option
def append(quick: bool, budget: float, csv: Path | None, out: Path | None, commit: str) -> None:
    """Time append to pages alone, by its kernel and by the torch operations that it stands for; write CSV and table.

    Ends with 2 where nothing can be measured, with 1 where bytes differ, a contender failed or time ran out.
    """
    if csv is not None:
        _finish(csv)
        return
    need_card("timing append", "; `append --from` works from a CSV")
    from . import machine
    from .append import FORMATS, TOKENS, AppendTime, measure
    from .grid import QUICK, Settings
    from .peers import Own
    from .turns import record

    if (reason := Own().available()) is not None:
        stop(reason)
    stamp = machine.stamp(commit)
    path = results_folder(out, stamp) / "append.csv"
    settings = QUICK if quick else Settings()
    rows, left = record(
        path, stamp, AppendTime, [(tokens, format) for tokens in TOKENS for format in FORMATS],
        lambda problem: measure(*problem, settings), lambda problem: f"{problem[0]} tokens, {problem[1]}", "sizes",
        budget, click.echo,
    )  # fmt: skip
    _finish(path)
    sys.exit(1 if left or any(row.status in (FAILED, WRONG) for row in rows) else 0)


def _finish(path: Path) -> None:
    from .append import AppendTime

    stamp, rows = read_rows(path, AppendTime)
    write_tables(path, markdown(stamp, rows))


def markdown(stamp: Mapping[str, str], rows: Sequence[AppendTime]) -> str:
    """A line for each number of tokens and format."""
    cells: dict[tuple[int, str], dict[str, AppendTime]] = {}
    for row in rows:
        cells.setdefault((row.tokens, row.format), {})[row.contender] = row
    body = []
    for (tokens, format), cell in cells.items():
        kernel, by_torch = (cell[name].median_us if name in cell else None for name in ("kernel", "torch operations"))
        one = next(iter(cell.values()))
        moved = BYTES * tokens * one.kv_heads * one.head_dim
        speed = f"{moved / kernel * 1e-3:.1f}" if kernel else ""
        faster = f"{by_torch / kernel:.1f}" if kernel and by_torch else ""
        shown = ["" if us is None else f"{us:.2f}" for us in (kernel, by_torch)]
        body.append([str(tokens), format, shown[0], speed, shown[1], faster])
    lines = [
        *heading("Append to pages", stamp),
        "",
        "Microseconds to append tokens to a paged cache. Speed counts K and V, read in bf16 and written in e4m3. The",
        "bytes are those of torch operations, or there is no time.",
        "",
        *table(["tokens", "pages", "kernel, us", "GB/s", "torch operations, us", "torch / kernel"], body),
    ]
    wrong = [
        f"* {row.contender}, {row.tokens} tokens, {row.format}: {row.status}: {row.reason}"
        for row in rows
        if row.median_us is None
    ]
    return "\n".join([*lines, *(["", *wrong] if wrong else [])]) + "\n"
