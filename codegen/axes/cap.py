"""Whether scores are bent before the softmax."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Cap(Axis):
    """capped: scores become cap * tanh(score / cap), before masks and maximum.

    text: what the head comment of a kernel adds.
    """

    capped: bool
    text: str

    NONE = "uncapped", {"capped": False, "text": ""}
    TANH = "capped", {"capped": True, "text": " of capped scores"}
