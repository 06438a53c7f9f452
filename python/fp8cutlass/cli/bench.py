"""``fp8cutlass bench``: runs the repository's benchmarks where they can measure, else times the emulator."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from .group import need_library
from .sources import repository

REPEATS = 5


@dataclass(frozen=True)
class Problem:
    """Self-attention of (B, H, S, D), small enough for a CPU."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"({self.batch}, {self.heads}, {self.seqlen}, {self.head_dim}) {mask}"


PROBLEMS = tuple(
    Problem(1, heads, seqlen, head_dim, causal)
    for heads, seqlen, head_dim in ((8, 128, 64), (8, 512, 64), (4, 512, 128))
    for causal in (False, True)
)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--emulator", is_flag=True, help="Time the emulator also where there is a card.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, emulator: bool, arguments: tuple[str, ...]) -> None:
    """Time the kernels on a card, or the emulator on this CPU.

    In a checkout, ARGUMENTS are those of `python -m benchmarks`, which measures kernels against their peers; options
    without a command (`--set llm`) are those of its `grid`. Without arguments, its commands are listed where there is a
    card. Elsewhere, and with --emulator, the CPU emulator is timed on
    small problems.
    """
    if set(arguments[:1]) & {"-h", "--help"}:
        click.echo(context.get_help())
        return
    if emulator and arguments:
        raise click.UsageError(f"--emulator takes no further arguments, got {' '.join(arguments)}")
    root = repository()
    if arguments and root is None:
        raise click.UsageError(
            f"{' '.join(arguments)}: these are for the benchmarks of the repository, which are not installed with the "
            "package. Run `python -m fp8cutlass bench` in a checkout; without arguments the emulator is timed"
        )
    need_library()
    if root is not None and (arguments or (not emulator and _card())):
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        from benchmarks.__main__ import cli

        command = ["grid"] if arguments and arguments[0].startswith("-") else []
        cli.main(args=[*command, *arguments] or ["--help"], prog_name="fp8cutlass bench")
    click.echo("\n".join(_preface(root is not None)))
    for line in time_emulator(PROBLEMS):
        click.echo(line)


def _card() -> bool:
    import torch

    return torch.cuda.is_available()


def _preface(checkout: bool) -> Iterator[str]:
    yield "The CPU emulator. It computes what the kernels compute, step by step, and is no fast path: these times say"
    yield "nothing about a card. They tell how long a test on this CPU takes."
    if not checkout:
        yield "Kernels are timed by the repository, which is not here: `python -m fp8cutlass bench grid` in a checkout."
    elif not _card():
        yield "Kernels are timed where torch can use a card, which it cannot here: `fp8cutlass bench grid`."


def median_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of a call in milliseconds, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_emulator(problems: tuple[Problem, ...]) -> Iterator[str]:
    """A line a problem: its time from bf16 tensors, quantisation included, and the kernel that is emulated."""
    import torch

    from .. import attention, supports

    yield f"{'(B, H, S, D)':24} {'ms':>8}  emulated kernel, {torch.get_num_threads()} threads, median of {REPEATS}"
    generator = torch.Generator().manual_seed(0)
    for problem in problems:
        shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
        q, k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3))
        _, kernel = supports(q, k, v, is_causal=problem.causal)

        def call(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, causal: bool = problem.causal
        ) -> object:
            return attention(q, k, v, is_causal=causal)

        yield f"{problem.label:24} {median_ms(call):8.1f}  {kernel}"
