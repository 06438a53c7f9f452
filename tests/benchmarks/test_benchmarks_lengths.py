"""`lengths` on the CPU with tiny sizes: which calls, both ways to launch them, and what is read from their times.

Regressions these catch: a minimum length below which a batch is still slower; a speedup upside down; calls of a batch
that holds another number of tokens than its name says.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import results, turns
from benchmarks.__main__ import cli
from benchmarks.families import lengths
from benchmarks.families.lengths import LengthTime
from benchmarks.families.measure import FamilyTime, _row, small
from benchmarks.grid import QUICK
from benchmarks.results import OK, read_records
from fp8cutlass import stats
from fp8cutlass.integrations import CAUSAL, FULL, LAUNCHED_WORK, MASKED, minimum_length, set_minimum_length


def test_the_calls() -> None:
    cases = lengths.cases()
    assert len({case.label + case.part for case in cases}) == len(cases)
    for case in cases:
        assert case.heads * (case.value_dim or case.head_dim) == lengths.WIDTH and case.rows == case.keys
        assert case.part != "16k tokens" or case.batch * case.rows == pytest.approx(lengths.TOKENS, abs=case.rows)
        assert not case.padded or case.batch > 1


def test_both_ways_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    case = small(lengths.cases(lengths.KINDS[:1], (256,))[0])
    rows = lengths.measured(case, torch.device("cpu"), QUICK)
    assert [row.contender for row in rows] == ["sdpa", "ours"] and all((row.eager_us or 0.0) > 0 for row in rows)
    set_minimum_length(10_000)
    try:
        (row,) = lengths.measured(case, torch.device("cpu"), QUICK)
    finally:
        set_minimum_length(None)
    assert row.why == "short" and lengths.speedups([row]) == {(case.family, case.mask, case.part): {64: (1.0, 1.0)}}


def timed(n: int, graph: float, eager: float) -> list[LengthTime]:
    """SDPA takes 100 us, ours less by these factors."""
    case = replace(lengths.cases(lengths.KINDS[:1], (n,))[0])
    found = []
    for name, us, one in (("sdpa", 100.0, 100.0), ("ours", 100.0 / graph, 100.0 / eager)):
        row = replace(_row(case, name, "fp8", "served", "", OK), median_us=us)
        found.append(LengthTime(**{f.name: getattr(row, f.name) for f in fields(FamilyTime)}, eager_us=one))
    return found


def test_the_least_length_is_faster_both_ways_and_so_is_all_beyond() -> None:
    rows = [*timed(256, 1.2, 1.2), *timed(512, 1.2, 1.01), *timed(1024, 1.03, 1.2), *timed(2048, 1.5, 1.02)]
    ((_, by_length),) = lengths.speedups(rows).items()
    assert lengths.least(by_length) == 1024
    assert lengths.least({256: (1.5, 1.5), 512: (1.0, 1.5)}) is None
    text = lengths.markdown({"card": "NVIDIA H100"}, rows)
    assert "| 64 | full | batch 1 | 1.20 / 1.20 | 1.20 / 1.01 | 1.03 / 1.20 | 1.50 / 1.02 | 1024 |" in text


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    done = CliRunner().invoke(cli, ["lengths", "--tiny", "--head-dim", "192", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    _, rows = read_records(tmp_path / "lengths.csv", LengthTime)
    assert {row.status for row in rows} == {OK} and {row.head_dim for row in rows} == {64}
    table = (tmp_path / "lengths.md").read_text()
    (tmp_path / "lengths.md").unlink()
    again = CliRunner().invoke(cli, ["lengths", "--from", str(tmp_path / "lengths.csv")])
    assert again.exit_code == 0 and (tmp_path / "lengths.md").read_text() == table
    assert CliRunner().invoke(cli, ["lengths", "--head-dim", "7"]).exit_code == 2
    assert CliRunner().invoke(cli, ["lengths", "--tiny"]).exit_code == 2


RESULTS = sorted((Path(lengths.__file__).parents[1] / "results" / "h100").glob("lengths*.csv"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_call_that_is_served_by_default_was_slower(path: Path) -> None:
    """Of what was measured, in graphs and launched one by one."""
    _, rows = read_records(path, LengthTime)
    calls: dict[tuple[object, ...], dict[str, LengthTime]] = {}
    for row in rows:
        calls.setdefault((row.family, row.part, row.rows, row.mask), {})[row.contender] = row
    judged = 0
    for (family, *_, mask), of in calls.items():
        if set(of) != {"sdpa", "ours"}:
            continue
        sdpa, ours = of["sdpa"], of["ours"]
        width = int(str(family).partition("/")[2] or ours.head_dim)
        kind = MASKED if "window" in str(mask) or "padded" in str(mask) else CAUSAL if mask == "causal" else FULL
        work = stats.work(ours.batch, ours.heads, ours.rows, ours.keys, ours.head_dim + width, causal=kind != FULL)
        if ours.rows < minimum_length(ours.head_dim, width, kind, True):
            continue
        judged += 1
        assert ours.median_us <= sdpa.median_us, (family, mask, ours.part, ours.rows)  # type: ignore[operator]
        if work >= LAUNCHED_WORK:
            assert ours.eager_us <= sdpa.eager_us, (family, mask, ours.part, ours.rows)  # type: ignore[operator]
    assert judged > 20


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_call_of_integers_that_is_served_by_default_was_slower(head_dim: int) -> None:
    """Than the fastest attention of torch."""
    _, rows = results.read(Path(lengths.__file__).parents[1] / "results" / "h200" / f"int8_{head_dim}.csv")
    calls: dict[tuple[int, bool], dict[str, float]] = {}
    for row in rows:
        shape = row.shape
        if row.status == OK and shape.batch * shape.seqlen_q == lengths.TOKENS:
            calls.setdefault((shape.seqlen_k, shape.causal), {})[row.contender] = float(row.median_us or 0.0)
    served = {}
    for (keys, causal), of in calls.items():
        faster = min(of["cudnn_bf16"], of["fa2_bf16"]) / of["fp8cutlass_call_int8"]
        served[keys, causal] = keys >= minimum_length(head_dim, head_dim, CAUSAL if causal else FULL, True, "int8")
        assert faster >= 1.02 or not served[keys, causal], (keys, causal)
    assert set(served.values()) == {True, False}
