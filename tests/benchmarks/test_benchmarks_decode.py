"""The benchmark of decode without a card: its operands, what counts as a result, bytes, and the table."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import decode
from benchmarks.decode import DecodeData, Step, Turns, Way, make, row_of
from benchmarks.decode_commands import markdown
from benchmarks.results import OK

STEP = Step("uneven", (130, 40), 8, 2, 64, 2)


def attended(data: DecodeData, table: torch.Tensor) -> torch.Tensor:
    """The step in float32 from its FP8 cache."""
    step, out = data.step, torch.zeros_like(data.q)
    for s, keys in enumerate(step.lengths):
        at, rows = table[s, : -(-keys // decode.PAGE)].long(), slice(step.queries * s, step.queries * (s + 1))
        k, v = (
            (x[at].flatten(0, 1)[:keys].float() * data.descale).repeat_interleave(step.heads // step.kv_heads, 1)
            for x in (data.k8, data.v8)
        )
        scores = torch.einsum("qhd,khd->hqk", data.q[rows].float(), k) * data.scale
        own = torch.arange(step.queries)[:, None] + keys - step.queries
        scores = scores.masked_fill(torch.arange(keys) > own, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    return out


def test_a_right_result_counts_and_a_wrong_one_does_not() -> None:
    data = make(STEP, cold=False, device="cpu")
    out = attended(data, data.tables[0])
    assert 0.01 < data.error(out, data.tables[0]) < 0.06
    assert data.error(out.flip(0), data.tables[0]) > 0.5
    out[0, 0, 0] = math.nan
    assert data.error(out, data.tables[0]) == math.inf


def test_cold_launches_take_turns_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is in two tables, and each copy is another cache."""
    monkeypatch.setattr(decode, "COLD_BYTES", 4 * STEP.bytes_of(1))
    data = make(STEP, cold=True, device="cpu")
    pages = [int(p) for table in data.tables for row, n in zip(table, (3, 1), strict=True) for p in row[:n]]
    assert len(data.tables) == 4 and sorted(pages) == list(range(16))
    asked: list[int] = []

    def launch(table: torch.Tensor) -> torch.Tensor:
        asked.append(table.data_ptr())
        return table

    turns = Turns(Way("x", "fp8", launch, 1), data.tables)
    for _ in range(5):
        turns()
    assert asked == [data.tables[i].data_ptr() for i in (0, 1, 2, 3, 0)]
    assert turns.table.data_ptr() == data.tables[0].data_ptr()
    assert (
        data.error(attended(data, data.tables[2]), data.tables[2])
        < 0.06
        < data.error(attended(data, data.tables[2]), data.tables[1])
    )


def test_bytes_are_those_of_k_and_v() -> None:
    assert STEP.bytes_of(1) == 2 * 170 * 2 * 64 and STEP.bytes_of(2) == 2 * STEP.bytes_of(1)


def test_the_table_has_a_line_for_each_step_and_cache() -> None:
    rows = [
        row_of(STEP, l2, name, "fp8", OK, median_us=us, tb_s=1.5)
        for l2, us in (("cold", 12.5), ("hot", 9.0))
        for name in ("ours", "fa3_fp8")
    ]
    text = markdown({"card": "a card"}, [*rows, row_of(STEP, "hot", "fa3_bf16", "bf16", "unavailable", "not there")])
    assert "| uneven | 2 | 64 | cold | 12.5 us, 1.50 | 12.5 us, 1.50 |  |" in text
    assert "| uneven | 2 | 64 | hot | 9.0 us, 1.50 | 9.0 us, 1.50 | unavailable |" in text
    assert "* fa3_bf16: not there" in text
