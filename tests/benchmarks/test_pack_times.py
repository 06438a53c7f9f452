"""The time of quantising and packing: what is launched, what counts as a result, the arithmetic, the files.

The card's part is replaced: times are made up, and bytes are written by the host.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import data, pack
from benchmarks.__main__ import cli
from benchmarks.grid import QUICK
from benchmarks.pack import FORMS, Form, PackTime
from benchmarks.peers import own
from benchmarks.results import write_records
from benchmarks.shapes import Shape, square
from fp8cutlass import timing
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir
from fp8cutlass.native import fused

SHAPE = square(1, 2, 300, 64, False)


class Replay:
    def __init__(self, launch: Callable[[], object]) -> None:
        self.replay = launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs `pack.measure` on CPU tensors; returns the arguments of each launch."""
    calls: list[dict[str, Any]] = []

    def fill(made: fused.Operands, *operands: torch.Tensor, **options: Any) -> None:
        calls.append({**options, "made": made})
        for x in pack._tensors(made):
            x.view(torch.uint8).fill_(7)

    def capture(launch: Callable[[], object], target_us: float) -> timing.Capture:
        return timing.Capture(Replay(launch), 2, launch(), launch)  # type: ignore[arg-type]

    def interleave(captures: list[timing.Capture], replays: int, sample: object = None) -> list[timing.Timing]:
        return [timing.summarise(2, [4.0 + i, 5.0 + i, 6.0 + i]) for i, _ in enumerate(captures)]

    at = Target(generated_dir(), "sm90a", 132)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fused, "fill", fill)
    monkeypatch.setattr(own, "target", lambda device: at)
    for name, stand_in in {
        "capture": capture,
        "interleave": interleave,
        "target": lambda device: at,
        "make_data": lambda shape: data.make_data(shape, "cpu"),
    }.items():
        monkeypatch.setattr(pack, name, stand_in)
    return calls


def test_every_form_is_launched_as_attention_would(launched: list[dict[str, Any]]) -> None:
    found, failed = pack.measure(SHAPE, QUICK)
    assert failed == [] and [row.form for row in found] == [form.label for form in FORMS]
    assert [row.passes for row in found] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [row.median_us for row in found] == [5.0 + i for i in range(len(FORMS))]
    of_form = launched[::3]  # captured, launched, replayed
    for form, row, options in zip(FORMS, found, of_form, strict=True):
        assert options["hadamard"] == form.hadamard and (options["made"].k_mean is not None) == form.smooth_k
        assert options["key_block"] == row.key_block and row.kernel.startswith("sm90a_fwd_d64_")
        assert options["amax"] == (448.0 if "_exp2" in row.kernel else 14.0) and not options["negate_q"]
    assert [options["granularity"]["q"] for options in of_form] == ["token"] * 4 + ["head", "tensor", "token", "token"]
    assert of_form[-1]["granularity"]["v"] == "channel"


def test_a_replay_that_leaves_bytes_out_has_no_time(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, count = fused.fill, [0]

    def forgets(made: fused.Operands, *operands: torch.Tensor, **options: Any) -> None:
        count[0] += 1
        if count[0] % 3:
            right(made, *operands, **options)

    monkeypatch.setattr(fused, "fill", forgets)
    found, failed = pack.measure(SHAPE, QUICK, FORMS[:1])
    assert found == [] and len(failed) == 1 and "are not those of an eager launch" in failed[0]


def test_a_form_that_cannot_be_launched_is_named_and_the_others_run(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fused.fill

    def broken(made: fused.Operands, *operands: torch.Tensor, **options: Any) -> None:
        if options["hadamard"]:
            raise RuntimeError("no kernel\nand a trace")
        right(made, *operands, **options)

    monkeypatch.setattr(fused, "fill", broken)
    found, failed = pack.measure(SHAPE, QUICK, FORMS[:3])
    assert [row.form for row in found] == ["block", "block, smooth K"]
    assert failed == [f"block, Hadamard at {SHAPE.label}: no kernel"]


def test_traffic_is_three_bytes_an_element_of_q_k_and_v() -> None:
    """By hand: 16,384 tokens x 2048 are 33.6M elements; shared heads of K and V are read once."""
    assert pack.tb_per_s(square(4, 32, 4096, 64, False), 100.0) == pytest.approx(3 * 3 * 16384 * 2048 / 100e-6 / 1e12)
    shared = Shape(64, False, 100, 300, 1, 8, 2)
    assert pack.tb_per_s(shared, 1.0) == pytest.approx(3 * 64 * (8 * 100 + 2 * 2 * 300) / 1e-6 / 1e12)


def _row(form: Form, head_dim: int, us: float) -> PackTime:
    return PackTime(form.label, head_dim, 128, 4, 16, 4096, 1, us, us, 0.031, 3.02, 9, 10, 1755.0, None, "k")


def test_the_table_compares_forms_of_a_head_dim() -> None:
    rows = [_row(FORMS[0], 64, 100.0), _row(FORMS[2], 64, 125.0), _row(FORMS[0], 128, 80.0), _row(FORMS[2], 256, 90.0)]
    text = pack.markdown({"card": "NVIDIA H200", "commit": "abc"}, rows, ["tensor at x: no kernel"])
    assert "on NVIDIA H200" in text and "* commit: abc" in text and "not timed: tensor at x: no kernel" in text
    lines = [line for line in text.splitlines() if line.startswith("| block")]
    assert lines[1] == "| block, Hadamard | 64 | 128 | 1 | 125.0 | 3.1% | 3.02 | 1.25 |"
    assert lines[2].endswith("| 1.00 |") and lines[3].endswith("|  |")


def test_the_csv_has_the_stamp_and_all_fields() -> None:
    file = io.StringIO()
    write_records(file, {"card": "NVIDIA H200"}, PackTime, [_row(FORMS[1], 64, 100.0)])
    assert file.getvalue().splitlines() == [
        "# card: NVIDIA H200",
        "form,head_dim,key_block,batch,heads,seqlen,passes,median_us,min_us,spread,tb_per_s,launches,replays,clock_mhz,"
        "power_w,kernel",
        '"block, smooth K",64,128,4,16,4096,1,100,100,0.031,3.02,9,10,1755,,k',
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_command_says_what_it_needs() -> None:
    found = CliRunner().invoke(cli, ["pack"])
    assert found.exit_code == 2 and "timing the kernel that packs needs a CUDA device" in found.output
    assert "Traceback" not in found.output


def test_a_head_dim_that_does_not_divide_the_width_is_refused() -> None:
    found = CliRunner().invoke(cli, ["pack", "--head-dim", "96"])
    assert found.exit_code == 2 and "--head-dim 96" in found.output
