"""``fp8cutlass info``: what is installed, as text or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from ..log import VARIABLE
from .facts import collect

DIGEST_LENGTH = 16  # of 64 characters: enough to tell two builds apart by eye


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object with the keys of docs/reference/command_line.md."
)
def info(as_json: bool) -> None:
    """Show versions, cards, what is built and which tables answer.

    Ends with 0 whatever is missing or broken: that is listed under "problems".
    """
    facts = collect()
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    def line(name: str, text: object) -> str:
        return f"{name + ':':13}{'unknown' if text is None else text}"

    yield line("fp8cutlass", facts["fp8cutlass"])
    yield line("python", f"{facts['python']} on {facts['platform']}")
    yield line("torch", f"{facts['torch'] or 'none'}, CUDA {facts['torch_cuda'] or 'none'}")
    yield line("driver", f"{facts['driver'] or 'none'}, serves CUDA {facts['driver_cuda'] or 'none'}")
    yield from (line(f"card {card['index']}", _card(card)) for card in facts["cards"] or [])
    if not facts["cards"]:
        yield line("cards", "none" if facts["cards"] == [] else None)
    library = facts["library"]
    yield line("library", library["path"] or "not built")
    if library["path"]:
        yield line("  holds", _kernels(library))
        yield line("  loads", {True: "yes", False: "no", None: None}[library["loads"]])
    yield line("table", facts["table"]["directory"] or "none")
    yield line("  holds", _kernels(facts["table"]))
    yield line("CPU calls", f"answered from {facts['answers']['cpu'] or 'no table'}")
    yield line("CUDA calls", f"answered from {facts['answers']['cuda'] or 'no table'}")
    mine = facts["tuned"]
    yield line("tuned", "off" if mine["path"] is None else f"{mine['rows']} problems in {mine['path']}")
    yield line("emulator", "available" if facts["emulator"] else "not available")
    subjects, active = facts["log"]["subjects"], facts["log"]["active"]
    yield line("logging", f"{', '.join(active) or 'off'} ({VARIABLE} takes {', '.join(subjects)})")
    for name, value in facts["environment"].items():
        yield line("variable", f"{name}={value}")
    for problem in facts["problems"]:
        yield line("problem", f"{problem['about']}: {problem['message']}")


def _card(card: dict[str, Any]) -> str:
    memory = "?" if card["memory_bytes"] is None else f"{card['memory_bytes'] / (1 << 30):.1f}"
    return (
        f"{card['name']}, capability {card['capability']}, architecture {card['arch'] or 'not served'}, "
        f"{card['multiprocessors'] or '?'} SMs, {memory} GiB"
        f"{'' if card['usable'] else ', not usable from torch'}"
    )


def _kernels(facts: dict[str, Any]) -> str | None:
    digest = (facts["manifest_sha256"] or "")[:DIGEST_LENGTH]
    if facts["kernels"] is None:
        return f"unknown, manifest {digest}" if digest else None
    return (
        f"{facts['kernels']} kernels for {', '.join(facts['targets'])}, profile {facts['profile']}, manifest {digest}"
    )
