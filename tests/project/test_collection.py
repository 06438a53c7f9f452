"""What is collected where: the tests on a card are left out without one, and must not rot for that.

Regressions these catch: a test in tests/gpu that names what was renamed, or a parameter that its function lacks; files
that are left out without a word, or although they were asked for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CARD_TESTS = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def test_the_tests_on_a_card_can_be_collected() -> None:
    """Every file by name, in a process of its own, as a folder is left out without a card."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *map(str, CARD_TESTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {Path(name).name for name in re.findall(r"^(\S+?\.py)::", done.stdout, re.M)}
    assert collected == {path.name for path in CARD_TESTS}


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """tests/conftest.py, as pytest loaded it: a folder below may have one of the same name."""
    plugins = request.config.pluginmanager.get_plugins()
    return next(p for p in plugins if getattr(p, "__file__", None) == str(ROOT / "tests" / "conftest.py"))


@pytest.mark.parametrize(
    ("arguments", "card", "files"),
    [
        (["tests"], False, len(CARD_TESTS)),
        (["."], False, len(CARD_TESTS)),
        (["tests"], True, 0),
        (["tests/api"], False, 0),
        (["tests/gpu"], False, 0),
        (["tests", "tests/gpu/test_gpu_pack.py::test_x"], False, 0),
    ],
)
def test_what_is_left_out(
    arguments: list[str], card: bool, files: int, conftest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    config: Any = SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=ROOT))
    assert len(conftest.left_out(config)) == files
    ignored = {x: conftest.pytest_ignore_collect(ROOT / "tests" / x, config) for x in ("gpu", "api")}
    assert ignored == {"gpu": True if files else None, "api": None}
