"""The pictures of the documentation say what the committed measurements say.

Regressions these catch: a kernel's time where a whole call's was meant, a peer that is not the fastest, a wrong or
unmeasured row that is drawn, a picture that changes although the measurements did not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import plot
from benchmarks.__main__ import cli
from benchmarks.pictures import RESULTS, draw_losses, draw_speedups, losses, speedups
from benchmarks.results import read

ROOT = Path(__file__).resolve().parents[2]
ROWS = read(RESULTS / "grid.csv")[1]


def test_speedups_are_those_of_the_committed_table() -> None:
    """docs/evidence/results.md rounds the same numbers, and was made by another function."""
    found = speedups(ROWS)
    text = (ROOT / "docs" / "evidence" / "results.md").read_text()
    for head_dim in (64, 128, 256):
        pairs = zip(found[head_dim, False].values(), found[head_dim, True].values(), strict=True)
        assert f"| {head_dim} full / causal | {' | '.join(f'{a:.2f} / {b:.2f}' for a, b in pairs)} |" in text


def test_losses_are_of_one_size_and_of_right_results() -> None:
    found = losses(ROWS)
    assert {"fp8cutlass", "fa3_fp8", "cudnn_fp8", "fa3_bf16", "cudnn_bf16", "fa2_bf16"} == set(found)
    assert 1300 < found["fp8cutlass"][0] < 1350 and 0.05 < found["fp8cutlass"][1] < 0.06
    assert found["fa3_bf16"][1] < 0.003
    assert set(losses(read(RESULTS / "precision.csv")[1])) == {
        "fp8cutlass",
        *(f"fp8cutlass_{precision}" for precision in ("balanced", "accurate", "high")),
    }


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    for draw in (draw_speedups, draw_losses):
        with pytest.raises(plot.PlotError, match="nothing to plot"):
            draw({}, "", tmp_path / "none.png")


def test_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        assert CliRunner().invoke(cli, ["pictures", "--out", str(tmp_path / folder)]).exit_code == 0
    for name in ("speedup.png", "error_speed.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
