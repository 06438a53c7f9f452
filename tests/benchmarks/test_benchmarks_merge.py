"""The benchmark of merging without a card: its operands, its bytes, what counts as a result, and its table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import machine, merge, merge_commands
from benchmarks.__main__ import cli
from benchmarks.merge import CALL, EXACT, KERNEL, MERGE, OPERATIONS, MergeTime, by_kernel, by_torch, different, make
from benchmarks.peers import Own
from benchmarks.results import OK, WRONG
from fp8cutlass import merge_attention

STAMP = {"card": "NVIDIA H100", "commit": "abc"}


def test_torch_operations_merge_in_place() -> None:
    parts = make(2, 32, 50, "cpu")
    wanted, lse = merge_attention(parts.out, parts.lse, parts.to, parts.to_lse)
    copies = parts.copies()
    out = by_torch(copies)
    assert out is copies.out and torch.equal(out, wanted) and torch.equal(copies.lse, lse)
    assert different(wanted, out) == 0.0 and different(wanted, out + 1e-3) == math.inf


def test_where_there_is_no_kernel_it_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="does not take"):
        by_kernel(make(1, 32, 8, "cpu"))


def test_bytes_are_ten_an_element_and_twelve_a_row() -> None:
    assert make(3, 64, 7, "cpu").moved == 3 * 7 * (64 * 10 + 12)


def timed(contender: str, us: float | None, moved: int | None = None) -> MergeTime:
    status, reason = (OK, "") if us else (WRONG, "off by 1")
    return MergeTime(4, 2, 64, 1000, contender, "fp8", status, reason, moved, median_us=us)


def test_the_table(tmp_path: Path) -> None:
    rows = [timed(CALL, 100.0), timed(EXACT, 102.0), timed(MERGE, 100.5), timed(KERNEL, 2.0, 4_000_000)]
    text = merge_commands.markdown(STAMP, [*rows, timed(OPERATIONS, None, 4_000_000)])
    assert "| 4/2 x 64 | 1000 | 100.0 | 1.020 | 1.005 | 2.0 | 2.00 |  |" in text
    assert "* merge by torch operations on 4 heads of 64, 1000 tokens: wrong: off by 1" in text


def test_the_command_writes_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Own, "available", lambda self: None)
    monkeypatch.setattr(machine, "stamp", lambda commit: STAMP)
    monkeypatch.setattr(merge, "measure", lambda problem, settings: [timed(CALL, 10.0), timed(KERNEL, 2.0, 8)])
    result = CliRunner().invoke(cli, ["merge", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "merge.csv").is_file() and "| 4/2 x 64 |" in (tmp_path / "merge.md").read_text()
    again = CliRunner().invoke(cli, ["merge", "--from", str(tmp_path / "merge.csv")])
    assert again.exit_code == 0, again.output
