"""The command of merging, and its table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .outputs import from_option, read_rows, write_tables
from .report import heading, not_timed, table
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .merge import MergeTime


@click.command()
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds.")
@from_option
@out_option
@commit_option
def merge(quick: bool, budget: float, csv: Path | None, out: Path | None, commit: str) -> None:
    """Time what a ring pays for merging: calls with and without an LSE, and the merging of two partial results; write
    CSV and table.

    Ends with 2 where nothing can be measured, with 1 where a result was wrong, a contender failed or time ran out.
    """
    if csv is not None:
        _finish(csv)
        return
    need_card("timing merges", "; `merge --from` works from a CSV")
    from . import machine
    from .grid import QUICK, Settings
    from .merge import PROBLEMS, MergeTime, measure
    from .peers import Own
    from .turns import record

    if (reason := Own().available()) is not None:
        stop(reason)
    stamp = machine.stamp(commit)
    path = results_folder(out, stamp) / "merge.csv"
    settings = QUICK if quick else Settings()
    rows, left = record(
        path, stamp, MergeTime, PROBLEMS, lambda problem: measure(problem, settings), str, "problems", budget,
        click.echo,
    )  # fmt: skip
    _finish(path)
    sys.exit(1 if left or any(row.status in (FAILED, WRONG) for row in rows) else 0)


def _finish(path: Path) -> None:
    from .merge import MergeTime

    stamp, rows = read_rows(path, MergeTime)
    write_tables(path, markdown(stamp, rows))


def markdown(stamp: Mapping[str, str], rows: Sequence[MergeTime]) -> str:
    """A line for each problem."""
    from .merge import CALL, KERNEL, LSE, OPERATIONS

    cells: dict[tuple[int, int, int, int], dict[str, MergeTime]] = {}
    for row in rows:
        cells.setdefault((row.heads, row.kv_heads, row.head_dim, row.tokens), {})[row.contender] = row
    body = []
    for (heads, kv_heads, head_dim, tokens), cell in cells.items():
        us = {name: row.median_us for name, row in cell.items() if row.median_us}
        more = [f"{us[name] / us[CALL]:.3f}" if name in us and CALL in us else "" for name in LSE if name != CALL]
        by_kernel, moved = us.get(KERNEL), next((row.moved for row in cell.values() if row.moved), 0)
        speed = f"{moved / by_kernel * 1e-6:.2f}" if by_kernel else ""
        shown = [f"{us[name]:.1f}" if name in us else "" for name in (CALL, KERNEL, OPERATIONS)]
        body.append([f"{heads}/{kv_heads} x {head_dim}", str(tokens), shown[0], *more, shown[1], speed, shown[2]])
    head = ["heads x head_dim", "tokens", "call, us", "exact LSE", "LSE for merging", "merge, us", "TB/s", "torch, us"]
    lines = [
        *heading("Merging", stamp),
        "",
        "A call is attention to packed keys, as many as rows. The LSEs are times of a call with one over one without.",
        "A merge takes a partial result in bf16 into one in float32, in place: 10 bytes an element.",
        "",
        *table(head, body),
        *not_timed(rows, lambda row: f"{row.heads} heads of {row.head_dim}, {row.tokens} tokens"),
    ]
    return "\n".join(lines) + "\n"
