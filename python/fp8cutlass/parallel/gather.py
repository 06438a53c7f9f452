"""All-gather of packed keys and values, some heads at a time: the next heads travel while these are attended to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ..api.attention import attention
from ..cache.packed import PackedKV
from ..memory import copy_into
from .abreast import abreast
from .exchange import Group, Pending, all_gather
from .moves import moved
from .pieces import pieces
from .plan import Plan
from .shards import Segment
from .wire import in_order, size, to_wire

AHEAD = 2  # groups of heads that are under way or arrived
# What NVLink brings in the time that a group of heads costs in launches, by an estimate of 0.35 ms and 200 GB/s. Of n
# groups the first one's exchange is hidden by nothing, so that received / n and n of these are to be balanced.
GROUP_BYTES = 70e6


def gather(plan: Plan, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The result of q (B, H, rows of this rank, D) over the keys of all ranks, and the LSE if asked for."""
    k, v = moved((k, v), plan.keys, plan.cut, group)
    packed, heads = plan.pack(k, v), k.shape[1]
    room, rows = max(plan.cut.lengths), plan.rows.segments[group.rank()]
    asked = plan.asked.head_groups or fitting((group.size() - 1) * size(packed, room))
    count = max(1, min(asked, heads))
    ends = [i * heads // count for i in range(count + 1)]
    shared = q.shape[1] // max(1, heads)
    under_way: list[tuple[PackedKV, Pending]] = []
    found: list[Part] = []
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
        found += [(of_group, *part) for part in attend(plan, rows, q[:, of_group], keys)]
        under_way[i] = (some, _DONE)
    return assembled(found, q.shape)


def fitting(received: int) -> int:
    """Into how many groups heads are cut where a rank receives so many bytes: time for the first group and for all
    launches is least."""
    return max(1, round(math.sqrt(received / GROUP_BYTES)))


class _Done(Pending):
    """Holds nothing."""

    def __init__(self) -> None:
        pass


_DONE = _Done()


def attend(
    plan: Plan, rows: Sequence[Segment], q: torch.Tensor, keys: PackedKV
) -> list[tuple[slice, list[torch.Tensor]]]:
    """The results of q, whose tokens are ``rows``, over all keys, and the LSE if asked for, each with its rows of q. By
    the kernel of all ranks, so that bits do not depend on how many there are."""
    asked, tokens = plan.asked, keys.shape[2]
    parts, calls = [], []
    for piece in pieces(rows, ((0, tokens),), asked.causal):
        masked = {}
        if asked.causal:  # the mask's kernel also where these rows see all
            masked = {"is_causal": True, "causal_offset": tokens if piece.offset is None else piece.offset}
        parts.append(slice(*piece.rows))
        calls.append(partial(call, plan, q[:, :, parts[-1]], keys, plan.kernel, asked.return_lse, **masked))
    if not calls:
        return [(slice(None), call(plan, q, keys, None, asked.return_lse))]
    return list(zip(parts, abreast(calls, q.device), strict=True))  # with causal masks later rows see more keys


Part = tuple[slice, slice, list[torch.Tensor]]  # heads, rows and their results


def assembled(parts: Sequence[Part], shape: Sequence[int]) -> list[torch.Tensor]:
    """Results (B, H, S, ...) of parts of heads and rows, each copied once; one alone as it is."""
    if len(parts) == 1:
        return parts[0][2]
    whole = [x.new_empty((*shape[:3], *x.shape[3:])) for x in parts[0][2]]
    for heads, rows, results in parts:
        for room, x in zip(whole, results, strict=True):
            copy_into(room[:, heads, rows], x)
    return whole


def call(
    plan: Plan, q: torch.Tensor, keys: PackedKV, kernel: str | None, return_lse: bool | str, **masked: object
) -> list[torch.Tensor]:
    """One call of attention: the result, and the LSE if asked for."""
    asked = plan.asked
    result = attention(
        q, keys, scale=asked.scale, enable_gqa=True, out_dtype=asked.out_dtype, return_lse=return_lse, kernel=kernel,
        **masked,
    )  # type: ignore[call-overload]  # fmt: skip
    return [result] if isinstance(result, torch.Tensor) else list(result)
