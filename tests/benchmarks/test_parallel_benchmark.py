"""The model of several cards, and the tables of a run.

Regressions these catch: a page that shows another model than the code has, a hidden exchange that is counted twice, a
column that is dropped on the way through the CSV.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.parallel_model import GATHER, HALF, PACKED, RING, ULYSSES, Problem, efficiency, seconds, table
from benchmarks.parallel_rows import ParallelTime
from benchmarks.results import OK, WRONG, read_records, write_records

ROOT = Path(__file__).resolve().parents[2]
DIT = Problem(8, 131072, 40, 40, 128, False)
ROW = ParallelTime(
    2, 32768, 40, 40, 128, "full", "gather", OK, kernel="k", us=8000.0, spread=0.01, one_card_us=15200.0,
    products_us=7700.0, exchange_us=1000.0, hidden=0.7, sent_bytes=168000000, model_us=7900.0, error=0.0,
)  # fmt: skip


def test_the_page_shows_the_model() -> None:
    assert table() in (ROOT / "docs" / "howto" / "parallel.md").read_text()
    shown = CliRunner().invoke(cli, ["parallel", "--model"])
    assert shown.exit_code == 0 and shown.output.strip() == table()


def test_the_model_by_hand() -> None:
    """One card: products and packing. A long sequence scales; half the bytes are never slower."""
    alone = replace(DIT, ranks=1)
    assert seconds(alone, GATHER) == pytest.approx(
        4 * 40 * 131072**2 * 128 / 1350e12 + 3.02 * 2 * 40 * 131072 * 128 / 4e12
    )
    for method in (GATHER, RING, ULYSSES):
        assert efficiency(alone, method) == 1.0
        for ranks in (2, 4, 8, 16, 64):
            p = replace(DIT, ranks=ranks)
            assert 0 < efficiency(p, method, HALF) <= efficiency(p, method, PACKED) < 1.0
            assert efficiency(p, method) < efficiency(replace(p, tokens=8 * p.tokens), method)
    # 131k tokens on 8 cards: 32.6 ms of products, 0.13 of packing. A ring sends 171 MB 7 times, in 0.475 ms each, of
    # which a tenth is lost to its SMs, and merges 7 times in 0.378 ms.
    assert seconds(DIT, RING) == pytest.approx(0.03258 + 0.00013 + 7 * (0.1 * 0.000475 + 0.000378), rel=0.002)


def test_rows_become_tables(tmp_path: Path) -> None:
    rows = [
        ROW,
        replace(ROW, contender="ring", us=8400.0, status=WRONG, reason="far", error=0.02),
        replace(ROW, contender="torch_flash", us=16000.0, model_us=None, hidden=None, error=None, kernel=""),
    ]
    path = tmp_path / "parallel_2.csv"
    with path.open("w") as file:
        write_records(file, {"card": "a card"}, ParallelTime, rows)
    assert read_records(path, ParallelTime) == ({"card": "a card"}, rows)
    done = CliRunner().invoke(cli, ["parallel", "--from", str(path)])
    assert done.exit_code == 0, done.output
    text = path.with_suffix(".md").read_text()
    assert "| 2 | 32768 | 40 | 128 | full | gather | 8000 | 7900 | 95 | 70 | 168.0 | 2.00 | 0.000 | ok |" in text
    assert "wrong far" in text and "| torch_flash | 16000 |  | 48 |" in text
