"""The benchmark of append without a card: its operands and what counts as a result."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import append, append_commands, machine
from benchmarks.__main__ import cli
from benchmarks.append import (
    FORMATS,
    HEAD_DIM,
    KV_HEADS,
    PAGE,
    TOKENS,
    AppendTime,
    by_kernel,
    by_torch,
    different,
    make,
)
from benchmarks.peers import Own
from benchmarks.results import OK, WRONG


@pytest.mark.parametrize("format", FORMATS)
def test_all_tokens_are_written_and_a_byte_is_noticed(format: str) -> None:
    for tokens in TOKENS[:2]:
        data = make(tokens, format, "cpu")
        wanted = by_torch(data).clone()
        pages = data.slots // PAGE
        assert len(set(data.slots.tolist())) == tokens and wanted[0].any(-1).sum() == len(set(pages.tolist()))
        assert different(wanted, by_torch(data)) == 0.0
        data.pages.view(-1)[5] ^= 1
        assert different(wanted, data.pages) == math.inf


def test_where_there_is_no_kernel_it_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="does not take"):
        by_kernel(make(1, "native", "cpu"))


def test_slots_of_a_prefill_are_pages_in_a_row() -> None:
    data = make(2048, "nhd", "cpu")
    assert torch.equal(data.slots, torch.arange(2048)) and data.cache.num_pages == 2048 // PAGE


def timed(tokens: int, contender: str, us: float | None) -> AppendTime:
    status, reason = (OK, "") if us else (WRONG, "bytes differ")
    return AppendTime(tokens, KV_HEADS, HEAD_DIM, "nhd", contender, "fp8", status, reason, median_us=us)


def test_the_command_writes_a_line_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is six bytes an element of K; a way whose bytes differ has no time, and the command says so."""
    times = {"kernel": 2.0, "torch operations": 50.0}

    def measure(tokens: int, format: str, settings: object) -> list[AppendTime]:
        rows = [timed(tokens, name, us if (tokens, name) != (32, "kernel") else None) for name, us in times.items()]
        return [replace(row, format=format) for row in rows]

    monkeypatch.setattr(append_commands, "need_card", lambda *_: None)
    monkeypatch.setattr(Own, "available", lambda self: None)
    monkeypatch.setattr(machine, "stamp", lambda commit: {"card": "NVIDIA H200", "commit": commit})
    monkeypatch.setattr(append, "measure", measure)
    done = CliRunner().invoke(cli, ["append", "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    table = (tmp_path / "append.md").read_text()
    speed = 6 * 2048 * KV_HEADS * HEAD_DIM / 2.0 * 1e-3
    assert f"| 2048 | nhd | 2.00 | {speed:.1f} | 50.00 | 25.0 |" in table and "| 32 | nhd |  |  | 50.00 |  |" in table
    assert "* kernel, 32 tokens, nhd: wrong: bytes differ" in table
    again = CliRunner().invoke(cli, ["append", "--from", str(tmp_path / "append.csv")])
    assert again.exit_code == 0 and (tmp_path / "append.md").read_text() == table
