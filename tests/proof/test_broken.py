"""Faults that are planted are faults, and noticed: what of scripts/broken.py needs no card.

Regressions these catch: a fault that plants nothing since the kernels changed, a rule that nothing but itself enforces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from decode_host import Kernel, batch, wrong

from codegen.cli import main as codegen_main
from codegen.decode import ALL
from codegen.gates.toolbox import ToolboxError, open_toolbox
from scripts import broken


def codegen_here(arguments: list[str]) -> None:
    assert arguments[:2] == ["-m", "codegen"]
    result = CliRunner().invoke(codegen_main, arguments[2:])
    assert result.exit_code == 0, result.output


def test_every_fault_is_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator runs in this process, which may have selected already."""
    monkeypatch.setattr(broken, "_run", codegen_here)
    generated = broken.generate(tmp_path / "generated")
    before = {path: path.read_text() for path in generated.rglob("*.cu")}
    broken.broken_sources(generated)
    changed = {path.stem for path, text in before.items() if path.read_text() != text}
    assert changed == {fault.kernel for fault in broken.FAULTS}
    with pytest.raises(LookupError, match="has 0 times"):
        broken.broken_sources(generated)


ON_THE_HOST = ("a slice goes", "is lost", "of another row", "from the last to arrive")


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_fault_of_decode_shows_on_the_host(name: str, tmp_path: Path) -> None:
    """Before a card has it: by results, or by bits that depend on the order in which CTAs arrive."""
    (fault,) = (f for f in broken.FAULTS if name in f.name)
    edit = (Path(fault.header).name or "kernel.cu", fault.old, fault.new)
    head_dim = next(d.head_dim for d in ALL if d.id == fault.kernel)
    b = batch((3000, 30, 40), [1, 2, 1], (8, 2), head_dim, 16, dtype=torch.float16)  # bf16 hides the order of most sums
    results = {}
    for state, edits in (("clean", []), ("broken", [edit])):
        kernel, found, bits = Kernel(fault.kernel, tmp_path / state, edits), "", []
        for seed in range(4):
            try:
                result = kernel.run(b, ctas=40, seed=seed)
            except AssertionError as error:
                found = str(error)
                continue
            found = found or wrong(b, result)
            bits.append(torch.cat((result.out.float().flatten(), result.lse.flatten())))
        differ = any(not torch.equal(x, bits[0]) for x in bits)
        results[state] = found or ("the order of arrival changes bits" if differ else "")
    assert results["clean"] == "" and results["broken"], results


def test_each_fault_of_decode_is_in_a_kernel_of_its_own() -> None:
    """A test of the card is chosen by the kernel's id, which is no part of another's."""
    kernels = [fault.kernel for fault in broken.FAULTS]
    assert len(set(kernels)) == len(kernels) and sum(k.startswith("decode_sm90a_") for k in kernels) == 6
    assert not [(a, b) for a in kernels for b in kernels if a != b and a in b]


def test_tests_without_an_end_notice_only_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host any tests may take long."""
    monkeypatch.setattr(broken, "TESTS_END", 0.01)
    hanging = {fault: broken._by_tests(fault, dict(os.environ))[0] for fault in broken.FAULTS if fault.by == "tests"}
    assert hanging == {fault: fault.hangs for fault in hanging} and set(hanging.values()) == {True, False}


def test_a_rule_that_is_switched_off_is_noticed(tmp_path: Path) -> None:
    try:
        open_toolbox()
    except ToolboxError as error:
        pytest.skip(str(error))
    findings = list(broken.by_compiling(tmp_path))
    assert len(findings) == len(broken.SWITCHED_OFF) and all(finding.caught for finding in findings), findings


def test_a_point_has_to_be_refused_by_that_rule_alone() -> None:
    with pytest.raises(LookupError, match="is refused by"):
        broken.refused_by("SMEM", broken.SWITCHED_OFF[0][1])
