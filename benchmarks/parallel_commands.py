"""The command of attention over several cards: CSV, tables and plot, by one command for any number of cards."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import click

from . import parallel_model
from .options import commit_option, need_card, out_option, results_folder, stop
from .parallel_model import Problem
from .parallel_rows import ParallelTime
from .results import FAILED, WRONG, read_records, write_records

SHAPES = ((40, 40, 128, False), (24, 24, 128, False), (32, 8, 128, True), (12, 12, 64, False), (24, 24, 64, True))
QUICK_SHAPES = ((40, 40, 128, False), (32, 8, 128, True), (24, 24, 64, False))
TOKENS, QUICK_TOKENS = (32768, 131072, 524288), (32768, 131072)
ONE_CARD = 3e15  # FLOP: a larger problem is not run on one card, and not compared with it
REPETITIONS, QUICK_REPETITIONS = 7, 3


@click.command()
@click.option("--tokens", "lengths", type=int, multiple=True, help="Of the whole sequence; repeat for several.")
@click.option("--contender", "names", multiple=True, help="Only these; repeat for several.")
@click.option("--ranks", type=click.IntRange(min=2), help="Default: all cards of this machine.")
@click.option(
    "--multiple",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tokens of which our shards have multiples: with 768 no rows move between ranks.",
)
@click.option("--quick", is_flag=True, help="Fewer problems and repetitions: three minutes on two cards.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="Seconds; then no problem is begun.",
)
@click.option("--model", is_flag=True, help="Print the model's table for 2 to 64 cards; nothing is measured.")
@click.option(
    "--from", "csv", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write tables and plot of this CSV again; nothing is measured.",
)  # fmt: skip
@out_option
@commit_option
def parallel(
    lengths: tuple[int, ...],
    names: tuple[str, ...],
    ranks: int | None,
    multiple: int,
    quick: bool,
    budget: float,
    model: bool,
    csv: Path | None,
    out: Path | None,
    commit: str,
) -> None:
    """Time all-gather, Ulysses, ring and both together over NCCL, beside torch's context_parallel in bf16.

    Starts a process for each card, or runs as one of torchrun's. Ends with 2 where nothing can be measured, with 1
    where a contender failed, a result was wrong or time ran out.
    """
    if model:
        click.echo(parallel_model.table())
        return
    if csv is not None:
        try:
            write(csv, *read_records(csv, ParallelTime))
        except ValueError as error:
            stop(str(error))
        return
    need_card("measuring over several cards")
    import torch

    given = (lengths or (QUICK_TOKENS if quick else TOKENS), names, multiple, quick, budget, out, commit)
    if "RANK" in os.environ:  # torchrun
        sys.exit(_rank(int(os.environ["RANK"]), *given))
    count = ranks or torch.cuda.device_count()
    if not 2 <= count <= torch.cuda.device_count():
        stop(f"measuring over several cards needs 2 at least, and this machine has {torch.cuda.device_count()}")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    processes = torch.multiprocessing.spawn(_spawned, given, nprocs=count, join=False)
    try:
        while not processes.join():
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        sys.exit(error.exit_code)


def _spawned(rank: int, *given: object) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(_rank(rank, *given))  # type: ignore[arg-type]


def _rank(
    rank: int,
    lengths: tuple[int, ...],
    names: tuple[str, ...],
    multiple: int,
    quick: bool,
    budget: float,
    out: Path | None,
    commit: str,
) -> int:
    """One process; the first writes the files. Exit code."""
    import torch
    import torch.distributed as dist

    from . import machine
    from .parallel import METHODS, TORCH, begin, measured

    begin()
    began, ranks = time.monotonic(), dist.get_world_size()
    stamp = machine.stamp(commit) | {"cards": str(ranks), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    stamp |= {"shards of multiples of": str(multiple)} if multiple > 1 else {}
    path = results_folder(out, stamp) / f"parallel_{ranks}{f'_multiple_{multiple}' if multiple > 1 else ''}.csv"
    rows: list[ParallelTime] = []
    left = False
    for tokens in lengths:
        for heads, kv_heads, head_dim, causal in QUICK_SHAPES if quick else SHAPES:
            over = torch.tensor([float(time.monotonic() - began > budget)], device="cuda")
            dist.all_reduce(over, dist.ReduceOp.MAX)  # all ranks stop at the same problem
            if float(over):
                left = True
                continue
            p = Problem(ranks, tokens, heads, kv_heads, head_dim, causal)
            for row in measured(
                p,
                names or (*METHODS, *TORCH),
                QUICK_REPETITIONS if quick else REPETITIONS,
                p.flop <= ONE_CARD,
                multiple,
            ):
                rows.append(row)
                if rank == 0:
                    with path.open("w", encoding="utf-8") as file:
                        write_records(file, stamp, ParallelTime, rows)
                    problem = f"{tokens} {heads}/{kv_heads}x{head_dim} {row.mask}"
                    click.echo(f"{problem} {row.contender}: {row.us} us {row.status} {row.reason}")
            torch.cuda.empty_cache()
    if rank == 0:
        write(path, stamp, rows)
        click.echo(f"{len(rows)} rows in {time.monotonic() - began:.0f} s: {path}")
    dist.destroy_process_group()
    return 1 if left or any(row.status in (WRONG, FAILED) for row in rows) else 0


def write(path: Path, stamp: dict[str, str], rows: list[ParallelTime]) -> None:
    """The tables and the plot beside a CSV."""
    from . import parallel_report, plot

    text = parallel_report.markdown(stamp, rows)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    click.echo(text)
    try:
        parallel_report.draw(stamp, rows, path.with_suffix(".png"))
    except plot.PlotError as error:
        click.echo(f"no plot: {error}")
