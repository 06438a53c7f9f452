"""What becomes of scores before the softmax."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Change(Axis):
    """capped: scores become cap * tanh(score / cap), before masks and maximum.
    biased: a tensor is added to scaled scores, before masks and maximum.

    text: what the head comment of a kernel adds.
    """

    capped: bool
    biased: bool
    text: str

    NONE = "unchanged", {"capped": False, "biased": False, "text": ""}
    TANH = "capped", {"capped": True, "biased": False, "text": ", scores capped"}
    BIAS = "biased", {"capped": False, "biased": True, "text": ", scores with a bias"}
