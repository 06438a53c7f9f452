"""Faults that are planted are faults, and noticed: what of scripts/broken.py needs no card.

Regressions these catch: a fault that plants nothing since the kernels changed, a rule that nothing but itself enforces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from codegen.gates.toolbox import ToolboxError, open_toolbox
from scripts import broken


def test_every_fault_is_planted(tmp_path: Path) -> None:
    generated = broken.generate(tmp_path / "generated")
    before = {path: path.read_text() for path in generated.rglob("*.cu")}
    broken.broken_sources(generated)
    changed = {path.stem for path, text in before.items() if path.read_text() != text}
    assert changed == {fault.kernel for fault in broken.FAULTS}
    with pytest.raises(LookupError, match="has 0 times"):
        broken.broken_sources(generated)


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
