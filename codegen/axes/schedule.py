"""How the warps of a CTA, and the CTAs of a cluster, share the work."""

from __future__ import annotations

from codegen.axes.axis import Axis


class Schedule(Axis):
    """How the warps of a CTA overlap matrix products with softmax.

    text: what the head comment of a kernel says.
    draws: CTAs draw items from a counter; otherwise they step by the size of the grid.
    turns: warpgroups take turns on the tensor cores. overlaps: products of two tiles are in flight at a time.
    columns: P V is made in column parts, one multiplied while the one before is added to O.
    serial: a warpgroup finishes a tile before it begins the next.
    exposed: of the shorter of products and softmax, the part that does not run under the longer.
    item_cycles: an item's epilogue and first tile, as far as the next item does not hide them.
    """

    text: str
    draws: bool
    turns: bool
    overlaps: bool
    columns: bool
    serial: bool
    exposed: float
    item_cycles: int

    MULTISTAGE = (
        "multistage",
        {
            "text": "loads run ahead of the warps; CTAs that share an SM overlap each other.",
            "draws": False,
            "turns": False,
            "overlaps": False,
            "columns": False,
            "serial": False,
            "exposed": 1.0,  # CTAs that share an SM hide what one CTA exposes
            "item_cycles": 900,
        },
    )
    PINGPONG = (
        "pingpong",
        {
            "text": "warpgroups take turns on the tensor cores; while one multiplies, the others do their softmax.",
            "draws": True,
            "turns": True,
            "overlaps": True,
            "columns": False,
            "serial": False,
            "exposed": 0.4,
            "item_cycles": 1_000,
        },
    )
    OVERLAP = (
        "overlap",
        {
            "text": "Q K^T of the next tile is issued before P V of this one, and its softmax runs under that P V.",
            "draws": True,
            "turns": False,
            "overlaps": True,
            "columns": False,
            "serial": False,
            "exposed": 0.4,
            "item_cycles": 1_200,
        },
    )
    COLUMNS = (
        "columns",
        {
            "text": "a part of the columns of P V is multiplied while the one before is added to O.",
            "draws": True,
            "turns": False,
            "overlaps": False,
            "columns": True,
            "serial": False,
            "exposed": 0.2,  # a guess, as its item_cycles: where it is offered, measurements come before the model
            "item_cycles": 1_200,
        },
    )
    SERIAL = (
        "serial",
        {
            "text": "a warpgroup finishes a tile before the next; others fill the tensor cores meanwhile.",
            "draws": True,
            "turns": False,
            "overlaps": False,
            "columns": False,
            "serial": True,
            "exposed": 0.5,
            "item_cycles": 2_000,
        },
    )


class Cluster(Axis):
    """How many CTAs share a query tile: each takes a part of its keys, then they merge through shared memory."""

    ctas: int

    SOLO = "solo", {"ctas": 1}
    SPLIT2 = "split2", {"ctas": 2}
    SPLIT4 = "split4", {"ctas": 4}
