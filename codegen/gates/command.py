"""`python -m codegen gates`: its options. What they ask for is done by `run`, which needs a compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from codegen.decode import decodes_of
from codegen.options import arch_option, choose, emulated_option, filter_option, only_option, profile_option
from codegen.pack import packs_of
from codegen.resident import residents_of
from codegen.table import built

PARTS = ("packs", "decodes", "residents")  # what a report holds beside the kernels of attention
DEFAULT_OUT = Path(__file__).resolve().parent.parent.parent / "build" / "gates"


@click.command()
@arch_option
@profile_option
@only_option
@filter_option
@emulated_option
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Compilers at once. Default: by cores, memory.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_OUT, help="Work files.")
@click.option(
    "--built",
    "build_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read the cubins of this build (its --build-dir) and compile nothing.",
)
@click.option("--report", default=None, help="Default for whole profiles: generated/gates/{arch}_{profile}.txt.")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Only these kernels, and their part of the report: those that quantise and pack, those of decode, those that "
    "keep K and V in shared memory. Repeat for several.",
)
@click.option("--check", "check_only", is_flag=True, help="Compare with the committed report instead of writing it.")
def gates(
    archs: tuple[str, ...],
    profile: str,
    only: tuple[str, ...],
    filters: tuple[str, ...],
    emulated: bool,
    jobs: int | None,
    out: Path,
    build_dir: Path | None,
    report: str | None,
    parts: tuple[str, ...],
    check_only: bool,
) -> None:
    """Compile the kernels, or read those of a build, and hold their registers, memory and instruction mix to what was
    promised. No GPU is needed."""
    from codegen.gates.run import REPORT, run  # lazily: only this command needs a compiler
    from codegen.gates.toolbox import ToolboxError
    from scripts.toolchain import ToolchainError, job_count

    request = choose(archs, profile, only, filters, emulated)
    whole = request.profile == profile
    if check_only and report is None and not whole:
        raise click.ClickException("--check compares whole profiles: leave out --only and --filter, or name a --report")
    if report is not None and len(request.archs) > 1 and "{arch}" not in report:
        raise click.ClickException(f"--report {report} must contain {{arch}}: there are {len(request.archs)} targets")
    if not whole and (unbound := [part for part in parts if part != "packs"]):
        raise click.ClickException(f"--part {unbound[0]} goes with whole profiles: leave out --only and --filter")
    # What a build for this target alone would hold, so that a report does not depend on the other targets.
    chosen = {a: built(request.variants, (a,), emulated or not whole) for a in request.archs}

    def has(part: str) -> bool:
        return part in parts if parts else whole

    try:
        good = run(
            {} if parts else chosen,
            packs={a: packs_of(variants) for a, variants in chosen.items()} if has("packs") else {},
            decodes={a: decodes_of(profile, (a,)) for a in request.archs} if has("decodes") else {},
            residents={a: residents_of(profile, (a,)) for a in request.archs} if has("residents") else {},
            profile=request.profile,
            jobs=jobs or job_count(),
            out=out,
            built=build_dir,
            pattern=report or (REPORT if whole else None),
            check_only=check_only,
            say=click.echo,
        )
    except (ToolboxError, ToolchainError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if good else 1)
