"""What our calls and the peers lose against float32 on the operands as they were given: the same inputs, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8cutlass.accuracy.inputs import INPUTS, Operands16, normal
from fp8cutlass.accuracy.measures import max_error, relative_l2, rmse
from fp8cutlass.accuracy.standard import LARGE, SMALL, STATED

from .data import Data, with_operands
from .grid import absent, prepare
from .peers import Contender, Peer
from .peers.own import Own, whole_call
from .report import BF16_PEERS, FP8_PEERS, OWN, SAGE, heading, table
from .results import FAILED, OK, UNAVAILABLE, first_line
from .shapes import Shape, square

SHIFTED = "V ~ N(1, 1)"
QUERIES = 128  # of SHIFTED, where each attends to all keys

# What a caller can ask of `attention`, the default first.
MODES: Mapping[str, Mapping[str, Any]] = {
    OWN: {},
    f"{OWN}, balanced": {"precision": "balanced"},
    f"{OWN}, smooth K and Hadamard": {"smooth_k": True, "hadamard": True},
    f"{OWN}, token, smooth K and Hadamard": {"scaling": "token", "smooth_k": True, "hadamard": True},
    f"{OWN}, high": {"precision": "high"},
    f"{OWN}, int8": {"precision": "int8"},
}
PEER_NAMES = (*FP8_PEERS, BF16_PEERS[0], SAGE)


@dataclass(frozen=True)
class Case:
    """Operands by the name of their distribution, and their shape."""

    inputs: str
    shape: Shape

    def draw(self) -> Operands16:
        """bf16 operands, the same on every machine, on the CPU."""
        s = self.shape
        if self.inputs != SHIFTED:
            return INPUTS[self.inputs]((s.batch, s.heads, s.seqlen_k, s.head_dim))
        q, k, v = normal((s.batch, s.heads, s.seqlen_k, s.head_dim))
        return q[:, :, : s.seqlen_q].contiguous(), k, (v.float() + 1).bfloat16()


def _square(batch: int, heads: int, seqlen: int, head_dim: int) -> Shape:
    return square(batch, heads, seqlen, head_dim, False)


CASES = (
    Case("randn", _square(*SMALL)),
    Case("randn", _square(*LARGE)),
    Case("outlier", _square(*SMALL)),
    Case("outlier", _square(*STATED)),
    Case("K bias", _square(*LARGE)),
    Case(SHIFTED, Shape(64, False, QUERIES, 32_768, 1, 2, 2)),
    Case(SHIFTED, Shape(64, False, QUERIES, 131_072, 1, 2, 2)),
)


@dataclass(frozen=True)
class Loss:
    """What one contender lost on one case; numbers are None where it gave no result.

    ``relative_l2`` is |o - r| / |r|, ``rmse`` and ``max_error`` are in units of the output, ``bias`` is the mean of
    o - r over the mean of |r|.
    """

    inputs: str
    shape: str
    contender: str
    status: str
    reason: str = ""
    relative_l2: float | None = None
    rmse: float | None = None
    max_error: float | None = None
    bias: float | None = None


class Calls(Own):
    """``attention`` in each of MODES, from bf16 to bf16."""

    def prepare(self, data: Data) -> list[Contender]:
        return [whole_call(data, name, **arguments) for name, arguments in MODES.items()]


def _loss(case: Case, contender: Contender, data: Data) -> Loss:
    name = case.inputs, case.shape.label, contender.name
    try:
        got, expected = data.sample(contender.as_bhsd(contender.launch()), contender.out_descale)
        bias = float((got.double() - expected.double()).mean() / expected.double().abs().mean())
        losses = relative_l2(got, expected), rmse(got, expected), max_error(got, expected), bias
    except Exception as error:  # a contender that breaks must not end the run
        return Loss(*name, FAILED, first_line(error))
    return Loss(*name, OK, "", *losses)


def measure(case: Case, peers: Sequence[Peer], device: torch.device | str = "cuda") -> list[Loss]:
    """The losses of one case. A peer that is not there, or does not serve it, has its reason."""
    q, k, v = (x.to(device) for x in case.draw())
    data = with_operands(case.shape, q, k, v, every_row=True)
    reasons = absent(peers)
    ready, rows = prepare([peer for peer in peers if peer.name not in reasons], data)
    missing = [(name, UNAVAILABLE, reason) for name, reason in reasons.items()]
    missing += [(row.contender, row.status, row.reason) for row in rows]
    found = [_loss(case, contender, data) for contender in ready]
    return found + [Loss(case.inputs, case.shape.label, *why) for why in missing]


def _cells(losses: Sequence[Loss], read: Callable[[Loss], float | None]) -> tuple[list[str], list[list[str]]]:
    """A column for each case, a line for each contender: figures in percent."""
    cases = list(dict.fromkeys((loss.inputs, loss.shape) for loss in losses))
    by = {(loss.contender, loss.inputs, loss.shape): read(loss) for loss in losses}
    body = []
    for name in dict.fromkeys(loss.contender for loss in losses if loss.status == OK):
        figures = [by.get((name, *case)) for case in cases]
        body.append([name, *("" if x is None else f"{100 * x:.2f}" for x in figures)])
    return [f"{inputs}, {shape.removesuffix(' full')}" for inputs, shape in cases], body


def markdown(stamp: Mapping[str, str], losses: Sequence[Loss]) -> str:
    """The tables, under the stamp that says where they come from."""
    lines = heading("Accuracy of attention", stamp)
    lines += ["", "Relative L2 against float32 on the bf16 operands, in percent.", ""]
    header, body = _cells(losses, lambda loss: loss.relative_l2)
    lines += table(["", *header], body)
    shifted = [loss for loss in losses if loss.inputs == SHIFTED]
    if shifted:
        header, body = _cells(shifted, lambda loss: loss.bias)
        lines += ["", "Mean of the output less the reference, over its mean, in percent, where that is not 0.", ""]
        lines += table(["", *header], body)
    missing = dict.fromkeys(f"* {x.contender}: {x.status}: {x.reason}" for x in losses if x.status != OK)
    return "\n".join([*lines, *(["", *missing] if missing else [])]) + "\n"
