"""Whole calls from bf16 tensors by each way there is: everything packed before, Q left to the attention kernel, and K
and V handed over to it while it runs. What the rule of ``fp8cutlass.native.attend`` goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp8cutlass.call.card import prepared_call
from fp8cutlass.choose.target import target
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.native.attend import Way, faster_way, takes_handover, takes_source

from .data import Data
from .peers import Own
from .peers.base import Contender, Refused
from .peers.own import half_plan
from .report import heading, table
from .results import Row

PACKED, LEFT, HANDED = WAYS = ("packed before", "Q left", "handed over")


class Ways(Own):
    """The kernel that dispatch chooses, from bf16, by each way that it can go; ``chosen`` is the one `attention`
    takes."""

    def prepare(self, data: Data) -> list[Contender]:
        at = target(data.q.device)
        try:
            variant, _ = self.choose(data, at)
        except UnsupportedError as error:
            raise Refused("; ".join(error.reasons)) from error
        plan, tensors = half_plan(data, variant, at, self._scaling)
        granularity = plan.granularity
        ways = {PACKED: Way(leave_q=False, hand_over=False)}
        if takes_source(variant, granularity, hadamard=False):
            ways[LEFT] = Way(leave_q=True, hand_over=False)
        if takes_handover(variant, granularity, smooth_k=False, hadamard=False):
            ways[HANDED] = Way(leave_q=True, hand_over=True)
        taken = faster_way(variant, granularity, data.q.shape, data.k.shape, smooth_k=False, hadamard=False)

        def contender(name: str, way: Way) -> Contender:
            attend = prepared_call(plan, tensors, way=way)

            def launch() -> torch.Tensor:
                return attend(data.q, data.k, data.v)[0]

            return Contender(name, self.precision, launch, kernel=variant.id, chosen=way == taken)

        return [contender(name, way) for name, way in ways.items()]


def markdown(stamp: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The table, under the stamp that says where it comes from: microseconds, in bold those of the way taken."""
    timed = [row for row in rows if row.median_us is not None]
    shapes = dict.fromkeys(row.shape for row in timed)
    body = []
    for shape in shapes:
        of = {row.contender: row for row in timed if row.shape == shape}
        best = min(row.median_us or 0.0 for row in of.values())
        taken = next((row.median_us for row in of.values() if row.chosen), None)
        cells = [_cell(of.get(way)) for way in WAYS]
        body.append([shape.label, *cells, "" if taken is None else f"{taken / best:.3f}"])
    lines = heading("Ways from bf16 to the result", stamp)
    lines += ["", "Whole calls in a CUDA graph, us, taken in turns; in bold the way that `attention` takes.", ""]
    lines += table(["batch, heads, seqlen, head_dim", *WAYS, "taken / best"], body)
    wrong = [
        f"* {row.shape.label}: {row.contender} {row.status}: {row.reason}" for row in rows if row.median_us is None
    ]
    return "\n".join([*lines, *(["", *wrong] if wrong else [])]) + "\n"


def _cell(row: Row | None) -> str:
    if row is None or row.median_us is None:
        return ""
    return f"**{row.median_us:.1f}**" if row.chosen else f"{row.median_us:.1f}"
