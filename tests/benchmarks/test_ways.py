"""The table of whole calls by each way, without a card.

Regressions these catch: a way that was not taken shown as the one that was, a shape on which the rule is slower than it
could be shown as best, a way that failed and is silently missing.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import ways
from benchmarks.results import FAILED, OK, Row
from benchmarks.shapes import square


def row(seqlen: int, way: str, us: float, chosen: bool) -> Row:
    return Row(square(2, 16, seqlen, 128, True), way, "fp8", OK, median_us=us, chosen=chosen)


def test_the_way_taken_is_bold_and_held_against_the_best() -> None:
    rows = [row(512, w, us, w == ways.LEFT) for w, us in zip(ways.WAYS, (50.0, 44.0, 40.0), strict=True)]
    rows += [row(1024, ways.PACKED, 70.0, True)]
    text = ways.markdown({"card": "NVIDIA H200", "commit": "abc"}, rows)
    lines = text.splitlines()
    assert lines[0] == "## Ways from bf16 to the result on NVIDIA H200" and "* commit: abc" in lines
    assert next(line for line in lines if " 512, " in line).endswith("| 50.0 | **44.0** | 40.0 | 1.100 |")
    assert next(line for line in lines if " 1024, " in line).endswith("| **70.0** |  |  | 1.000 |")


def test_what_was_not_timed_is_named() -> None:
    failed = replace(row(512, ways.HANDED, 0.0, True), status=FAILED, reason="out of memory", median_us=None)
    text = ways.markdown({}, [row(512, ways.PACKED, 50.0, False), failed])
    assert text.splitlines()[-1].endswith("handed over failed: out of memory")
    assert "| 50.0 |  |  |  |" in text  # nothing to hold against the best
