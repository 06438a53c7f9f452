"""What a kernel computes, and which keys its rows see."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Kind(Axis):
    """diagnostic: the same kernel, writing scores, P and tile products for the tests of each stage."""

    diagnostic: bool

    FWD = "fwd", {"diagnostic": False}
    DIAG = "diag", {"diagnostic": True}


class Mask(Axis):
    """diagonal: the last key that a row sees depends on the row's number. windowed: so does the first one.
    listed: lists in memory say which tiles rows visit, and bits what they see of some.

    text: what the head comment of a kernel says.
    """

    diagonal: bool
    windowed: bool
    listed: bool
    text: str

    FULL = "full", {"diagonal": False, "windowed": False, "listed": False, "text": "no mask"}
    CAUSAL = "causal", {"diagonal": True, "windowed": False, "listed": False, "text": "causal mask"}
    WINDOW = "window", {"diagonal": True, "windowed": True, "listed": False, "text": "window of keys"}
    BLOCKS = "blocks", {"diagonal": False, "windowed": False, "listed": True, "text": "mask of listed tiles"}

    @classmethod
    def of(cls, causal: bool) -> Mask:
        """The mask of a call without a window."""
        return cls.CAUSAL if causal else cls.FULL
