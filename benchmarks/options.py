"""What the commands share: which shapes, where results go, and the ends of a command that cannot run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from .results import Row, read
from .shapes import MAX_HEAD_DIM, SETS, Shape, parse, select

RESULTS = Path(__file__).resolve().parent / "results"

out_option = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: results/<card>."
)
commit_option = click.option("--commit", default="", help="For the stamp, where the checkout has no repository.")


class ShapeType(click.ParamType):
    """A shape written as ``shapes.parse`` reads it."""

    name = "SHAPE"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> Shape:
        if isinstance(value, Shape):
            return value
        try:
            return parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


@dataclass(frozen=True)
class Wanted:
    """The shapes that a command is asked for, and a stem for its files: the names of the sets, and "shapes" where
    single ones are given."""

    shapes: list[Shape]
    name: str


def shape_options(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options that choose shapes, which the command gets as ``wanted``; ``default`` is the set where none is named.

    Stands directly above the function, below its other options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(
            shape_sets: tuple[str, ...],
            shapes: tuple[Shape, ...],
            head_dims: tuple[int, ...],
            seqlens: tuple[int, ...],
            masks: tuple[str, ...],
            **others: Any,
        ) -> None:
            sets = shape_sets or (() if shapes else (default,))
            found = select(*sets, extra=shapes, head_dims=head_dims, seqlens=seqlens, masks=masks)
            if not found:
                stop("no shape passes the filters")
            command(wanted=Wanted(found, "-".join([*sets, *(["shapes"] if shapes else [])])), **others)

        for option in reversed(
            (
                click.option(
                    "--set",
                    "--shapes",
                    "shape_sets",
                    type=click.Choice(sorted(SETS)),
                    multiple=True,
                    help=f"A named set; repeat for several. Default: {default}.",
                ),
                click.option(
                    "--shape",
                    "shapes",
                    type=ShapeType(),
                    multiple=True,
                    help="A shape, B,H[/HKV],S[xKEYS],D[,causal]; repeat for several.",
                ),
                click.option("--head-dim", "head_dims", type=click.IntRange(1, MAX_HEAD_DIM), multiple=True),
                click.option("--seqlen", "seqlens", type=click.IntRange(min=1), multiple=True, help="Number of keys."),
                click.option("--mask", "masks", type=click.Choice(["full", "causal"]), multiple=True),
            )
        ):
            option(run)
        return run

    return decorate


def read_csv(path: Path) -> tuple[dict[str, str], list[Row]]:
    """The stamp and the rows of a run; ends with 2 where the file is none."""
    try:
        return read(path)
    except ValueError as error:
        stop(str(error))
        raise


def results_folder(out: Path | None, stamp: Mapping[str, str]) -> Path:
    """Where the files of a run go: ``out``, by default the folder of the card in the stamp. It is made."""
    from .machine import card_slug

    folder = out or RESULTS / card_slug(stamp["card"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stop(reason: str) -> None:
    """End with 2: nothing can be measured."""
    click.echo(f"benchmarks: {reason}", err=True)
    sys.exit(2)


def need_card(what: str, instead: str = "") -> None:
    """End with 2 where torch cannot use a card."""
    try:
        import torch
    except ImportError:
        stop(f"{what} needs torch with CUDA, which is not installed{instead}")
    if not torch.cuda.is_available():
        stop(f"{what} needs a CUDA device and there is none here{instead}")
