"""FP8CUTLASS_LOG: a line for each new decision, in the program's logging or on standard error; nothing when unset."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8cutlass import log
from fp8cutlass.choose import dispatch
from fp8cutlass.choose.dispatch import decide
from fp8cutlass.choose.problem import Problem
from fp8cutlass.choose.reuse import KVForm
from fp8cutlass.manifest import generated_dir

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem("sm90a", 64, 1, 777, 3, 5, "e4m3", "bf16", "block", True, "fast", quantised=True, sm_count=132)


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger as it is with the variable set, and dispatch using it."""
    monkeypatch.setenv(log.VARIABLE, "dispatch")
    log._requested.cache_clear()
    found = log.requested("dispatch")
    assert found is not None
    monkeypatch.setattr(dispatch, "_logger", found)
    monkeypatch.setattr(dispatch, "_logged", set())
    decide.cache_clear()
    yield found
    found.handlers.clear()
    found.setLevel(logging.NOTSET)
    log._requested.cache_clear()
    decide.cache_clear()


def test_a_decision_is_one_line_once(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the cache of decisions has forgotten it."""
    _, _, decision = decide(generated_dir(), PROBLEM)
    decide.cache_clear()
    decide(generated_dir(), PROBLEM)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fp8cutlass.dispatch", logging.INFO)
    text = record.getMessage()
    assert "\n" not in text and text.startswith("(3, 5, 1x777, 64) causal, e4m3 with descales to bf16")
    for part in (decision.variant, decision.criterion, decision.evidence, "sm90a with 132 SMs"):
        assert str(part) in text
    decide(generated_dir(), PROBLEM, str(decision.variant))
    decide(generated_dir(), dataclasses.replace(PROBLEM, batch=4))
    assert [("pinned" in r.getMessage(), "(4, 5" in r.getMessage()) for r in caplog.records[1:]] == [
        (True, False),
        (False, True),
    ]


def test_windows_are_logged_as_others_are(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """Their kernels have no cell of the table; also one that reads packed keys, and a pinned one."""
    window = dataclasses.replace(PROBLEM, window=True, causal=False, quantised=False)
    variant, _, _ = decide(generated_dir(), window)
    decide(generated_dir(), dataclasses.replace(window, batch=4), "", KVForm(64, variant.key_block, 14.0))
    decide(generated_dir(), window, variant.id)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all(variant.id in text and ") window, e4m3" in text for text in texts)
    assert ["pinned" in text for text in texts] == [False, False, True]


def test_unset_is_one_check() -> None:
    """The module holds None, and remembers nothing."""
    if os.environ.get(log.VARIABLE):
        pytest.skip(f"{log.VARIABLE} is set")
    assert dispatch._logger is None
    decide.cache_clear()
    decide(generated_dir(), PROBLEM)
    assert not dispatch._logged


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        ("", [], []),
        (" dispatch ", ["dispatch"], []),
        ("launch, dispatch;x dispatch launch", ["dispatch"], ["launch", "dispatch;x"]),
        ("DISPATCH", [], ["DISPATCH"]),
    ],
)
def test_words(text: str, known: list[str], unknown: list[str]) -> None:
    assert log.words(text) == (known, unknown)


def test_unknown_words_are_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "launch,dispatsch")
    log._requested.cache_clear()
    with pytest.warns(UserWarning, match="FP8CUTLASS_LOG names 'launch', 'dispatsch', .*known are dispatch"):
        assert log.requested("dispatch") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert log.requested("dispatch") is None
    log._requested.cache_clear()


CALL = """
import torch, fp8cutlass
q = torch.zeros(1, 2, 70, 64, dtype=torch.bfloat16)
for _ in range(3):
    fp8cutlass.attention(q, q, q)
fp8cutlass.attention(q, q, q, is_causal=True)
"""


@pytest.mark.parametrize(
    ("value", "before", "lines"),
    [
        (None, "", 0),
        ("dispatch", "", 2),
        ("dispatch", "import logging; logging.basicConfig(level=logging.INFO)", 2),
        ("dispatch", "import logging; logging.basicConfig(level=logging.WARNING)", 2),
        ("dispatch", "import logging; logging.getLogger('fp8cutlass').addHandler(logging.NullHandler())", 0),
    ],
)
def test_calls_are_heard(value: str | None, before: str, lines: int) -> None:
    """Without any logging set up too; a program that has set up its own hears each line once."""
    environment = {name: text for name, text in os.environ.items() if name != log.VARIABLE}
    environment |= {"PYTHONPATH": str(ROOT / "python")} | ({log.VARIABLE: value} if value else {})
    result = subprocess.run(
        [sys.executable, "-c", before + CALL], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("(1, 2, 70, 64)") == lines and result.stdout == ""
