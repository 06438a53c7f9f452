"""The command of decode: CSV and table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .decode import DecodeTime, Source


def markdown(stamp: Mapping[str, str], rows: Sequence[DecodeTime]) -> str:
    """A line for each step and each state of the L2 cache: microseconds and TB/s of each contender."""
    from .report import heading, table

    names = list(dict.fromkeys(row.contender for row in rows))
    cells: dict[tuple[str, int, int, str], dict[str, DecodeTime]] = {}
    for row in rows:
        cells.setdefault((row.step, row.queries, row.head_dim, row.l2), {})[row.contender] = row

    def text(row: DecodeTime | None) -> str:
        if row is None:
            return ""
        return row.status if row.median_us is None else f"{row.median_us:.1f} us, {row.tb_s:.2f}"

    body = [
        [step, str(queries), str(head_dim), l2, *(text(cell.get(name)) for name in names)]
        for (step, queries, head_dim, l2), cell in cells.items()
    ]
    reasons = dict.fromkeys(f"* {row.contender}: {row.reason}" for row in rows if row.reason)
    lines = [
        *heading("Decode", stamp),
        "Microseconds of a launch, and bytes of K and V over time in TB/s. `cold`: not in the L2 cache.",
        "",
        *table(["step", "queries", "head_dim", "L2", *names], body),
        *(["", *reasons] if reasons else []),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--no-peers", is_flag=True, help="Only our kernels.")
@click.option("--candidates", "shapes", is_flag=True, help="Also built kernels of other shapes.")
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=click.FloatRange(min=0), default=150.0, show_default=True, help="Seconds.")
@out_option
@commit_option
def decode(no_peers: bool, shapes: bool, quick: bool, budget: float, out: Path | None, commit: str) -> None:
    """Time decode steps over paged caches against FlashAttention-3; write CSV and table.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    need_card("timing decode")
    from . import machine
    from .decode import STEPS, DecodeTime, candidates, fa3, measure, ours
    from .grid import QUICK, Settings
    from .peers import PEERS, Own
    from .turns import record

    if (reason := Own().available()) is not None:
        stop(reason)
    sources: dict[str, Source] = {"ours": ours}
    if shapes:
        sources["candidates"] = candidates
    if not no_peers:
        sources |= {f"fa3_{precision}": fa3(precision) for precision in ("fp8", "bf16")}
    stamp = machine.stamp(commit)
    stamp |= {peer: PEERS[peer].version() for peer in sources if peer in PEERS and PEERS[peer].available() is None}
    path = results_folder(out, stamp) / "decode.csv"
    settings = QUICK if quick else Settings()
    rows, left = record(
        path, stamp, DecodeTime, [(step, cold) for step in STEPS for cold in (True, False)],
        lambda problem: measure(*problem, sources, settings),
        lambda problem: f"{problem[0].label}, {'cold' if problem[1] else 'hot'}", "steps", budget, click.echo,
    )  # fmt: skip
    text = markdown(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    bad = bool(left) or not rows or any(row.status in (FAILED, WRONG) for row in rows)
    sys.exit(1 if bad else 0)
