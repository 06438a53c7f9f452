"""The command of decode: CSV, tables and plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .outputs import from_option, read_rows, write_tables
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .decode import DecodeTime, PagedPeer, Source
    from .steps import Step

HOT = 10  # steps of which hot launches are timed as well, after all cold ones


def problems(steps: Sequence[Step], l2: str) -> list[tuple[Step, bool]]:
    """Steps, and whether they are cold, in the order in which they are measured."""
    cold = [(step, True) for step in steps]
    hot = [(step, False) for step in (steps if l2 == "hot" else steps[:HOT])]
    return {"cold": cold, "hot": hot, "both": cold + hot}[l2]


def write(path: Path, stamp: dict[str, str], rows: Sequence[DecodeTime]) -> None:
    """The tables and the plot beside a CSV."""
    from . import decode_report

    write_tables(path, decode_report.markdown(stamp, rows), partial(decode_report.draw, stamp, rows))


def sources_of(no_peers: bool, no_layouts: bool, candidates: bool) -> dict[str, Source]:
    """Where contenders come from, by name; peers come last."""
    from .peers import flashinfer, paged, paged_own

    found: dict[str, Source] = {"ours": paged_own.ours}
    if not no_layouts:
        found |= {"layouts": paged_own.layouts, "append": paged_own.appends}
    if candidates:
        found["candidates"] = paged_own.candidates
    if not no_peers:
        kinds = ("fp8", "bf16")
        peers: list[PagedPeer] = [
            *(flashinfer.Xqa(kind) for kind in kinds),
            *(paged.PagedFa3(kind) for kind in kinds),
            *(flashinfer.FlashInfer(backend, kind) for backend in ("fa2", "fa3") for kind in kinds),
        ]
        found |= {peer.name: peer for peer in peers}
    return found


@click.command()
@click.option("--steps", "texts", multiple=True, help="Only steps with this text in their label; repeat for more.")
@click.option("--l2", type=click.Choice(["both", "cold", "hot"]), default="both", show_default=True)
@click.option("--no-peers", is_flag=True, help="Only our kernels.")
@click.option("--no-layouts", is_flag=True, help="Without other layouts of pages and append.")
@click.option("--candidates", "shapes", is_flag=True, help="Also built kernels of other shapes.")
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=click.FloatRange(min=0), default=240.0, show_default=True, help="Seconds.")
@from_option
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), help="With --from: also this page of the documentation."
)
@out_option
@commit_option
def decode(
    texts: tuple[str, ...],
    l2: str,
    no_peers: bool,
    no_layouts: bool,
    shapes: bool,
    quick: bool,
    budget: float,
    csv: Path | None,
    page: Path | None,
    out: Path | None,
    commit: str,
) -> None:
    """Time decode steps over paged caches against FlashAttention-3, FlashInfer and XQA; write CSV, tables and plot.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    from .steps import wanted

    if csv is not None:
        _again(csv, page)
        return
    if page is not None:
        stop("--page goes with --from")
    if not (steps := wanted(texts)):
        stop(f"no step has {' or '.join(map(repr, texts))} in its label")
    need_card("timing decode", "; `decode --from` works from a CSV")
    from . import machine
    from .decode import DecodeTime, PagedPeer, measure
    from .grid import QUICK, Settings
    from .peers import Own
    from .turns import record

    if (reason := Own().available()) is not None:
        stop(reason)
    sources = sources_of(no_peers, no_layouts, shapes)
    stamp = machine.stamp(commit)
    stamp |= {n: s.version() for n, s in sources.items() if isinstance(s, PagedPeer) and s.available() is None}
    path = results_folder(out, stamp) / "decode.csv"
    settings = QUICK if quick else Settings()
    stamp["settings"] = f"{settings.replays} replays of {settings.target_us:g} us"
    rows, left = record(
        path, stamp, DecodeTime, problems(steps, l2), lambda problem: measure(*problem, sources, settings),
        lambda problem: f"{problem[0].label}, {'cold' if problem[1] else 'hot'}", "steps", budget, click.echo,
    )  # fmt: skip
    write(path, stamp, rows)
    bad = bool(left) or not rows or any(row.status in (FAILED, WRONG) for row in rows)
    sys.exit(1 if bad else 0)


def _again(csv: Path, page: Path | None) -> None:
    from . import decode_report
    from .decode import DecodeTime

    stamp, rows = read_rows(csv, DecodeTime)
    write(csv, stamp, rows)
    if page is not None:
        page.write_text(decode_report.page(stamp, rows, csv.absolute(), page.absolute()), encoding="utf-8")
        click.echo(page)
