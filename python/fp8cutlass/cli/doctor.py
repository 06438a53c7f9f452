"""``fp8cutlass doctor``: does attention work here, and what to do where it does not."""

from __future__ import annotations

import click

from .checks import FAILED, OK, checks, served_cards
from .facts import collect


@click.command()
def doctor() -> None:
    """Check that attention runs here, and say what to do where it does not.

    Ends with 1 when something that should work does not; a machine on which only the emulator can run is a warning.
    """
    facts = collect()
    failed: list[str] = []
    for check in checks(facts):
        click.echo(f"{check.status:8} {check.name:10} {check.seen}")
        if check.status != OK:
            click.echo(f"{'':8} {'':10} -> {check.remedy}")
        if check.status == FAILED:
            failed.append(check.name)
    if failed:
        click.echo(f"\n{len(failed)} of the checks failed: {', '.join(failed)}")
        raise click.exceptions.Exit(1)
    running = [card["name"] for card in served_cards(facts)]
    click.echo(f"\nattention runs on {', '.join([*running, 'the CPU (emulator)'])}")
