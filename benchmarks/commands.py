"""The commands about the choice of a kernel: how good it is, what it costs the host, and how to tune it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from codegen.arch import TARGETS
from codegen.axes import Softmax
from codegen.evidence import digest

from .options import (
    ShapeType,
    Wanted,
    commit_option,
    need_card,
    out_option,
    read_csv,
    results_folder,
    shape_options,
    stop,
)
from .report import BF16_PEERS
from .results import FAILED, WRONG, write_records
from .shapes import GRID_HEAD_DIMS, GRID_SEQLENS, MAX_HEAD_DIM, TOKENS, WIDTH, Shape, square

SOFTMAXES = [str(softmax) for softmax in Softmax]


@click.command()
@click.option(
    "--from", "csv", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Judge this run again."
)
@click.option("--thorough", is_flag=True, help="Replay as long as `grid` does.")
@click.option("--budget", type=float, default=280.0, show_default=True, help="Seconds after which no shape is begun.")
@out_option
@click.option("--name", default="regret", show_default=True, help="Stem of the files.")
@commit_option
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
        stamp, rows = read_csv(csv)
        left, path = 0, csv
    else:
        need_card("measuring", "; --from judges the CSV of a run")
        from . import machine
        from .grid import QUICK, Settings, record
        from .peers import Own

        own = Own(every=True)
        if (reason := own.available()) is not None:
            stop(reason)
        stamp = machine.stamp(commit) | {"measurements": digest()}
        path = results_folder(out, stamp) / f"{name}.csv"
        rows, left = record(path, stamp, wanted.shapes, [own], Settings() if thorough else QUICK, budget, click.echo)
    text = markdown(stamp, rows)
    if csv is None:
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        click.echo(f"{len(rows)} rows in {time.monotonic() - begun:.0f} s: {path}")
    click.echo(text)
    sys.exit(0 if met(judge(rows)) and not left else 1)


def _save(folder: Path, name: str, stamp: Mapping[str, str], kind: type, records: Iterable[object], text: str) -> None:
    """Write the CSV of a run and its tables."""
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        write_records(file, stamp, kind, records)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


@click.command()
@click.option("--shape", type=ShapeType(), default="1,1,64,64", show_default=True, help="Small: the card must keep up.")
@click.option("--calls", type=click.IntRange(min=1), default=50, show_default=True, help="Between two waits.")
@click.option("--batches", type=click.IntRange(min=1), default=40, show_default=True)
@out_option
@commit_option
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
    text = overhead.markdown(stamp, shape, found, failed, modules)
    _save(folder, "overhead", stamp, overhead.HostTime, found, text)
    click.echo(text)
    sys.exit(1 if failed else 0)


@click.command()
@click.option(
    "--head-dim", "head_dims", type=click.IntRange(1, MAX_HEAD_DIM), multiple=True, help="Default: 64, 128 and 256."
)
@click.option("--seqlen", type=click.Choice([str(s) for s in GRID_SEQLENS]), default="4096", show_default=True)
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@out_option
@commit_option
def pack(head_dims: tuple[int, ...], seqlen: str, quick: bool, out: Path | None, commit: str) -> None:
    """Time the kernel that quantises and packs Q, K and V of 16,384 tokens x 2048, in each of its forms, and write
    CSV and table."""
    if wrong := [d for d in head_dims if WIDTH % d]:
        stop(f"--head-dim {wrong[0]}: heads x head_dim are {WIDTH}")
    need_card("timing the kernel that packs")
    from . import machine, pack
    from .grid import QUICK, Settings
    from .peers import Own

    begun = time.monotonic()
    if (reason := Own().available()) is not None:
        stop(reason)
    stamp = machine.stamp(commit)
    settings = (QUICK if quick else Settings()).quantise
    found, failed = [], []
    for head_dim in dict.fromkeys(head_dims or GRID_HEAD_DIMS):
        shape = square(TOKENS // int(seqlen), WIDTH // head_dim, int(seqlen), head_dim, False)
        rows, wrong_forms = pack.measure(shape, settings)
        found += rows
        failed += wrong_forms
        click.echo(f"{time.monotonic() - begun:5.0f} s  {pack.brief(shape, rows)}")
    folder = results_folder(out, stamp)
    text = pack.markdown(stamp, found, failed)
    _save(folder, "pack", stamp, pack.PackTime, found, text)
    click.echo(text)
    sys.exit(1 if failed or not found else 0)


@click.command()
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=float, default=120.0, show_default=True, help="Seconds after which no shape is begun.")
@out_option
@commit_option
@shape_options("grid")
def ways(wanted: Wanted, quick: bool, budget: float, out: Path | None, commit: str) -> None:
    """Time whole calls from bf16 with everything packed before, with Q left to the attention kernel, and with K and V
    handed over to it while it runs, and write CSV and table."""
    need_card("timing whole calls")
    from . import machine
    from .grid import QUICK, Settings, record
    from .ways import Ways, markdown

    peer = Ways()
    if (reason := peer.available()) is not None:
        stop(reason)
    stamp = machine.stamp(commit)
    path = results_folder(out, stamp) / "ways.csv"
    rows, left = record(path, stamp, wanted.shapes, [peer], QUICK if quick else Settings(), budget, click.echo)
    text = markdown(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    sys.exit(1 if left or any(row.status in (FAILED, WRONG) for row in rows) else 0)


@click.command()
@click.option("--from", "csv", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Tables of this CSV.")
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--budget", type=float, default=200.0, show_default=True, help="Seconds after which no shape is begun.")
@out_option
@commit_option
def short(csv: Path | None, quick: bool, budget: float, out: Path | None, commit: str) -> None:
    """Time whole calls from bf16 on 64 to 1,024 keys beside the bf16 kernels, and write CSV, tables and plot.

    Ends with 2 where nothing can be measured, with 1 where a contender failed, a result was wrong or time ran out.
    """
    from . import plot, short

    left = 0
    if csv is not None:
        path, (stamp, rows) = csv, read_csv(csv)
    else:
        need_card("timing whole calls", "; --from works from a CSV")
        from . import machine
        from .grid import QUICK, Settings, record
        from .peers import PEERS

        settings = QUICK if quick else Settings()
        peers = [short.Calls(), *(PEERS[name] for name in BF16_PEERS)]
        if (reason := peers[0].available()) is not None:
            stop(reason)
        stamp = machine.stamp(commit) | {short.COPY: f"{short.copy_tb_per_s(settings):.3f}"}
        stamp |= {peer.name: peer.version() for peer in peers if peer.available() is None}
        path = results_folder(out, stamp) / "short.csv"
        shapes = [*short.batches(), *short.singles()]
        rows, left = record(path, stamp, shapes, peers, settings, budget, click.echo)
    text = short.markdown(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    try:
        short.draw(stamp, rows, path.with_suffix(".png"))
    except plot.PlotError as error:
        click.echo(f"no plot: {error}")
    click.echo(text)
    sys.exit(1 if left or any(row.status in (FAILED, WRONG) for row in rows) else 0)


@click.command()
@out_option
@commit_option
def accuracy(out: Path | None, commit: str) -> None:
    """Compare what calls of ours and the peers lose on the same inputs, and write CSV, table and plot."""
    need_card("running the peers")
    from . import accuracy, machine, plot
    from .peers import PEERS

    ours = accuracy.Calls()
    if (reason := ours.available()) is not None:
        stop(reason)
    peers = [ours, *(PEERS[name] for name in accuracy.PEER_NAMES)]
    stamp = machine.stamp(commit) | {peer.name: peer.version() for peer in peers if peer.available() is None}
    losses = []
    for case in accuracy.CASES:
        losses += accuracy.measure(case, peers)
        click.echo(f"{case.inputs}, {case.shape.label}: done")
    folder = results_folder(out, stamp)
    text = accuracy.markdown(stamp, losses)
    _save(folder, "accuracy_peers", stamp, accuracy.Loss, losses, text)
    try:
        plot.draw_losses(stamp, losses, folder / "accuracy_peers.png")
    except plot.PlotError as error:
        click.echo(f"no plot: {error}")
    click.echo(text)
    sys.exit(1 if any(loss.status == FAILED for loss in losses) else 0)


@click.command()
@click.option("--arch", type=click.Choice(list(TARGETS)), default="sm90a", show_default=True)
@click.option("--softmax", "softmaxes", type=click.Choice(SOFTMAXES), multiple=True, help="Repeatable; default all.")
@click.option("--most", type=click.IntRange(min=0), default=0, help="Candidates of a cell, by the model; 0 takes all.")
@click.option("--plan", "plan_only", is_flag=True, help="Say what would be built and timed, and stop.")
@click.option("--build-only", is_flag=True, help="Build the candidates, which needs no card, and stop.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once. Default: by cores and memory.")
@click.option("--budget", type=float, default=480.0, show_default=True, help="Seconds for everything after the build.")
@out_option
@commit_option
@shape_options("named")
def tune(
    wanted: Wanted,
    arch: str,
    softmaxes: tuple[str, ...],
    most: int,
    plan_only: bool,
    build_only: bool,
    jobs: int | None,
    budget: float,
    out: Path | None,
    commit: str,
) -> None:
    """Build the kernels that the matrix declares for the shapes, check and time them, write rows of tuning/ and
    regenerate the table by them.

    Shapes that are held out (`regret`) are left out. Ends with 1, and changes nothing, where a shape would get a slower
    kernel than it has, or the time does not suffice.
    """
    from .candidates import refusal, tunable

    if reason := refusal(arch):
        stop(reason)
    shapes = tunable(wanted.shapes)
    if not shapes:
        stop("no shape is left: all are held out, or of a head_dim without kernels")
    if not (plan_only or build_only):
        need_card("timing", "; --plan says what would be timed, --build-only builds it")
    from .tune import TuneError, build, make_plan, tune_on_card

    plan = make_plan(arch, shapes, [Softmax(s) for s in softmaxes] or list(Softmax), most)
    for (head_dim, causal, softmax), kernels in plan.kernels.items():
        mask = "causal" if causal else "full"
        count = len(plan.shapes[head_dim, causal, softmax])
        click.echo(f"head_dim {head_dim} {mask} {softmax}: {len(kernels)} candidates on {count} shapes")
    held = len(wanted.shapes) - len(shapes)
    click.echo(f"{len(plan.ids)} kernels to build; about {plan.seconds:.0f} s of an H200; {held} shapes are left out")
    if plan_only:
        return
    try:
        library = build(plan, jobs, click.echo)
        if not build_only:
            count = tune_on_card(plan, library, budget, lambda stamp: results_folder(out, stamp), commit, click.echo)
            click.echo(f"{count} rows in the generator's file; commit it with generated/")
    except TuneError as error:
        click.echo(f"benchmarks: {error}", err=True)
        sys.exit(1)
