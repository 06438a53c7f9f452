"""Ring: packed keys and values go round, each rank attends to one shard after the other and merges what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..api.merge import merge_attention
from .exchange import Group, pass_on
from .gather import call
from .moves import moved
from .pieces import Piece, pieces
from .plan import Plan
from .shards import Segment
from .wire import from_wire, size, to_wire


def ring(plan: Plan, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The result of q (B, H, rows of this rank, D), and the LSE if asked for. Partial results have the type of the
    result and are summed in float32."""
    me, ranks, asked = group.rank(), group.size(), plan.asked
    k, v = moved((k, v), plan.keys, plan.cut, group)
    packed, lengths = plan.pack(k, v), plan.cut.lengths
    lse: Literal[True, "merge"] = True if asked.return_lse else "merge"
    current, merged = to_wire(packed), _Merged(q, asked.return_lse)
    for step in range(ranks):
        source, pending = (me - step) % ranks, None
        if step < ranks - 1:
            pending = pass_on(current, size(packed, lengths[(source - 1) % ranks]), group)
        keys = from_wire(packed, current, lengths[source])
        for piece in pieces(plan.rows.segments[me], plan.cut.segments[source], asked.causal):
            masked = {} if piece.offset is None else {"is_causal": True, "causal_offset": piece.offset}
            seen = keys.narrow(piece.keys[0], piece.keys[1] - piece.keys[0])
            merged.add(piece, call(plan, q[:, :, slice(*piece.rows)], seen, None, lse, **masked))
        if pending is not None:
            current = pending.wait()
    return merged.result(asked.out_dtype)


class _Merged:
    """Partial results as one, in float32."""

    def __init__(self, q: torch.Tensor, return_lse: bool) -> None:
        self._q, self._return_lse = q, return_lse
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        self._bare = [(0, q.shape[2])]  # rows that have no result yet, and nothing in their place

    def add(self, piece: Piece, result: Sequence[torch.Tensor]) -> None:
        """The result of some rows and its LSE."""
        out, lse = result
        if self._out is None or self._lse is None:
            if piece.rows == (0, self._q.shape[2]):
                self._out, self._lse, self._bare = out.float(), lse, []
                return
            self._out = torch.empty_like(self._q, dtype=torch.float32)
            self._lse = lse.new_empty(self._q.shape[:3])
        rows, bare = slice(*piece.rows), _within(self._bare, piece.rows)
        if bare == [piece.rows]:
            self._out[:, :, rows], self._lse[:, :, rows] = out, lse
        else:
            self._clear(bare)
            merge_attention(self._out[:, :, rows], self._lse[:, :, rows], out, lse, inplace=True)
        self._bare = _without(self._bare, piece.rows)

    def _clear(self, segments: Sequence[Segment]) -> None:
        """Rows that see no key."""
        if self._out is None or self._lse is None:
            self._out = torch.empty_like(self._q, dtype=torch.float32)
            self._lse = self._out.new_empty(self._q.shape[:3])
        for start, stop in segments:
            self._out[:, :, start:stop].zero_()
            self._lse[:, :, start:stop].fill_(-torch.inf)

    def result(self, out_dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Zeros, and an LSE of -inf, where nothing was added."""
        self._clear(self._bare)
        if self._out is None or self._lse is None:
            raise RuntimeError("there is no room for results")
        out = self._out.to(out_dtype or self._q.dtype)
        return [out, self._lse] if self._return_lse else [out]


def _within(segments: Sequence[Segment], rows: Segment) -> list[Segment]:
    found = ((max(a, rows[0]), min(b, rows[1])) for a, b in segments)
    return [(a, b) for a, b in found if a < b]


def _without(segments: Sequence[Segment], rows: Segment) -> list[Segment]:
    found = [part for a, b in segments for part in ((a, min(b, rows[0])), (max(a, rows[1]), b))]
    return [(a, b) for a, b in found if a < b]
