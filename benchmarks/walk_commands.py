"""The commands of ragged batches and windows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import commit_option, need_card, out_option, results_folder, stop
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .walk import Mix, Source, WalkTime

HEAD_DIMS, WINDOW_HEAD_DIMS, WINDOWS = (64, 128, 256), (64, 128), (256, 1024, 4096)
PROMPTS = (8192, 16384, 32768)  # tokens
budget_option = click.option(
    "--budget", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds; then no batch is begun."
)
quick_option = click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")


def head_dim_option(head_dims: tuple[int, ...]) -> Callable[[Any], Any]:
    choices = click.Choice([str(d) for d in head_dims])
    return click.option("--head-dim", "head_dims", type=choices, multiple=True, help="Default: all of these.")


def _run(
    name: str,
    problems: Sequence[Mix],
    sources: Mapping[str, Source],
    render: Callable[[Mapping[str, str], Sequence[WalkTime]], str],
    quick: bool,
    budget: float,
    out: Path | None,
    commit: str,
) -> tuple[dict[str, str], list[WalkTime], Path, bool]:
    """Measure, write CSV and tables; the last of what is returned is whether all was measured and right."""
    from . import machine, walk
    from .grid import QUICK, Settings
    from .peers import PEERS, Own

    if (reason := Own().available()) is not None:
        stop(reason)
    stamp = machine.stamp(commit)
    stamp |= {peer: PEERS[peer].version() for peer in sources if peer in PEERS and PEERS[peer].available() is None}
    path = results_folder(out, stamp) / f"{name}.csv"
    rows, left = walk.record(path, stamp, problems, sources, QUICK if quick else Settings(), budget, click.echo)
    text = render(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    click.echo(f"{len(rows)} rows: {path}")
    good = not left and bool(rows) and not any(row.status in (FAILED, WRONG) for row in rows)
    return stamp, rows, path, good


@click.command()
@head_dim_option(HEAD_DIMS)
@click.option("--no-peers", is_flag=True, help="Only our kernels.")
@click.option("--paged", is_flag=True, help="Prompts of 8k to 32k over pages, against our dense kernels.")
@quick_option
@budget_option
@out_option
@commit_option
def varlen(
    head_dims: tuple[str, ...], no_peers: bool, paged: bool, quick: bool, budget: float, out: Path | None, commit: str
) -> None:
    """Time ragged batches against FlashAttention-3, and against our dense kernels where lengths are equal; write CSV,
    tables and plot. With --paged causal prompts over pages, against the dense kernels of the same softmax.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    need_card("timing ragged batches")
    from . import plot, walk, walk_report
    from .peers import prefill, ragged

    if paged:
        wanted = [int(d) for d in head_dims] or list(HEAD_DIMS)
        prompts = [walk.Mix(f"{n // 1024}k", (n,), *walk.HEADS[d], d, True) for d in wanted for n in PROMPTS]
        paging = {"pages": prefill.paged, "dense": prefill.dense("exp2")}
        *_, good = _run("prefill", prompts, paging, walk_report.prefill_markdown, quick, budget, out, commit)
        sys.exit(0 if good else 1)
    sources: dict[str, Source] = {ragged.OURS: ragged.ours, ragged.DENSE: ragged.dense}
    if not no_peers:
        sources |= {f"fa3_{precision}": ragged.fa3(precision) for precision in ("fp8", "bf16")}
    problems = walk.mixes(int(d) for d in head_dims)
    run = (quick, budget, out, commit)
    stamp, rows, path, good = _run("varlen", problems, sources, walk_report.varlen_markdown, *run)
    try:
        walk_report.draw_varlen(stamp, rows, path.with_suffix(".png"))
    except plot.PlotError as error:
        click.echo(f"no plot: {error}")
    sys.exit(0 if good else 1)


@click.command()
@head_dim_option(WINDOW_HEAD_DIMS)
@click.option("--tokens", type=click.IntRange(min=1), default=16384, show_default=True)
@quick_option
@budget_option
@out_option
@commit_option
def windows(head_dims: tuple[str, ...], tokens: int, quick: bool, budget: float, out: Path | None, commit: str) -> None:
    """Time windows of 256, 1,024 and 4,096 keys, 32 heads on 8, against the causal kernel and the share of its tiles
    that they visit; write CSV and table.

    Exit statuses as those of `varlen`.
    """
    need_card("timing windows")
    from . import walk, walk_report
    from .peers import ragged

    wanted = [int(d) for d in head_dims] or list(WINDOW_HEAD_DIMS)
    problems = [walk.Mix(f"{tokens} tokens", (tokens,), 32, 8, d, True) for d in wanted]
    sources = {ragged.OURS: ragged.windows(WINDOWS)}
    *_, good = _run("windows", problems, sources, walk_report.windows_markdown, quick, budget, out, commit)
    sys.exit(0 if good else 1)
