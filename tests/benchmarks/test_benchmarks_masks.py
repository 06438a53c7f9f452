"""The command `masks` without a card: both forms of a mask say the same, a wrong result does not count, and tables.

Regressions these catch: FlexAttention that is timed on another mask than ours; a share of tiles that is not what a
kernel visits; a result of another mask that looks fast.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import masks, masks_commands
from benchmarks.__main__ import cli
from benchmarks.mask_problems import Problem, problems
from benchmarks.masks import DENSE, FLEX, OURS, PACK, SEEN, make_data, measure
from benchmarks.results import OK, UNAVAILABLE, WRONG

CPU = torch.device("cpu")
TINY = problems([64], tiny=True)


@pytest.mark.parametrize("problem", TINY, ids=lambda p: p.name)
def test_both_forms_are_the_same_mask(problem: Problem) -> None:
    data = make_data(problem, CPU)
    rows = torch.arange(problem.rows)
    seen = data.mask.dense().expand(problem.batch, problem.heads, problem.rows, problem.keys)
    for b in (0, problem.batch - 1):
        assert torch.equal(data.seen(b, 1, rows), seen[b, 1])
    assert data.pairs() == int(seen[:, 0].sum()) > 0


def test_a_problem_is_timed_and_a_wrong_result_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(p for p in TINY if p.name.startswith("window"))
    rows = {r.contender: r for r in measure(problem, CPU, masks.Settings(), (OURS, DENSE, SEEN, PACK))}
    assert all(r.status == OK and r.median_us for r in rows.values()) and set(rows) == {OURS, DENSE, SEEN, PACK}
    packing = rows[PACK]
    assert packing.tflops is None and packing.gbytes_s == pytest.approx(512**2 * 1.125 / packing.median_us * 1e-3)
    counted = make_data(problem, CPU).mask.counted()
    assert rows[OURS].visited == (counted.part + counted.whole) / sum(counted) < 1
    assert rows[OURS].seen == pytest.approx((32 * 512 - 31 * 16) / 512**2)
    monkeypatch.setattr(masks, "_ours", lambda data, mask: (lambda: masks.attention(data.q, data.k, data.v, enable_gqa=True), ""))  # fmt: skip  # noqa: E501
    assert [r.status for r in measure(problem, CPU, masks.Settings(), (OURS,))] == [WRONG]


def test_a_bias_is_added_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(p for p in TINY if p.bias is torch.float32)
    wanted = (OURS, DENSE, SEEN, PACK, masks.SDPA)
    rows = {r.contender: r for r in measure(problem, CPU, masks.Settings(), wanted)}
    assert set(rows) == {OURS, DENSE, masks.SDPA} and {r.status for r in rows.values()} == {OK}
    assert "exp2" in rows[OURS].kernel and (rows[masks.SDPA].error or 1) < 0.02
    data = make_data(problem, CPU)
    assert data.error(masks._ours(data, None)[0]()) > 0.3


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(data: masks.Data) -> masks.Launch:
        raise ImportError("no flex")

    monkeypatch.setattr(masks, "_flex", missing)
    (row,) = measure(TINY[0], CPU, masks.Settings(), (FLEX,))
    assert (row.status, row.reason) == (UNAVAILABLE, "no flex")


def test_the_table() -> None:
    row = masks.row_of(TINY[1], OURS, "fp8", OK, median_us=200.0, visited=0.25, seen=0.1, tflops=5.0)
    others = [replace(row, contender=DENSE, median_us=400.0), replace(row, contender=FLEX, median_us=300.0)]
    lost = masks.row_of(TINY[1], SEEN, "fp8", WRONG, "far off")
    text = masks_commands.markdown({"card": "a card"}, [row, *others, lost])
    cells = next(line for line in text.splitlines() if line.startswith("| 64")).split(" | ")
    assert cells[3:8] == ["25.0%", "200.0", "5", "400.0", "2.00"] and cells[-2] == "1.50"
    assert "fp8cutlass_tensor on 8 documents, causal, head_dim 64: wrong: far off" in text


def test_the_command_runs_without_a_card(tmp_path: Path) -> None:
    options = ["masks", "--tiny", "--no-peers", "--head-dim", "64", "--mask", "tree", "--commit", "x"]
    done = CliRunner().invoke(cli, [*options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "masks.csv").read_text().splitlines()) > 4 and "tree of 64" in done.output
    assert CliRunner().invoke(cli, options).exit_code == 2
    assert CliRunner().invoke(cli, [*options[:6], "--mask", "nosuch", "--out", str(tmp_path)]).exit_code == 2
