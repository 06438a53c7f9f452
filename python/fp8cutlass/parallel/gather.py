"""All-gather of packed keys and values, some heads at a time: the next heads travel while these are attended to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from ..api.attention import attention
from ..cache.packed import PackedKV
from ..memory import empty_rows
from .abreast import abreast
from .exchange import Group, Pending, all_gather
from .moves import moved
from .pieces import pieces
from .plan import Plan
from .shards import Segment
from .wire import in_order, size, to_wire

AHEAD = 2  # groups of heads that are under way or arrived
# Estimates for Hopper cards in a node, by which heads are cut. No bit depends on them.
LINK = 200e9  # bytes a second that a rank receives
PRODUCTS = 1.2e15  # FLOP a second
LAUNCHES = 0.35e-3  # seconds that a group of heads costs in launches


def gather(plan: Plan, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The result of q (B, H, rows of this rank, D) over the keys of all ranks, and the LSE if asked for."""
    k, v = moved((k, v), plan.keys, plan.cut, group)
    packed, heads = plan.pack(k, v), k.shape[1]
    room, rows = max(plan.cut.lengths), plan.rows.segments[group.rank()]
    shared = q.shape[1] // max(1, heads)
    if plan.asked.head_groups:
        ends = even(heads, plan.asked.head_groups)
    else:
        ends = fitting(heads, (group.size() - 1) * size(packed, room), _flop(plan, q.shape))
    count = len(ends) - 1
    under_way: list[tuple[PackedKV, Pending]] = []
    made = rooms(plan, q)
    for i in range(count):
        while len(under_way) < min(i + AHEAD, count):
            j = len(under_way)
            some = packed.heads(ends[j], ends[j + 1] - ends[j])
            buffer = to_wire(some, some.k.new_empty((size(some, room),), dtype=torch.uint8))
            under_way.append((some, all_gather(buffer, group)))
        some, pending = under_way[i]
        arrived = pending.wait()
        keys = in_order(some, arrived.view(-1), plan.cut, range(0, arrived.numel(), arrived.shape[1]))
        of_group = slice(ends[i] * shared, ends[i + 1] * shared)
        attend(plan, rows, q[:, of_group], keys, [x[:, of_group] for x in made])
        under_way[i] = (some, _DONE)
    return made


def _flop(plan: Plan, q_shape: Sequence[int]) -> float:
    """Of the products of a rank, as many on each."""
    batch, heads, _, head_dim = q_shape
    whole = 4.0 * batch * heads * max(plan.rows.lengths) * plan.keys.tokens * head_dim
    return whole / 2 if plan.asked.causal else whole


def fitting(heads: int, received: int, flop: float) -> list[int]:
    """Where groups of heads begin and end, for a rank that receives so many bytes. Nothing hides the exchange of the
    first one: it has as many heads as hide the exchange of the others, at most its even share. The number of groups is
    that of even ones whose first exchange takes as long as all launches."""
    exchange = received / LINK
    count = max(1, min(heads, round(math.sqrt(exchange / LAUNCHES))))
    if count == 1:
        return even(heads, 1)
    first = min(math.ceil(heads * exchange / (exchange + flop / PRODUCTS)), heads // count)
    return [0, *(first + end for end in even(heads - first, count - 1))]


def even(heads: int, count: int) -> list[int]:
    """Where ``count`` groups begin and end, or as many as there are heads."""
    count = max(1, min(count, heads))
    return [i * heads // count for i in range(count + 1)]


class _Done(Pending):
    """Holds nothing."""

    def __init__(self) -> None:
        pass


_DONE = _Done()


def rooms(plan: Plan, q: torch.Tensor) -> list[torch.Tensor]:
    """For the result of q (B, H, S, D), and for the LSE if asked for."""
    out = empty_rows(q, q.shape[3], plan.asked.out_dtype or q.dtype)
    return [out, q.new_empty(q.shape[:3], dtype=torch.float32)] if plan.asked.return_lse else [out]


def attend(plan: Plan, rows: Sequence[Segment], q: torch.Tensor, keys: PackedKV, made: Sequence[torch.Tensor]) -> None:
    """Attend with q, whose tokens are ``rows``, to all keys; the result goes to ``made``, as ``rooms`` makes it. By the
    kernel of all ranks, so that bits do not depend on how many there are."""
    asked, tokens = plan.asked, keys.shape[2]
    calls = []
    for piece in pieces(rows, ((0, tokens),), asked.causal):
        masked = {}
        if asked.causal:  # the mask's kernel also where these rows see all
            masked = {"is_causal": True, "causal_offset": tokens if piece.offset is None else piece.offset}
        part = slice(*piece.rows)
        into = [x[:, :, part] for x in made]
        calls.append(partial(_call_into, into, plan, q[:, :, part], keys, plan.kernel, asked.return_lse, **masked))
    if calls:
        abreast(calls, q.device)  # with causal masks later rows see more keys
    else:
        _call_into(made, plan, q, keys, None, asked.return_lse)


def _call_into(made: Sequence[torch.Tensor], *given: Any, **masked: Any) -> None:
    """``call`` with its results there."""
    _, *lse = call(*given, **masked, out=made[0])
    for room, x in zip(made[1:], lse, strict=True):
        room.copy_(x)


def call(
    plan: Plan, q: torch.Tensor, keys: PackedKV, kernel: str | None, return_lse: bool | Literal["merge"], **more: Any
) -> list[torch.Tensor]:
    """One call of attention, with the arguments of its mask and ``out``: the result, and the LSE if asked for."""
    asked = plan.asked
    result = attention(
        q, keys, scale=asked.scale, enable_gqa=True, out_dtype=asked.out_dtype, return_lse=return_lse, kernel=kernel,
        **more,
    )  # fmt: skip
    return [result] if isinstance(result, torch.Tensor) else list(result)
