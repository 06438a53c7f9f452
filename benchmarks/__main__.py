"""``python -m benchmarks``: measure on a card; draw and tabulate anywhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import click

from codegen.keys import PRECISIONS

from . import plot as plotting
from . import report
from .append_commands import append
from .commands import accuracy, overhead, pack, regret, short, tune, ways
from .decode_commands import decode
from .families_commands import families, lengths
from .masks_commands import masks
from .merge_commands import merge
from .model_commands import model
from .options import Wanted, commit_option, need_card, out_option, read_csv, results_folder, shape_options, stop
from .parallel_commands import parallel
from .pictures import pictures
from .results import FAILED, WRONG
from .walk_commands import varlen, windows

PEER_NAMES = tuple(name for name in report.CONTENDERS if name != report.OWN)

csv_argument = click.argument("csv", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group()
def cli() -> None:
    """FP8 attention kernels against their peers on one card, in one run."""


@cli.command()
@click.option("--peer", "peer_names", type=click.Choice(PEER_NAMES), multiple=True, help="Only these peers.")
@click.option("--no-peers", is_flag=True, help="Only our kernels.")
@click.option("--no-own", is_flag=True, help="Only the peers.")
@click.option("--kernel", default="", help="Pin a variant by its id instead of asking the dispatch table.")
@click.option("--all-kernels", is_flag=True, help="Beside the chosen kernel every other one that serves the shape.")
@click.option("--scaling", default="block", show_default=True, help="Scaling mode of our operands.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    default=["fast"],
    help="Our kernels at this precision; repeat to compare. Default: fast.",
)
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=float, default=360.0, show_default=True, help="Seconds after which no shape is begun.")
@out_option
@click.option("--name", default="", help="Stem of the files. Default: the names of the sets.")
@commit_option
@shape_options("grid")
def grid(
    wanted: Wanted,
    peer_names: tuple[str, ...],
    no_peers: bool,
    no_own: bool,
    kernel: str,
    all_kernels: bool,
    scaling: str,
    precisions: tuple[str, ...],
    quick: bool,
    budget: float,
    out: Path | None,
    name: str,
    commit: str,
) -> None:
    """Measure, and write CSV, tables and plot.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    begun = time.monotonic()
    shapes = wanted.shapes
    if no_peers and (no_own or peer_names):
        stop("--no-peers leaves nothing to measure with --no-own, and contradicts --peer")
    if no_own and (kernel or all_kernels):
        stop("--no-own contradicts --kernel and --all-kernels")
    if precisions != ("fast",) and (no_own or kernel or all_kernels):
        stop("--precision is about kernels that the table chooses: --no-own, --kernel, --all-kernels contradict it")
    need_card("measuring", "; `table` and `plot` work from a CSV")
    from . import machine
    from .grid import QUICK, Settings, record
    from .peers import PEERS, Own, Peer

    peers: list[Peer] = [
        Own(scaling=scaling, kernel=kernel, every=all_kernels, call=not all_kernels, asked=asked)
        for asked in dict.fromkeys(() if no_own else precisions)
    ]
    peers += [] if no_peers else [PEERS[peer] for peer in peer_names or PEER_NAMES]
    settings = QUICK if quick else Settings()
    stamp = machine.stamp(commit)
    stamp["settings"] = f"{settings.replays} replays of {settings.target_us:g} us, scaling {scaling}"
    stamp |= {peer.name: peer.version() for peer in peers if peer.available() is None}
    path = results_folder(out, stamp) / f"{name or wanted.name}.csv"
    rows, left = record(path, stamp, shapes, peers, settings, budget, click.echo)
    tables = report.markdown(stamp, rows)
    path.with_suffix(".md").write_text(tables, encoding="utf-8")
    try:
        plotting.draw(stamp, rows, path.with_suffix(".png"))
    except plotting.PlotError as error:
        click.echo(f"no plot: {error}")
    click.echo(tables)
    click.echo(f"{len(rows)} rows in {time.monotonic() - begun:.0f} s: {path}")
    sys.exit(1 if left or any(row.status in (WRONG, FAILED) for row in rows) else 0)


@cli.command()
@csv_argument
def table(csv: Path) -> None:
    """Print the tables of a CSV."""
    click.echo(report.markdown(*read_csv(csv)), nl=False)


@cli.command()
@csv_argument
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: beside the CSV, .png.")
def plot(csv: Path, out: Path | None) -> None:
    """Draw the figure of a CSV."""
    path = out or csv.with_suffix(".png")
    try:
        plotting.draw(*read_csv(csv), path)
    except plotting.PlotError as error:
        stop(str(error))
    click.echo(path)


@cli.command()
@click.argument("csvs", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--out", type=click.File("w", encoding="utf-8", lazy=True), default="-", help="Default: standard output.")
def evidence(csvs: tuple[Path, ...], out: TextIO) -> None:
    """Rewrite measured kernels (of --all-kernels) for the generator; later CSVs win over earlier ones.

    Shapes that are held out (`regret`) are left out, and named.
    """
    from .evidence import records, write
    from .shapes import held_out

    measured = [read_csv(csv) for csv in csvs]
    for label in dict.fromkeys(row.shape.label for _, rows in measured for row in rows if held_out(row.shape)):
        click.echo(f"held out, left out: {label}", err=True)
    write(out, [record for stamp, rows in measured for record in records(stamp, rows)])


@cli.command()
@click.option("--head-dim", type=int, required=True)
@click.option("--seqlen", type=int, default=4096, show_default=True)
@click.option("--mask", type=click.Choice(["full", "causal"]), default="full", show_default=True)
@click.option("--kernel", default="", help="Pin a variant by its id instead of asking the dispatch table.")
def launch(head_dim: int, seqlen: int, mask: str, kernel: str) -> None:
    """Launch our kernel once on a problem of the grid, for a profiler to look at."""
    need_card("a launch")
    import torch

    from .data import make_data
    from .peers import Own
    from .shapes import TOKENS, WIDTH, square

    own = Own(kernel=kernel)
    if (reason := own.available()) is not None:
        stop(reason)
    shape = square(TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, mask == "causal")
    (contender,) = own.prepare(make_data(shape))
    contender.launch()
    torch.cuda.synchronize()
    click.echo(f"{shape.label}: {contender.kernel}")


@cli.command()
def machine() -> None:
    """Print the stamp of this machine as JSON."""
    from .machine import stamp

    click.echo(json.dumps(stamp(), indent=2))


for command in (
    accuracy,
    regret,
    overhead,
    pack,
    parallel,
    pictures,
    short,
    tune,
    decode,
    model,
    varlen,
    ways,
    windows,
    append,
    merge,
    families,
    lengths,
    masks,
):
    cli.add_command(command)

if __name__ == "__main__":
    cli(prog_name="python -m benchmarks")
