"""The wheel that is given to others: what it must hold, and what an installed one must do.

Regressions these catch: a wheel with the kernels of one card, an empty file of kernels, a trial that imports the
checkout, or that any result passes.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import build_extension, wheel

GOOD: dict[str, Any] = {"file": "/e/lib/fp8cutlass/__init__.py", "error": 0.05, "library": {"loads": True}, "doctor": 0}


def fake(path: Path, targets: list[str], **content: bytes) -> Path:
    names = ["_C.so", *(f"_built/{name}" for name in build_extension.TABLES)]
    with zipfile.ZipFile(path, "w") as file:
        for name in [*names, *(f"_built/kernels-{target}.bin" for target in targets)]:
            file.writestr(f"fp8cutlass/{name}", content.get(name.split(".")[0].split("/")[-1].replace("-", "_"), b"x"))
    return path


def test_a_wheel_holds_the_kernels_of_every_target(tmp_path: Path) -> None:
    assert wheel.all_targets() == ["sm89", "sm90a"]
    assert wheel.missing(fake(tmp_path / "all.whl", ["sm89", "sm90a"]), wheel.all_targets()) == []
    one = fake(tmp_path / "one.whl", ["sm89"])
    assert wheel.missing(one, wheel.all_targets()) == ["fp8cutlass/_built/kernels-sm90a.bin"]
    empty = fake(tmp_path / "empty.whl", ["sm89", "sm90a"], kernels_sm89=b"", _C=b"")
    assert wheel.missing(empty, wheel.all_targets()) == ["fp8cutlass/_C.so", "fp8cutlass/_built/kernels-sm89.bin"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "/checkout/python/fp8cutlass/__init__.py"}, "another copy"),
        ({"library": {"loads": False}}, "does not load"),
        ({"library": None}, "does not load"),
        ({"error": 0.2}, "not that of FP8"),
        ({"error": 0.0}, "not that of FP8"),
        ({"error": float("nan")}, "not that of FP8"),
        ({"doctor": 1}, "doctor ended with 1"),
    ],
)
def test_a_trial_can_fail(change: dict[str, Any], message: str) -> None:
    assert wheel.judge(GOOD, Path("/e")) == []
    (wrong,) = wheel.judge(GOOD | change, Path("/e"))
    assert message in wrong


def test_what_fails_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--try", "x.whl", "--python", "/nowhere/python"])
    assert wheel.main() == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_release_workflow_builds_in_the_image_of_the_tag() -> None:
    text = (Path(__file__).resolve().parents[2] / ".github" / "workflows" / "wheel.yml").read_text()
    assert f"{wheel.WANTED}_x86_64" in text and "make wheel" in text and "tags:" in text
