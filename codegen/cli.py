"""The command line. Every answer but `gates` works without GPU, nvcc or torch."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from codegen.arch import TARGETS
from codegen.axes import Operand, Out, Scaling
from codegen.cover import committed
from codegen.decode import ALL as ALL_DECODES
from codegen.decode import HEAD_DIMS as DECODE_HEAD_DIMS
from codegen.decode import candidates as decode_candidates
from codegen.decode_ledger import explain as explain_decode
from codegen.decode_ledger import render as render_decode_ledger
from codegen.evidence import EvidenceError
from codegen.explain import explain as explain_text
from codegen.families import model_card
from codegen.gates.command import gates
from codegen.keys import LOADS, PRECISIONS, Key, load_of, seqlen_bucket
from codegen.ledger import counts
from codegen.ledger import render as render_ledger
from codegen.matrix import head_dims
from codegen.options import (
    arch_option,
    choose,
    emulated_option,
    filter_option,
    given,
    only_option,
    profile_option,
    requested,
)
from codegen.outputs import files
from codegen.profiles import PROFILES, of_profile, profile_of
from codegen.render import environment, render_decode, render_kernel
from codegen.select import select
from codegen.writer import compare, is_ours, write

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "generated"


class _Commands(click.Group):
    """Measurements that cannot be used are an error of every command, not a traceback."""

    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except EvidenceError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, invoke_without_command=True)
@arch_option
@profile_option
@only_option
@filter_option
@emulated_option
@click.option(
    "--candidates",
    "head_dims",
    multiple=True,
    type=click.Choice([str(d) for d in DECODE_HEAD_DIMS]),
    help="Also decode kernels of other shapes with this head_dim, to be timed.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_OUT, help="Default: generated/."
)
@click.option(
    "--check", "check_only", is_flag=True, help="Render in memory and compare with what is on disk; write nothing."
)
@click.pass_context
def main(
    context: click.Context,
    archs: tuple[str, ...],
    profile: str,
    only: tuple[str, ...],
    filters: tuple[str, ...],
    emulated: bool,
    head_dims: tuple[str, ...],
    out: Path,
    check_only: bool,
) -> None:
    """Render the FP8 attention kernels, their registry, dispatch table, manifest and ledger.

    Another folder than generated/ gets all kernels, generated/ those in which every kind of line occurs, and the
    digests of all.
    """
    if context.invoked_subcommand is not None:
        if ignored := [p.opts[0] for p in context.command.params if p.name and given(p.name)]:
            raise click.UsageError(
                f"{', '.join(ignored)}: options of `{context.invoked_subcommand}` come after its name"
            )
        return
    request = choose(archs, profile, only, filters, emulated)
    if head_dims:
        more = decode_candidates(tuple(map(int, head_dims)), request.archs)
        request = replace(request, profile="custom", decodes=request.decodes + more)
    if not check_only and request.profile == "custom" and out.resolve() == DEFAULT_OUT:
        raise click.ClickException(
            "--only, --filter and --candidates make another set of kernels: name another folder with --out"
        )
    rendered = files(request, select())
    if out.resolve() == DEFAULT_OUT:
        rendered = committed(rendered)
    if not check_only:
        if not is_ours(out):
            raise click.ClickException(
                f"--out {out} holds other files and no manifest.json of the generator: name a new or empty folder"
            )
        try:
            result = write(out, rendered)
        except OSError as error:
            raise click.ClickException(f"--out {out}: {error}") from error
        click.echo(
            f"{len(request.variants)} kernels for {', '.join(request.archs)} (profile {request.profile}) in {out}: "
            f"{len(result.written)} files written, {len(result.unchanged)} unchanged, {len(result.removed)} removed"
        )
        return
    difference = compare(out, rendered)
    if difference.clean:
        click.echo(f"{out} is what the generator writes: {len(rendered)} files, {len(request.variants)} kernels")
        return
    for title, names in (
        ("missing", difference.missing),
        ("orphan", difference.orphans),
        ("changed", difference.changed),
    ):
        for name in names:
            click.echo(f"{title}: {name}")
    click.echo(difference.diff)
    click.echo(f"{out} is not what the generator writes. Run `python -m codegen` and commit the result.", err=True)
    sys.exit(1)


@main.command("list")
@arch_option
@profile_option
@only_option
@filter_option
@emulated_option
def list_variants(
    archs: tuple[str, ...], profile: str, only: tuple[str, ...], filters: tuple[str, ...], emulated: bool
) -> None:
    """The ids of the emitted variants, with the smallest profile of each."""
    for v in choose(archs, profile, only, filters, emulated).variants:
        click.echo(f"{profile_of(v):8} {v.id}")


@main.command()
@click.argument("variant_id", metavar="ID")
def render(variant_id: str) -> None:
    """The source of one kernel, emitted or outranked, or of one of decode."""
    decodes = {d.id: d for d in ALL_DECODES}
    if variant_id in decodes:
        text = render_decode(decodes[variant_id], environment())
    else:
        text = render_kernel(requested(variant_id), environment())
    click.echo(text, nl=False)


@main.command()
def count() -> None:
    """How many points are declared, emitted and rejected, by rule and profile."""
    selection = select()
    click.echo(
        f"declared {selection.declared:,} = emitted {len(selection.emitted):,} + rejected {len(selection.rejected):,}"
    )
    for rule, number in sorted(counts(selection).items()):
        click.echo(f"  rejected {number:6,}  {rule}")
    by_profile = Counter(profile_of(v) for v in selection.emitted)
    total = 0
    for profile in PROFILES:
        total += by_profile[profile]
        click.echo(f"  profile  {total:6,}  {profile}")


@main.command()
def ledger() -> None:
    """Every declared point that became no kernel, and why."""
    click.echo(render_ledger(select()) + render_decode_ledger(), nl=False)


@main.command()
@click.option("--arch", type=click.Choice(list(TARGETS)), required=True)
@click.option("--head-dim", type=click.IntRange(min=1), required=True)
@click.option(
    "--rows", type=click.IntRange(min=1), required=True, help="Query tokens of a sequence x heads of a group."
)
def decode(arch: str, head_dim: int, rows: int) -> None:
    """Which kernel of decode a call over pages gets, and why."""
    click.echo(explain_decode(arch, head_dim, rows))


@main.command()
@click.option("--arch", type=click.Choice(list(TARGETS)), required=True)
@click.option("--head-dim", type=int, required=True)
@click.option("--seqlen", type=click.IntRange(min=0), required=True, help="Number of keys.")
@click.option("--dtype", type=click.Choice([str(x) for x in Operand]), default="e4m3", show_default=True)
@click.option("--out-dtype", type=click.Choice([str(x) for x in Out]), default="bf16", show_default=True)
@click.option("--scaling", type=click.Choice([str(x) for x in Scaling]), default="block", show_default=True)
@click.option("--causal/--full", default=False, show_default=True)
@click.option("--precision", type=click.Choice(PRECISIONS), default="fast", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--queries", type=click.IntRange(min=0), default=None, help="Default: as many as keys.")
@click.option("--load", type=click.Choice(LOADS), default=None, help="Default: from batch, heads and queries.")
@profile_option
def explain(
    arch: str,
    head_dim: int,
    seqlen: int,
    dtype: str,
    out_dtype: str,
    scaling: str,
    causal: bool,
    precision: str,
    batch: int,
    heads: int,
    queries: int | None,
    load: str | None,
    profile: str,
) -> None:
    """Which kernel a problem gets, and why."""
    served = head_dims(arch)
    padded = next((d for d in served if 0 < head_dim <= d), None)
    if padded is None:
        raise click.ClickException(
            f"--head-dim {head_dim}: kernels exist for {', '.join(map(str, served))}; smaller ones are padded up"
        )
    if padded != head_dim:
        click.echo(f"head_dim {head_dim} is zero-padded to {padded}")
    key = Key(
        arch=arch,
        head_dim=padded,
        seqlen=seqlen_bucket(seqlen),
        dtype=Operand(dtype),
        out=Out(out_dtype),
        scaling=Scaling(scaling),
        causal=causal,
        precision=precision,
        load=load or load_of(batch * heads, seqlen if queries is None else queries, model_card(arch).sms),
    )
    click.echo(explain_text(key, of_profile(select().emitted, profile)))


main.add_command(gates)
