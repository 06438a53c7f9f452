"""``python -m benchmarks``: measure on a card; draw and tabulate anywhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import click

from . import plot as plotting
from . import report
from .options import ShapeType, Wanted, need_card, results_folder, shape_options, stop
from .results import FAILED, WRONG, Row, read
from .shapes import Shape

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
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=float, default=360.0, show_default=True, help="Seconds after which no shape is begun.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: results/<card>.")
@click.option("--name", default="", help="Stem of the files. Default: the names of the sets.")
@click.option("--commit", default="", help="For the stamp, where the checkout has no repository.")
@shape_options("grid")
def grid(
    wanted: Wanted,
    peer_names: tuple[str, ...],
    no_peers: bool,
    no_own: bool,
    kernel: str,
    all_kernels: bool,
    scaling: str,
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
    need_card("measuring", "; `table` and `plot` work from a CSV")
    from . import machine
    from .grid import QUICK, Settings, record
    from .peers import PEERS, Own, Peer

    peers: list[Peer] = [] if no_own else [Own(scaling=scaling, kernel=kernel, every=all_kernels, call=not all_kernels)]
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
    click.echo(report.markdown(*_read(csv)), nl=False)


@cli.command()
@csv_argument
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: beside the CSV, .png.")
def plot(csv: Path, out: Path | None) -> None:
    """Draw the figure of a CSV."""
    path = out or csv.with_suffix(".png")
    try:
        plotting.draw(*_read(csv), path)
    except plotting.PlotError as error:
        stop(str(error))
    click.echo(path)


@cli.command()
@click.argument("csvs", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--out", type=click.File("w", encoding="utf-8", lazy=True), default="-", help="Default: standard output.")
def evidence(csvs: tuple[Path, ...], out: TextIO) -> None:
    """Rewrite measured kernels (of --all-kernels) for the generator; later CSVs win over earlier ones."""
    from .evidence import records, write

    write(out, [record for csv in csvs for record in records(*_read(csv))])


def _read(csv: Path) -> tuple[dict[str, str], list[Row]]:
    try:
        return read(csv)
    except ValueError as error:
        stop(str(error))
        raise


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
@click.option(
    "--from", "csv", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Judge this run again."
)
@click.option("--thorough", is_flag=True, help="Replay as long as `grid` does.")
@click.option("--budget", type=float, default=280.0, show_default=True, help="Seconds after which no shape is begun.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: results/<card>.")
@click.option("--name", default="regret", show_default=True, help="Stem of the files.")
@click.option("--commit", default="", help="For the stamp, where the checkout has no repository.")
@shape_options("named")
def regret(
    wanted: Wanted, csv: Path | None, thorough: bool, budget: float, out: Path | None, name: str, commit: str
) -> None:
    """Time every built kernel that serves a shape, and say how often the chosen one is within 3% of the best.

    Ends with 0 where it is in 95% of all shapes, and of those that nothing was tuned on.
    """
    from .regret import judge, markdown, met

    begun = time.monotonic()
    if csv is not None:
        stamp, rows = _read(csv)
        left, path = 0, csv
    else:
        need_card("measuring", "; --from judges the CSV of a run")
        from . import machine
        from .grid import QUICK, Settings, record
        from .peers import Own

        own = Own(every=True)
        if (reason := own.available()) is not None:
            stop(reason)
        stamp = machine.stamp(commit)
        path = results_folder(out, stamp) / f"{name}.csv"
        rows, left = record(path, stamp, wanted.shapes, [own], Settings() if thorough else QUICK, budget, click.echo)
    text = markdown(stamp, rows)
    if csv is None:
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        click.echo(f"{len(rows)} rows in {time.monotonic() - begun:.0f} s: {path}")
    click.echo(text)
    sys.exit(0 if met(judge(rows)) and not left else 1)


@cli.command()
@click.option("--shape", type=ShapeType(), default="1,1,64,64", show_default=True, help="Small: the card must keep up.")
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True, help="Between two waits.")
@click.option("--batches", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: results/<card>.")
@click.option("--commit", default="", help="For the stamp, where the checkout has no repository.")
def overhead(shape: Shape, calls: int, batches: int, out: Path | None, commit: str) -> None:
    """Measure what an eager call costs the host, and what it is made of."""
    need_card("the host time of a launch")
    import torch

    from . import machine, overhead
    from .peers import Own

    if (reason := Own().available()) is not None:
        stop(reason)
    todo = overhead.steps(shape)
    found, failed = overhead.measure(todo, torch.cuda.synchronize, calls, batches)
    modules = overhead.by_module(next(iter(todo.values())), calls * batches // 4 or 1)
    stamp = machine.stamp(commit)
    folder = results_folder(out, stamp)
    with (folder / "overhead.csv").open("w", encoding="utf-8", newline="") as file:
        overhead.write_csv(file, stamp, found)
    text = overhead.markdown(stamp, shape, found, failed, modules)
    (folder / "overhead.md").write_text(text, encoding="utf-8")
    click.echo(text)
    sys.exit(1 if failed else 0)


@cli.command()
def machine() -> None:
    """Print the stamp of this machine as JSON."""
    from .machine import stamp

    click.echo(json.dumps(stamp(), indent=2))


if __name__ == "__main__":
    cli(prog_name="python -m benchmarks")
