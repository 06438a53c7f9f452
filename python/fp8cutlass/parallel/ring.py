"""Ring: packed keys and values go round, each rank attends to one shard after the other and merges what it finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..api.merge import merge_attention
from .exchange import Group, pass_on
from .gather import call
from .moves import moved
from .pieces import Piece, pieces
from .plan import Plan
from .wire import from_wire, size, to_wire


def ring(plan: Plan, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The result of q (B, H, rows of this rank, D), and the LSE if asked for. Partial results have the type of the
    result and are summed in float32."""
    me, ranks, asked = group.rank(), group.size(), plan.asked
    k, v = moved((k, v), plan.keys, plan.cut, group)
    packed, lengths, lse = plan.pack(k, v), plan.cut.lengths, True if asked.return_lse else "merge"
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

    def add(self, piece: Piece, result: Sequence[torch.Tensor]) -> None:
        """The result of some rows and its LSE."""
        out, lse = result
        if self._out is None or self._lse is None:
            if piece.rows == (0, self._q.shape[2]):
                self._out, self._lse = out.float(), lse
                return
            self._out = torch.zeros_like(self._q, dtype=torch.float32)
            self._lse = lse.new_full(self._q.shape[:3], -torch.inf)
        rows = slice(*piece.rows)
        merge_attention(self._out[:, :, rows], self._lse[:, :, rows], out, lse, inplace=True)

    def result(self, out_dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Zeros, and an LSE of -inf, where nothing was added."""
        if self._out is None or self._lse is None:
            self._out = torch.zeros_like(self._q, dtype=torch.float32)
            self._lse = self._out.new_full(self._q.shape[:3], -torch.inf)
        out = self._out.to(out_dtype or self._q.dtype)
        return [out, self._lse] if self._return_lse else [out]
