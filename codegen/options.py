"""Options that commands of the generator share: which targets, which variants."""

from __future__ import annotations

import click
from click.core import ParameterSource

from codegen.arch import TARGETS
from codegen.decode import ALL as ALL_DECODES
from codegen.decode import decodes_of
from codegen.legal import check as check_rules
from codegen.matrix import undeclared
from codegen.outputs import Request
from codegen.profiles import PROFILES, of_profile
from codegen.resident import ALL as ALL_RESIDENTS
from codegen.resident import TARGET as RESIDENT_TARGET
from codegen.resident import residents_of
from codegen.select import select
from codegen.table import built
from codegen.variant import AXES, Variant, axis_text, parse_id


def _targets(archs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(archs or tuple(TARGETS)))


def _matches(v: Variant, conditions: list[tuple[str, str]]) -> bool:
    return all(axis_text(getattr(v, axis)) == value for axis, value in conditions)


def _conditions(filters: tuple[str, ...]) -> list[tuple[str, str]]:
    conditions = []
    for text in filters:
        axis, separator, value = text.partition("=")
        if not separator or axis not in AXES:
            raise click.ClickException(f"--filter '{text}': write AXIS=VALUE with AXIS one of {', '.join(AXES)}")
        conditions.append((axis, value.lower()))
    return conditions


def choose(
    archs: tuple[str, ...], profile: str, only: tuple[str, ...], filters: tuple[str, ...], emulated: bool
) -> Request:
    """The variants that the options ask for. Whatever cannot be had is an error that says why."""
    targets = _targets(archs)
    name = profile
    if only:
        if given("profile"):
            raise click.ClickException("--only names the variants: leave out --profile")
        by_id = {d.id: d for d in ALL_DECODES}
        named = tuple(d for d in ALL_DECODES if d.id in only)
        for d in named:
            if d.target not in targets:
                raise click.ClickException(f"--only {d.id} is for {d.target}, --arch has {', '.join(targets)}")
        kept = tuple(r for r in ALL_RESIDENTS if r.id in only)
        if kept and RESIDENT_TARGET not in targets:
            raise click.ClickException(f"--only {kept[0].id} is for {RESIDENT_TARGET}, --arch has {', '.join(targets)}")
        others = set(only) - by_id.keys() - {r.id for r in kept}
        variants = tuple(sorted((requested(i) for i in others), key=lambda v: v.id))
        name = "custom"
    else:
        variants = built(of_profile(select().emitted, profile), targets, emulated)
    conditions = _conditions(filters)
    if conditions:
        known = variants
        variants, name = tuple(v for v in variants if _matches(v, conditions)), "custom"
        if not variants:
            values = "; ".join(
                f"{a} has {', '.join(sorted({axis_text(getattr(v, a)) for v in known}))}" for a, _ in conditions
            )
            raise click.ClickException(
                f"no emitted variant of profile {profile} matches {' '.join(filters)} ({values})"
            )
    decodes = named if only else decodes_of(profile, targets) if name == profile else ()
    residents = kept if only else residents_of(profile, targets) if name == profile else ()
    everywhere = emulated or name == "custom"  # who names kernels wants them wherever they run
    return Request(
        archs=targets, profile=name, variants=variants, decodes=decodes, residents=residents, emulated=everywhere
    )


def given(parameter: str) -> bool:
    """Whether an option of the running command was written on the command line."""
    return click.get_current_context().get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def requested(variant_id: str) -> Variant:
    """The legal variant of an id, or an error that says what is wrong with it."""
    try:
        v = parse_id(variant_id)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if reason := undeclared(v):
        raise click.ClickException(f"{variant_id}: {reason}")
    if rejection := check_rules(v):
        raise click.ClickException(f"{variant_id} is illegal. {rejection.rule}: {rejection.message}")
    return v


arch_option = click.option(
    "--arch", "archs", multiple=True, type=click.Choice(list(TARGETS)), help="Target; repeat for several. Default: all."
)
profile_option = click.option("--profile", type=click.Choice(PROFILES), default="release", show_default=True)
only_option = click.option(
    "--only", multiple=True, metavar="ID", help="Emit just this variant, or kernel of another kind; repeat for several."
)
emulated_option = click.option(
    "--emulated", is_flag=True, help="Also all kernels that are only emulated on a target, for tests of them there."
)
filter_option = click.option(
    "--filter", "filters", multiple=True, metavar="AXIS=VALUE", help="Keep variants with this axis value."
)
