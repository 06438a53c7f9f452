"""The command of whole forwards: CSV, tables and plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .model.problems import PROBLEMS, TINY
from .options import commit_option, need_card, out_option, results_folder, stop
from .outputs import from_option, read_rows, write_tables
from .results import FAILED, WRONG

if TYPE_CHECKING:
    from .model.measure import ModelTime


@click.command()
@click.option("--only", type=click.Choice(list(PROBLEMS)), multiple=True, help="Only this model; repeat for more.")
@click.option("--no-peers", is_flag=True, help="Only torch and ours.")
@click.option("--quick", is_flag=True, help="Fewer replays: two minutes on an H100.")
@click.option("--tiny", is_flag=True, help="Tiny sizes, without a card on the CPU: does it run? Needs --out.")
@click.option("--budget", type=click.FloatRange(min=0), default=300.0, show_default=True, help="Seconds.")
@from_option
@out_option
@commit_option
def model(
    only: tuple[str, ...],
    no_peers: bool,
    quick: bool,
    tiny: bool,
    budget: float,
    csv: Path | None,
    out: Path | None,
    commit: str,
) -> None:
    """Time whole forwards of a stack of video blocks and of an 8B language model, with torch's SDPA, with
    FlashAttention-3 in bf16 and with ours; write CSV, tables and plot.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    if csv is not None:
        _again(csv)
        return
    if tiny and out is None:
        stop("--tiny measures nothing that is worth keeping beside results: name a folder with --out")
    if not tiny:
        need_card("timing whole forwards", "; `model --from` works from a CSV, `model --tiny` runs anywhere")
    import torch

    from . import machine
    from .grid import QUICK, Settings
    from .model.measure import ModelTime, measure
    from .peers import PEERS, Own
    from .turns import record

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (reason := Own().available()) is not None:
        stop(reason)
    stamp = {"card": "CPU"} | machine.stamp(commit)
    if not no_peers and PEERS["fa3_bf16"].available() is None:
        stamp["fa3_bf16"] = PEERS["fa3_bf16"].version()
    # Forwards take up to half a second: some replays each, whatever that takes together.
    settings = replace(QUICK, most_us=1.5e6) if quick else Settings(most_us=5e6)
    path = results_folder(out, stamp) / "model.csv"
    wanted = [problem for name, problem in (TINY if tiny else PROBLEMS).items() if not only or name in only]
    rows, left = record(
        path, stamp, ModelTime, wanted, lambda problem: measure(problem, device, settings, not no_peers),
        lambda problem: problem.label, "models", budget, click.echo,
    )  # fmt: skip
    _again(path)  # as its CSV has it
    bad = bool(left) or any(row.status in (FAILED, WRONG) for row in rows)
    sys.exit(1 if bad else 0)


def write(path: Path, stamp: dict[str, str], rows: Sequence[ModelTime]) -> None:
    """The tables and the plot beside a CSV."""
    from .model import report

    write_tables(path, report.markdown(stamp, rows), partial(report.draw, stamp, rows))


def _again(csv: Path) -> None:
    from .model.measure import ModelTime

    write(csv, *read_rows(csv, ModelTime))
