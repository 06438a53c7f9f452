"""The decode benchmark's own contenders on a card, on a small step: each is captured, right and timed.

Regressions these catch: a launch that cannot be captured; a layout or an append that is wrong on a card; a cold launch
that is compared with another copy's pages.
"""

from __future__ import annotations

import pytest

from benchmarks.decode import measure
from benchmarks.decode_commands import sources_of
from benchmarks.grid import Settings
from benchmarks.results import OK
from benchmarks.steps import Step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "hot"])
def test_every_way_of_ours_is_right_and_timed(queries: int, cold: bool) -> None:
    rows = measure(
        Step("small", (1000, 64, 3000), queries=queries), cold, sources_of(True, False, False), Settings(200, 3)
    )
    assert [row.status for row in rows] == [OK] * len(rows), [(row.contender, row.reason) for row in rows]
    assert {"ours", "ours_step", "ours_native", "ours_hnd", "append_native"} <= {row.contender for row in rows}
