"""The command of model families: CSV and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .families.cases import CASES, FAMILIES, Case
from .options import commit_option, need_card, out_option, results_folder, stop
from .outputs import from_option, read_rows, write_tables

if TYPE_CHECKING:
    import torch

    from .grid import Settings

Row = TypeVar("Row", bound=Any)


@click.command()
@click.option("--family", "names", multiple=True, help="Only families with this text in their name; repeat for more.")
@click.option(
    "--minimum", type=click.IntRange(min=0),
    help="The adapters' minimum length, 0 for every call. Default: what was measured.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--tiny", is_flag=True, help="Tiny sizes, without a card on the CPU: does it run? Needs --out.")
@click.option("--budget", type=click.FloatRange(min=0), default=180.0, show_default=True, help="Seconds.")
@from_option
@out_option
@commit_option
def families(
    names: tuple[str, ...],
    minimum: int | None,
    quick: bool,
    tiny: bool,
    budget: float,
    csv: Path | None,
    out: Path | None,
    commit: str,
) -> None:
    """Time the attention calls of model families by torch's SDPA and by the adapters' choice; write CSV and tables.

    Ends with 2 where nothing can be measured, with 1 where a family takes more than 1.02 times SDPA's time, or has no
    time.
    """
    if csv is not None:
        sys.exit(_finish(csv))
    wanted = [case for case in CASES if not names or any(name.lower() in case.family.lower() for name in names)]
    if not wanted:
        stop(f"no family has {' or '.join(map(repr, names))} in its name; there are {', '.join(FAMILIES)}")
    from .families.measure import FamilyTime, measure

    more = {} if minimum is None else {"minimum length": str(minimum)}
    path, left = _measured(
        "families", "model families", FamilyTime, wanted, measure, minimum=minimum, quick=quick, tiny=tiny,
        budget=budget, out=out, commit=commit, more=more,
    )  # fmt: skip
    status = _finish(path)
    sys.exit(1 if left else 0 if tiny else status)


@click.command()
@click.option("--head-dim", "head_dims", type=int, multiple=True, help="Only these; repeat for more.")
@click.option("--quick", is_flag=True, help="Shorter replays and fewer of them.")
@click.option("--tiny", is_flag=True, help="Tiny sizes, without a card on the CPU: does it run? Needs --out.")
@click.option("--budget", type=click.FloatRange(min=0), default=240.0, show_default=True, help="Seconds.")
@from_option
@out_option
@commit_option
def lengths(
    head_dims: tuple[int, ...], quick: bool, tiny: bool, budget: float, csv: Path | None, out: Path | None, commit: str
) -> None:
    """Time the adapters' calls beside torch's SDPA at many lengths: what their minimum lengths are read from.

    Ends with 2 where nothing can be measured, with 1 where calls are left out for want of time.
    """
    from .families import lengths as found

    if csv is not None:
        write_tables(csv, found.markdown(*read_rows(csv, found.LengthTime)))
        return
    calls = found.cases(lengths=found.LENGTHS[:1]) if tiny else found.cases()
    wanted = [case for case in calls if not head_dims or case.head_dim in head_dims]
    if not wanted:
        stop(f"no calls have a head_dim of {head_dims}")
    path, left = _measured(
        "lengths", "calls of many lengths", found.LengthTime, wanted, found.measured, minimum=0, quick=quick, tiny=tiny,
        budget=budget, out=out, commit=commit,
    )  # fmt: skip
    write_tables(path, found.markdown(*read_rows(path, found.LengthTime)))
    sys.exit(1 if left else 0)


def _measured(
    command: str,
    what: str,
    kind: type[Row],
    cases: Sequence[Case],
    measure: Callable[[Case, torch.device, Settings], list[Row]],
    *,
    minimum: int | None,
    quick: bool,
    tiny: bool,
    budget: float,
    out: Path | None,
    commit: str,
    more: Mapping[str, str] | None = None,
) -> tuple[Path, int]:
    """Measure calls with this minimum length, small ones where they are ``tiny``: the CSV, and how many calls time did
    not allow. ``more`` joins the stamp."""
    if tiny and out is None:
        stop("--tiny measures nothing that is worth keeping beside results: name a folder with --out")
    if not tiny:
        need_card(f"timing {what}", f"; `{command} --from` works from a CSV, `{command} --tiny` runs anywhere")
    import torch

    from fp8cutlass.integrations import set_minimum_length

    from . import machine
    from .families.measure import small
    from .grid import QUICK, Settings
    from .peers import Own
    from .turns import record

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (reason := Own().available()) is not None:
        stop(reason)
    stamp = {"card": "CPU"} | machine.stamp(commit) | dict(more or {})
    path = results_folder(out, stamp) / f"{command}.csv"
    settings = QUICK if quick else Settings()
    set_minimum_length(minimum)
    try:
        _, left = record(
            path, stamp, kind, [small(case) for case in cases] if tiny else cases,
            lambda case: measure(case, device, settings), lambda case: case.label, "calls", budget, click.echo,
        )  # fmt: skip
    finally:
        set_minimum_length(None)
    return path, left


def _finish(path: Path) -> int:
    """Write the tables of a CSV; 1 where a family is too slow or has no time, else 0."""
    from .families import report
    from .families.measure import FamilyTime

    stamp, rows = read_rows(path, FamilyTime)
    write_tables(path, report.markdown(stamp, rows))
    found = report.slower(rows)
    for family in found:
        click.echo(f"slower than {report.MOST:g} times SDPA, or not timed: {family}")
    return 1 if found else 0
