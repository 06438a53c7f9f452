"""All-gather of packed keys and values, some heads at a time: the next heads travel while these are attended to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ..api.attention import attention
from ..cache.packed import PackedKV
from ..memory import concatenated
from .abreast import abreast
from .exchange import Group, Pending, all_gather
from .moves import moved
from .pieces import pieces
from .plan import Plan
from .shards import Segment
from .wire import from_wire, size, to_wire

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
    found: list[list[torch.Tensor]] = []
    for i in range(count):
        while len(under_way) < min(i + AHEAD, count):
            j = len(under_way)
            some = packed.heads(ends[j], ends[j + 1] - ends[j])
            buffer = to_wire(some, some.k.new_empty((size(some, room),), dtype=torch.uint8))
            under_way.append((some, all_gather(buffer, group)))
        some, pending = under_way[i]
        keys = ordered(plan, some, pending.wait())
        found.append(attend(plan, rows, q[:, ends[i] * shared : ends[i + 1] * shared], keys))
        under_way[i] = (some, _DONE)
    return [concatenated(parts, 1) if count > 1 else parts[0] for parts in zip(*found, strict=True)]


def fitting(received: int) -> int:
    """Into how many groups heads are cut where a rank receives so many bytes: time for the first group and for all
    launches is least."""
    return max(1, round(math.sqrt(received / GROUP_BYTES)))


class _Done(Pending):
    """Holds nothing."""

    def __init__(self) -> None:
        pass


_DONE = _Done()


def ordered(plan: Plan, like: PackedKV, buffers: torch.Tensor) -> PackedKV:
    """All keys in their order, of the buffers of all ranks."""
    parts = [from_wire(like, buffer, n) for buffer, n in zip(buffers, plan.cut.lengths, strict=True)]
    return PackedKV.joined([parts[r].narrow(at, stop - start) for start, stop, r, at in plan.cut.in_order()])


def attend(plan: Plan, rows: Sequence[Segment], q: torch.Tensor, keys: PackedKV) -> list[torch.Tensor]:
    """The result of q, whose tokens are ``rows``, over all keys, and the LSE if asked for: by the kernel of all ranks,
    so that bits do not depend on how many there are."""
    asked, tokens = plan.asked, keys.shape[2]
    calls = []
    for piece in pieces(rows, ((0, tokens),), asked.causal):
        masked = {}
        if asked.causal:  # the mask's kernel also where these rows see all
            masked = {"is_causal": True, "causal_offset": tokens if piece.offset is None else piece.offset}
        some = q[:, :, slice(*piece.rows)]
        calls.append(partial(call, plan, some, keys, plan.kernel, asked.return_lse, **masked))
    if not calls:
        return call(plan, q, keys, None, asked.return_lse)
    found = abreast(calls, q.device)  # with causal masks later rows see more keys
    return [concatenated(parts, 2) if len(found) > 1 else parts[0] for parts in zip(*found, strict=True)]


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
