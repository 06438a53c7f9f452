"""``fp8cutlass tune``: ``fp8cutlass.tune`` for a problem that is named by its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .explain import DTYPES, device_of, keys_of, problem_options
from .facts import reason
from .group import need_library

if TYPE_CHECKING:
    import torch


@click.command()
@problem_options
@click.option("--device", help="cuda or cuda:N. Default: the card that is here.")
@click.option("--save/--no-save", default=True, show_default=True, help="Let later calls go by the result.")
def tune(
    shape: tuple[int, ...],
    kv_heads: int | None,
    seqlen_k: int | None,
    causal: bool,
    scaling: str,
    precision: str,
    dtype: str,
    device: str | None,
    save: bool,
) -> None:
    """Find the fastest kernel for a problem on this card.

    Every built kernel that serves it is timed on random operands. Ends with 1 where that cannot be done.
    """
    need_library()
    from .. import tune as measure

    place = device_of(device)
    if place.type != "cuda":  # before operands are made, which may be large
        raise click.ClickException(
            f"tune times kernels on a card; on {place} the emulator runs, which says nothing of one"
        )
    keys = keys_of(shape, kv_heads, seqlen_k)
    try:
        operands, descales = make_operands(shape, keys, dtype, place)
        found = measure(
            *operands,
            **descales,
            is_causal=causal,
            enable_gqa=keys[1] != shape[1],
            scaling=scaling,
            precision=precision,
            save=save,
        )
    except (ValueError, RuntimeError, OSError) as error:  # what cannot be tuned, a card out of memory, a full disk
        raise click.ClickException(reason(error)) from error
    click.echo(found)


def make_operands(
    shape: tuple[int, ...], keys: tuple[int, ...], dtype: str, place: torch.device
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Random Q, K and V of a ``dtype`` of DTYPES, and the descales of FP8 ones by name."""
    import torch

    from .. import quantize

    element = getattr(torch, DTYPES[dtype])
    generator = torch.Generator(place).manual_seed(0)
    operands = [torch.randn(size, generator=generator, device=place) for size in (shape, keys, keys)]
    if element.itemsize > 1:
        return [x.to(element) for x in operands], {}
    made = [quantize(x, granularity="tensor", dtype=element) for x in operands]
    descales = {f"{name}_descale": descale for name, (_, descale) in zip("qkv", made, strict=True)}
    return [x for x, _ in made], descales
