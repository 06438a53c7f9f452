"""``fp8cutlass explain``: the kernel of a problem, for tensors without memory and cards that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..manifest import INTEGER
from .explain_kvcache import told
from .facts import reason
from .group import need_library

if TYPE_CHECKING:
    import torch

    from ..call.request import Request
    from ..native.extension import Properties

# What stands for an architecture: the cards that its table is made for.
MODEL_CARDS: dict[str, Properties] = {"sm89": ((8, 9), "L4", 58), "sm90a": ((9, 0), "H200", 132)}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


class Shape(click.ParamType):
    """``B,H,S,D``: four whole numbers, none negative."""

    name = "B,H,S,D"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
            self.fail(
                f"{value!r} is not B,H,S,D: batch, query heads, tokens and head_dim, such as 1,8,512,64", param, context
            )
        return tuple(int(part) for part in parts)


PROBLEM_OPTIONS = (
    click.option(
        "--shape", type=Shape(), required=True, help="Batch, query heads, query tokens, head_dim: 1,8,512,64."
    ),
    click.option("--kv-heads", type=click.IntRange(min=1), help="Heads of K and V. Default: those of Q."),
    click.option("--seqlen-k", type=click.IntRange(min=0), help="Keys. Default: as many as queries."),
    click.option("--causal", is_flag=True),
    click.option("--scaling", default="block", show_default=True, help="tensor, head, block or token."),
    click.option(
        "--precision",
        type=click.Choice(["fast", "balanced", "accurate", "high", *INTEGER]),
        default="fast",
        show_default=True,
    ),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of Q, K and V."),
)


def problem_options(command: Callable[..., None]) -> Callable[..., None]:
    """What names a problem, as ``shape``, ``kv_heads``, ``seqlen_k``, ``causal``, ``scaling``, ``precision``,
    ``dtype``."""
    for option in reversed(PROBLEM_OPTIONS):
        option(command)
    return command


@click.command()
@problem_options
@click.option("--kernel", metavar="ID", help="Pin a variant instead of asking the table.")
@click.option(
    "--pages", type=click.IntRange(min=1), metavar="TOKENS", help="Of attention_with_kvcache: K and V in such pages."
)
@click.option("--splits", type=click.IntRange(0, 256), default=0, help="With --pages: num_splits.")
@click.option("--device", help="cpu, cuda or cuda:N. Default: the card that is here, else cpu.")
@click.option("--arch", type=click.Choice(list(MODEL_CARDS)), help="Answer for a card that need not be here.")
@click.option("--sms", type=click.IntRange(min=1), help="Multiprocessors of that card. Default: of an L4, an H200.")
def explain(
    shape: tuple[int, ...],
    kv_heads: int | None,
    seqlen_k: int | None,
    causal: bool,
    scaling: str,
    precision: str,
    dtype: str,
    kernel: str | None,
    pages: int | None,
    splits: int,
    device: str | None,
    arch: str | None,
    sms: int | None,
) -> None:
    """Say which kernel a problem gets, and why.

    Nothing is launched and no tensor is made. Ends with 1 where no kernel serves the problem.
    """
    if arch and device:
        raise click.UsageError("--arch answers for a card that need not be here, --device for one that is: give one")
    if sms and not arch:
        raise click.UsageError("--sms goes with --arch")
    if splits and not pages:
        raise click.UsageError("--splits goes with --pages")
    if pages and (kernel or (scaling, precision) != ("block", "fast")):
        raise click.UsageError("--pages has one kernel for its sizes: it goes with no --kernel, --scaling, --precision")
    need_library()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..call.request import request_of
    from ..native import extension

    place = torch.device("cuda", 0) if arch else device_of(device)
    keys = keys_of(shape, kv_heads, seqlen_k)
    element = getattr(torch, DTYPES[dtype])
    options: dict[str, Any] = {"is_causal": causal, "scaling": scaling, "precision": precision, "kernel": kernel}
    if element.itemsize == 1:
        options |= {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
    with contextlib.ExitStack() as stack:
        if arch:
            capability, name, model_sms = MODEL_CARDS[arch]
            stack.enter_context(extension.assume((capability, name, sms or model_sms)))
        if pages:
            text, served = told(shape, kv_heads, causal, pages, splits, dtype, place)
            click.echo(text)
            end(served)
            return
        stack.enter_context(FakeTensorMode())
        q, k, v = (torch.empty(size, dtype=element, device=place) for size in (shape, keys, keys))
        try:
            text, served = _answer(request_of(q, k, v, enable_gqa=keys[1] != shape[1], **options))
        except (ValueError, KeyError, OSError) as error:  # tables that cannot be read
            raise click.ClickException(f"{reason(error)}. `fp8cutlass doctor` says more") from error
    click.echo(text)
    end(served)


def end(served: bool) -> None:
    """The exit status."""
    if not served:
        raise click.exceptions.Exit(1)


def keys_of(shape: tuple[int, ...], kv_heads: int | None, seqlen_k: int | None) -> tuple[int, ...]:
    """The sizes of K and V."""
    batch, heads, seqlen_q, head_dim = shape
    return (batch, kv_heads or heads, seqlen_q if seqlen_k is None else seqlen_k, head_dim)


def _answer(request: Request) -> tuple[str, bool]:
    """The text of ``fp8cutlass.explain``, and whether some kernel serves the request, built or not."""
    from ..call.explain import describe

    text = describe(request)
    return text, not text.startswith("no kernel")


def device_of(text: str | None) -> torch.device:
    """The device of that name, checked; by default the current card, or the CPU without one."""
    import torch

    available = torch.cuda.is_available()
    try:
        device = torch.device(text or ("cuda" if available else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise click.BadParameter(
            f"{text!r} is no device of this library; accepted are cpu, cuda and cuda:N", param_hint="--device"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if available else 0
    index = device.index if device.index is not None else torch.cuda.current_device() if count else 0
    if index >= count:
        raise click.BadParameter(
            f"{text!r}: torch can use {count} CUDA devices here; --arch answers without one", param_hint="--device"
        )
    return torch.device("cuda", index)
