"""The comparison of losses without a card: our calls through the emulator, and contenders whose loss is known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, plot
from benchmarks.accuracy import CASES, MODES, SHIFTED, Calls, Case, Loss
from benchmarks.data import Data
from benchmarks.peers import PEERS, Contender, Refused
from benchmarks.results import FAILED, OK, UNAVAILABLE, write_records
from benchmarks.shapes import Shape, square
from fp8cutlass.accuracy.standard import MODES as STANDARD
from fp8cutlass.accuracy.standard import SMALL

STAMP = {"card": "NVIDIA H200", "commit": "abc"}


class Fake:
    """A peer that gives the exact output times a factor, or raises."""

    precision = "fp8"

    def __init__(self, name: str, factor: float = 1.0, absent: str | None = None, error: Exception | None = None):
        self.name, self._factor, self._absent, self._error = name, factor, absent, error

    def available(self) -> str | None:
        return self._absent

    def version(self) -> str:
        return "1"

    def prepare(self, data: Data) -> list[Contender]:
        if isinstance(self._error, Refused):
            raise self._error

        def launch() -> torch.Tensor:
            if self._error is not None:
                raise self._error
            out = torch.empty_like(data.q, dtype=torch.float32)
            for pair, expected in zip(data.pairs, data.expected, strict=True):
                out[pair] = self._factor / 4 * expected
            return out.transpose(1, 2)

        return [Contender(self.name, "fp8", launch, layout="bshd", out_descale=4.0)]


def test_losses_of_known_contenders() -> None:
    peers = [
        Fake("exact"),
        Fake("five percent", 1.05),
        Fake("absent", absent="no such wheel\nsecond line"),
        Fake("refusing", error=Refused("head_dim")),
        Fake("broken", error=RuntimeError("illegal")),
    ]
    case = Case(SHIFTED, Shape(64, False, 16, 300, 1, 2, 2))
    losses = {loss.contender: loss for loss in accuracy.measure(case, peers, "cpu")}
    exact, off, *others = (losses[peer.name] for peer in peers)
    assert exact.status == OK and exact.relative_l2 == exact.rmse == exact.max_error == exact.bias == 0.0
    assert off.relative_l2 == pytest.approx(0.05, rel=1e-4) and off.bias == pytest.approx(0.05, rel=1e-4)
    assert [(x.status, x.reason) for x in others] == [
        (UNAVAILABLE, "no such wheel"),
        (UNAVAILABLE, "head_dim"),
        (FAILED, "illegal"),
    ]


def test_inputs_are_those_of_the_standard_and_values_with_a_mean() -> None:
    assert {case.inputs for case in CASES} == {"randn", "outlier", "K bias", SHIFTED}
    assert set(accuracy.PEER_NAMES) <= set(PEERS)
    q, k, v = Case(SHIFTED, Shape(64, False, 16, 300, 1, 2, 2)).draw()
    assert q.shape == (1, 2, 16, 64) and k.shape == v.shape == (1, 2, 300, 64)
    assert float(v.float().mean()) == pytest.approx(1.0, abs=0.02) and abs(float(k.float().mean())) < 0.02


def test_our_calls_lose_what_the_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode by the emulator, the whole output, under the gates of the accuracy table."""
    monkeypatch.setattr(Calls, "available", lambda self: None)
    losses = {x.contender: x for x in accuracy.measure(Case("outlier", square(*SMALL, False)), [Calls()], "cpu")}
    assert list(losses) == list(MODES) and {x.status for x in losses.values()} == {OK}
    figures = {mode.name: 1.25 * mode.figure("outlier", SMALL) for mode in STANDARD}
    for name, mode in zip(MODES, ("block", "block", "block, both", "token, both", "block", "int8"), strict=True):
        loss = losses[name].relative_l2
        assert loss is not None and 0.02 < loss <= figures[mode]


def test_table_csv_and_plot(tmp_path: Path) -> None:
    losses = [
        Loss("randn", "(1, 8, 512, 64) full", "fp8cutlass", OK, "", 0.0533, 4e-3, 3e-2, 1e-4),
        Loss(SHIFTED, "(1, 2, 128x131072, 64) full", "fp8cutlass", OK, "", 0.002, 2e-3, 1e-2, -0.0003),
        Loss(SHIFTED, "(1, 2, 128x131072, 64) full", "fa3_fp8", OK, "", 0.57, 0.57, 0.6, -0.57),
        Loss("randn", "(1, 8, 512, 64) full", "fa3_fp8", FAILED, "illegal"),
    ]
    text = accuracy.markdown(STAMP, losses)
    assert "| fp8cutlass | 5.33 | 0.20 |" in text and "| fa3_fp8 |  | 57.00 |" in text
    assert "| fp8cutlass | -0.03 |" in text and "* fa3_fp8: failed: illegal" in text
    file = io.StringIO()
    write_records(file, STAMP, Loss, losses)
    assert file.getvalue().splitlines()[-1].endswith(",fa3_fp8,failed,illegal,,,,")
    pytest.importorskip("matplotlib")
    plot.draw_losses(STAMP, losses, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000
    with pytest.raises(plot.PlotError):
        plot.draw_losses(STAMP, losses[3:], tmp_path / "nothing.png")
