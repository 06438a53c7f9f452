"""Ulysses: each rank attends with some heads to all tokens. Keys and values travel packed, queries and results as they
are."""

from __future__ import annotations

from itertools import accumulate

import torch

from .exchange import Group, all_to_all
from .gather import attend, rooms
from .heads import from_heads, to_heads
from .moves import moved
from .plan import Plan
from .wire import in_order, size, to_wire


def ulysses(plan: Plan, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The result of q (B, H, rows of this rank, D), and the LSE if asked for."""
    ranks = group.size()
    queries = to_heads([q], [plan.rows.lengths], group)
    k, v = moved((k, v), plan.keys, plan.cut, group)
    packed, heads = plan.pack(k, v), k.shape[1] // ranks
    parts = [packed.heads(r * heads, heads) for r in range(ranks)]
    lengths = plan.cut.lengths
    mine, sizes = size(parts[0], packed.shape[2]), [size(parts[0], n) for n in lengths]
    buffers = packed.k.new_empty((ranks * mine,), dtype=torch.uint8)
    for part, room in zip(parts, buffers.split(mine), strict=True):
        to_wire(part, room)
    arrived = all_to_all(buffers, [mine] * ranks, sizes, group)
    whole = plan.rows.unshard(queries.wait()[0])
    keys = in_order(parts[0], arrived.wait(), plan.cut, [0, *accumulate(sizes[:-1])])
    found = rooms(plan, whole)
    attend(plan, ((0, plan.rows.tokens),), whole, keys, found)
    rows = [[plan.rows.pieces(x if x.dim() == 4 else x.unsqueeze(-1), r) for r in range(ranks)] for x in found]
    out, *lse = from_heads(rows, group)
    return [out, *(x.squeeze(-1) for x in lse)]
