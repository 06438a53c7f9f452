"""The proof reports what ran and nothing else.

Regressions these catch: a report of an earlier run taken for this one's, a step that was left out or cut off and looks
like one that passed, a planted bug that no tool saw.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import proof
from scripts.proof_report import read_tests, render

MACHINE = {"card": "a card", "commit": "abc"}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_x[1]" time="1"/>
<testcase classname="tests.test_a" name="test_x[2]"><failure message="boom &#10; 3 &lt; 4">long</failure></testcase>
<testcase classname="tests.test_a" name="test_y" time="0"><skipped type="pytest.skip" message="two cards"/></testcase>
<testcase classname="tests.test_a" name="test_z" time="0"><skipped type="pytest.xfail" message="torch 2.11"/></testcase>
<testcase classname="tests.test_gpu_builds" name="test_delayed" time="12.4"/>
</testsuite></testsuites>"""


def results(*steps: dict[str, Any], left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"machine": MACHINE, "steps": list(steps), "left_out": list(left_out)}


def step(name: str, status: str = "passed", **more: Any) -> dict[str, Any]:
    return {"name": name, "status": status, "seconds": 12.0, "command": f"run {name}"} | more


def test_outcomes_are_read_from_junit(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(JUNIT)
    read = read_tests(file)
    assert read["counts"] == {"passed": 2, "failed": 1, "skipped": 1, "known to fail": 1}
    assert read["reasons"] == {"skipped: two cards": 1, "known to fail: torch 2.11": 1}
    assert read["failures"] == ["test_a::test_x[2]: boom 3 < 4"]
    assert read["builds"] == [{"test": "test_gpu_builds::test_delayed", "outcome": "passed", "seconds": 12.4}]


def test_what_did_not_run_is_not_claimed() -> None:
    text = render(results(step("tests", "not run", reason="3 s were left"), left_out=("fuzz", "broken")))
    assert "No results: not run: 3 s were left." in text and "| fuzz | left out |" in text
    assert text.count("Left out.") == 2 + 4, "random calls, what is broken, and four tools"
    assert text.count("| not run |") == 4, "planted bugs"
    assert "No table was written." in text and "passed" not in text.split("## Tests")[1]


def test_what_ran_is_said() -> None:
    outcome = {"tool": "racecheck", "status": "found", "kernels": 3, "launches": 40, "left_out": 7}
    outcome |= {"kinds": 2, "kinds_left_out": ["a kernel"]}
    finding = {"fault": "a barrier", "kernel": "k", "by": "tests", "caught": False, "said": "a | b", "seconds": 1.0}
    tests = {"counts": {"passed": 5, "skipped": 1}, "reasons": {"skipped: x": 1}, "failures": [], "builds": []}
    fuzz = {
        "seed": 3,
        "statuses": {"passed": 8, "failed": 1},
        "seconds": 5.0,
        "kernels": {"k": 9},
        "failures": ["again"],
    }
    text = render(
        results(
            step("planted", report=[{"tool": "racecheck", "status": "found"}, {"tool": "memcheck", "status": "clean"}]),
            step("racecheck", "failed", report=[outcome]),
            step("broken", "failed", report=[finding]),
            step("tests", report=tests, edge_cases="| # | case |\n"),
            step("fuzz", "failed", report=fuzz),
        )
    )
    assert "| racecheck | reported | found | 2 of 3 | 3 | 40 | 7 |" in text
    assert "* racecheck reached no kernel of the kind of `a kernel`" in text
    assert "| memcheck | NOT REPORTED | Left out." in text
    assert "| a barrier | k | NOT NOTICED | tests | a \\| b |" in text
    assert "5 passed, 1 skipped" in text and "| 1 | skipped: x |" in text and "| # | case |" in text
    assert "Seed 3, 9 cases in 5 s: 8 passed, 1 failed, 0 unserved. 1 kernels" in text and "* `again`" in text


def one(
    tmp_path: Path, code: str, *, minutes: float = 1.0, wanted_s: float = 0.0, ends_s: float = 0.0
) -> dict[str, Any]:
    """A step that runs this code; an earlier run left a report."""
    report = tmp_path / "report.json"
    report.write_text('"of an earlier run"')
    p = proof.Proof(tmp_path, minutes, 2)
    p.run("step", [sys.executable, "-c", code, report], wanted_s=wanted_s, report=report, ends_s=ends_s)
    return p.steps[0]


WRITES = "import sys; open(sys.argv[1], 'w').write('7')"
WRITES_WHEN_STOPPED = """
import sys, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], 'w').write('7')
"""
DOES_NOT_STOP = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "options", "status", "report"),
    [
        (WRITES, {}, "passed", 7),
        (f"{WRITES}; sys.exit(1)", {}, "failed", 7),
        ("pass", {}, "failed", None),
        ("import time; time.sleep(60)", {"minutes": 0.02}, "failed", None),
        (DOES_NOT_STOP, {"minutes": 0.05, "ends_s": 1.0}, "failed", None),
        (WRITES_WHEN_STOPPED, {"minutes": 0.02}, "failed", None),
        (WRITES, {"wanted_s": 100.0}, "not run", None),
    ],
)
def test_a_step(tmp_path: Path, code: str, options: dict[str, float], status: str, report: Any) -> None:
    ran = one(tmp_path, code, **options)
    assert ran["status"] == status and ran.get("report") == report
    assert str(tmp_path) not in ran["command"] and ran["command"].startswith("python -c")


def test_a_step_writes_its_report_when_it_is_told_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process ignores SIGINT, as what a shell starts in the background does. Its time begins when it
    runs, which is seconds later on a busy machine."""
    ready = tmp_path / "ready"

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            while not ready.exists() and self.poll() is None:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(proof.subprocess, "Popen", Started)
    code = WRITES_WHEN_STOPPED.replace("time.sleep", f"open({str(ready)!r}, 'w').close(); time.sleep")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ran = one(tmp_path, code, minutes=1.0, ends_s=59.5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran["status"], ran["report"], ran["reason"]) == ("failed", 7, "ended at the deadline")


def test_all_steps_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command on a machine whose programs do nothing: it fails, says so of every step, and renders again."""
    monkeypatch.setattr(proof, "machine", lambda commit: MACHINE)
    monkeypatch.setattr(proof.shutil, "which", lambda name: "/usr/bin/true")
    monkeypatch.setattr(proof.sys, "executable", "/bin/true")
    monkeypatch.setattr(sys, "argv", ["proof.py", "--out", str(tmp_path), "--minutes", "2", "--jobs", "4"])
    assert proof.main() == 1
    written = json.loads((tmp_path / "results.json").read_text())
    assert [s["name"] for s in written["steps"]] == list(proof.STEPS) and written["left_out"] == []
    assert {s["name"]: s["status"] for s in written["steps"]} == {
        name: "passed" if name == "build" else "failed" for name in proof.STEPS
    }
    before = (tmp_path / "report.md").read_text()
    monkeypatch.setattr(sys, "argv", ["proof.py", "--out", str(tmp_path), "--render"])
    assert proof.main() == 1 and (tmp_path / "report.md").read_text() == before


def test_runs_of_one_state_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of two no report is made: what passed before a change would stand beside what passed after it."""
    runs = {
        "a": results(step("build"), step("tests", "failed"), left_out=("fuzz",)),
        "b": results(step("tests"), step("fuzz"), left_out=("build",)),
    }
    for hour, (name, run) in enumerate(runs.items()):
        (tmp_path / name).mkdir()
        run["machine"] = MACHINE | {"started": f"{hour}:00"}
        (tmp_path / name / "results.json").write_text(json.dumps(run))
    out = tmp_path / "out"
    folders = [x for name in runs for x in ("--join", str(tmp_path / name))]
    monkeypatch.setattr(sys, "argv", ["proof.py", "--out", str(out), *folders])
    assert proof.main() == 0, "the later run of a step counts"
    written = json.loads((out / "results.json").read_text())
    assert [s["name"] for s in written["steps"]] == ["build", "tests", "fuzz"]
    assert written["left_out"] == [name for name in proof.STEPS if name not in ("build", "tests", "fuzz")]
    assert "| started | 0:00, 1:00 |" in (out / "report.md").read_text()
    assert "Remarks" not in (out / "report.md").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--note", "one test took it that there is no card"])
    assert proof.main() == 0
    assert "Remarks, by hand:\n\n* one test took it that there is no card" in (out / "report.md").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--commit", "another"])
    with pytest.raises(SystemExit):
        proof.main()
    with pytest.raises(ValueError, match="the runs differ in commit"):
        proof.joined([runs["a"], runs["b"] | {"machine": MACHINE | {"commit": "def", "started": "2:00"}}])
