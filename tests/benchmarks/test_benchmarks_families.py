"""`families` on the CPU with tiny sizes: the adapters' choice, what is compared, arithmetic, files.

Regressions these catch: a call that is timed though the adapter leaves it; another mask for SDPA than for the adapter;
a family that is fast because a slow call is not counted; a ratio upside down.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import turns
from benchmarks.__main__ import cli
from benchmarks.families import measure, report
from benchmarks.families.cases import CASES, FAMILIES, TRANSFORMERS, Case
from benchmarks.families.measure import FamilyTime
from benchmarks.grid import QUICK
from benchmarks.results import FAILED, OK, WRONG, read_records
from fp8cutlass.integrations import set_minimum_length
from fp8cutlass.stats import Reason

CPU = torch.device("cpu")
BY_LABEL = {f"{case.family}, {case.part}": case for case in CASES}


def test_the_table_is_one_of_models() -> None:
    assert len(BY_LABEL) == len(CASES) and len(FAMILIES) > 20
    for case in CASES:
        assert case.heads % case.kv_heads == 0 and case.head_dim <= 256 and case.values <= case.head_dim, case.label
        assert case.count > 0 and case.source and case.rows <= case.keys or case.part.startswith("cross"), case.label
    assert len({case.label for case in CASES}) == len(CASES)


KINDS = ("Llama, prefill", "Llama, padded, prefill", "Mistral, window", "gpt-oss, window", "DeepSeek, latent",
         "BERT, padded, encoder", "Wan, cross", "Gemma 2, full", "Gemma 2, window", "Qwen-Image, joint")  # fmt: skip


@pytest.mark.parametrize("label", KINDS)
def test_the_adapter_computes_what_sdpa_does(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    rows = measure.measure(measure.small(BY_LABEL[label]), CPU, QUICK)
    assert [(row.contender, row.status, row.choice) for row in rows] == [("sdpa", OK, "served"), ("ours", OK, "served")]
    assert rows[0].error == 0 and 0.01 < (rows[1].error or 0.0) < 0.08


@pytest.mark.parametrize(("label", "why"), [("PixArt, cross", "mask")])
def test_what_the_adapter_leaves_is_not_timed(label: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    (row,) = measure.measure(measure.small(BY_LABEL[label]), CPU, QUICK)
    assert (row.contender, row.choice, row.why, row.status) == ("sdpa", "left", why, OK)


def test_the_minimum_length_is_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    case = replace(measure.small(BY_LABEL["Flux, joint"]), rows=40, keys=40)
    set_minimum_length(41)
    try:
        (row,) = measure.measure(case, CPU, QUICK)
        assert row.why == "short"
        set_minimum_length(40)
        assert len(measure.measure(case, CPU, QUICK)) == 2
    finally:
        set_minimum_length(None)


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    monkeypatch.setattr(measure, "_band", lambda case, valid: measure.Band())
    rows = measure.measure(measure.small(BY_LABEL["Llama, prefill"]), CPU, QUICK)
    assert rows[1].status == WRONG and rows[1].median_us is None


@pytest.mark.parametrize("label", [label for label, case in BY_LABEL.items() if case.door == TRANSFORMERS])
def test_the_adapter_gets_all_of_a_case(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap of 50 and a sink of -30 change no result, so a comparison would not notice their absence."""
    given: list[Any] = []
    monkeypatch.setattr(measure, "serve", lambda *all_of_it: given.append(all_of_it) or measure.Refusal(Reason.SHORT))
    case = measure.small(BY_LABEL[label])
    o = measure.make(case, CPU)
    measure.by_adapter(o)
    ((q, k, v, band, scale, softcap, sinks, bias),) = given
    assert (bias is o.mask and bias.shape == (1, case.heads, case.rows, case.keys)) if case.bias else bias is None
    assert q is o.q and k is o.k and v is o.v and scale is None
    assert (band.left, band.right, softcap) == (*case.window, case.softcap)
    assert band.ragged == case.padded
    assert sinks is None if not case.sinks else sinks.shape == (case.heads,)


def timed(case: Case, name: str, us: float | None, choice: str = "served", why: str = "", **more: Any) -> FamilyTime:
    row = measure._row(case, name, "bf16" if name == "sdpa" else "fp8", choice, why, OK if us else FAILED)
    return replace(row, median_us=us, error=0.05, **more)


SELF, CROSS = BY_LABEL["LTX, self"], BY_LABEL["LTX, cross"]
ROWS = [timed(SELF, "sdpa", 200.0), timed(SELF, "ours", 100.0), timed(CROSS, "sdpa", 50.0, "left", "mask")]


def test_a_family_is_all_its_calls() -> None:
    assert measure.total(ROWS) == (28 * 250.0, 28 * 150.0) and report.ratio(ROWS) == pytest.approx(0.6)
    text = report.markdown({"card": "NVIDIA H200"}, ROWS)
    assert "| LTX | 28 of 56 | 7.00 | 4.20 | 0.600 |" in text
    assert "| 200.0 | 100.0 | 2.00 | served | 5.0 |" in text and "| 50.0 |  |  | left: mask |  |" in text
    assert report.slower(ROWS) == []


def test_what_is_slower_or_has_no_time_is_named() -> None:
    slow = [timed(SELF, "sdpa", 100.0), timed(SELF, "ours", 102.5)]
    assert report.slower(slow) == ["LTX"] and report.slower([slow[0], timed(SELF, "ours", 102.0)]) == []
    assert report.slower([slow[0], timed(SELF, "ours", None)]) == ["LTX"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "HOST_REPLAYS", 1)
    done = CliRunner().invoke(
        cli, ["families", "--tiny", "--family", "t5", "--minimum", "9999", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    _, rows = read_records(tmp_path / "families.csv", FamilyTime)
    assert [(row.family, row.why) for row in rows] == [("T5", "short")]
    table = (tmp_path / "families.md").read_text()
    (tmp_path / "families.md").unlink()
    again = CliRunner().invoke(cli, ["families", "--from", str(tmp_path / "families.csv")])
    assert again.exit_code == 0 and (tmp_path / "families.md").read_text() == table
    assert CliRunner().invoke(cli, ["families", "--family", "nobody"]).exit_code == 2
    assert CliRunner().invoke(cli, ["families", "--tiny"]).exit_code == 2
