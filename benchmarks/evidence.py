"""Measured rows of our kernels in the form that the generator reads (``tuning/<card>.csv``)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from typing import TextIO

from codegen.evidence import COLUMNS
from codegen.variant import parse_id

from .report import OWN
from .results import OK, Row
from .shapes import held_out

_KEY = COLUMNS[: COLUMNS.index("us")]
# The columns do not name these, so only kernels with these values are evidence.
MEASURED_AT = {"scaling": "block", "dtype": "e4m3", "out": "bf16"}


def records(stamp: Mapping[str, str], rows: Iterable[Row]) -> list[dict[str, str]]:
    """A record for each kernel and shape that was measured with a right result; none of shapes that are held out."""
    found = []
    for row in rows:
        if row.contender != OWN or row.status != OK or row.median_us is None or row.min_us is None:
            continue
        if held_out(row.shape):
            continue
        variant = parse_id(row.kernel)
        if any(str(getattr(variant, axis)) != value for axis, value in MEASURED_AT.items()):
            continue
        shape = row.shape
        found.append(
            {
                "head_dim": str(shape.head_dim),
                "seqlen_q": str(shape.seqlen_q),
                "seqlen_k": str(shape.seqlen_k),
                "batch": str(shape.batch),
                "heads": str(shape.heads),
                "kv_heads": str(shape.kv_heads),
                "causal": str(shape.causal).lower(),
                "softmax": str(variant.softmax),
                "tile": str(variant.tile),
                "stages": str(variant.stages),
                "schedule": str(variant.schedule),
                "cluster": str(variant.cluster),
                "us": f"{row.median_us:.3f}",
                "min_us": f"{row.min_us:.3f}",
                "card": stamp.get("card", ""),
                "clock_mhz": "" if row.clock_mhz is None else f"{row.clock_mhz:.0f}",
                "toolchain": f"nvcc {stamp['nvcc'].split(',')[0]}" if "nvcc" in stamp else "",
                "commit": stamp.get("commit", ""),
            }
        )
    return found


def write(file: TextIO, found: Iterable[Mapping[str, str]]) -> None:
    """Write records sorted by problem and kernel; of two for the same, the later."""
    latest = {tuple(record[name] for name in _KEY): record for record in found}

    def order(key: tuple[str, ...]) -> list[tuple[int, str]]:
        return [(int(text), "") if text.isdigit() else (0, text) for text in key]

    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for key in sorted(latest, key=order):
        writer.writerow(latest[key])
