"""How a kernel finds the keys of its rows."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Walk(Axis):
    """tables: lengths and offsets of sequences come from tables on the device; otherwise all are equally long."""

    tables: bool

    DENSE = "dense", {"tables": False}
    RAGGED = "ragged", {"tables": True}
