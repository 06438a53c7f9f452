"""The report of scripts/proof.py: text from results, so that it cannot claim what did not run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHOWN = 50  # failures that are listed
SAID = 300  # characters of what each of them said
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
OTHER_BUILDS = "test_gpu_builds"  # the module of tests with delays, load and another optimisation level


def read_tests(path: Path) -> dict[str, Any]:
    """Counts by outcome, the reasons of what was skipped or is known to fail, the failures with what they said, and the
    tests of other builds with their time, from a JUnit file of pytest."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures, builds = [], []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        skipped = case.find("skipped")
        faults = [fault for kind in ("failure", "error") for fault in case.findall(kind)]
        if faults:
            outcome = "failed"
            said = " ".join(faults[0].get("message", "").split())
            failures.append(f"{name}: {said[:SAID]}")
        elif skipped is not None:
            outcome = "known to fail" if skipped.get("type") == "pytest.xfail" else "skipped"
            reasons[f"{outcome}: {skipped.get('message', '').removeprefix('Skipped: ')}"] += 1
        else:
            outcome = "passed"
        counts[outcome] += 1
        if OTHER_BUILDS in name:
            builds.append({"test": name, "outcome": outcome, "seconds": float(case.get("time", 0))})
    return {"counts": dict(counts), "reasons": dict(reasons), "failures": failures, "builds": builds}


def render(results: dict[str, Any]) -> str:
    """Markdown."""
    steps = {step["name"]: step for step in results["steps"]}
    lines = ["# Proof", "", "Written by `scripts/proof.py` from what ran.", ""]
    lines += _table(["", ""], [[name, value] for name, value in results["machine"].items()])
    lines += ["", "## Steps", ""]
    rows = [
        [s["name"], s["status"] + _because(s), f"{s['seconds']:.0f} s", f"`{s['command']}`"] for s in results["steps"]
    ]
    rows += [[name, "left out", "", ""] for name in results["left_out"]]
    lines += _table(["step", "result", "time", "command"], rows)
    if notes := results.get("notes"):
        lines += ["", "Remarks, by hand:", "", *(f"* {note}" for note in notes)]
    for title, part in (
        ("Tests", _tests),
        ("Random calls", _fuzz),
        ("Sanitizers", _sanitizers),
        ("Delays, load, another optimisation level", _builds),
        ("Broken on purpose", _broken),
        ("Edge cases", _edge_cases),
    ):
        lines += ["", f"## {title}", "", *part(steps)]
    return "\n".join(lines) + "\n"


def _because(step: dict[str, Any]) -> str:
    return f": {step['reason']}" if step.get("reason") else ""


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    def row(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [row(titles), "|" + "---|" * len(titles), *map(row, rows)]


def _missing(step: dict[str, Any] | None) -> str | None:
    """Why a step has no results; None where it has."""
    if step is None:
        return "Left out."
    if "report" not in step:
        return f"No results: {step['status']}{_because(step)}."
    return None


def _tests(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    step = steps.get("tests")
    missing = _missing(step)
    if missing is not None or step is None:
        yield missing or ""
        return
    report = step["report"]
    yield ", ".join(f"{n} {outcome}" for outcome, n in sorted(report["counts"].items())) or "no test ran"
    if report["reasons"]:
        yield ""
        yield from _table(
            ["tests", "why they did not run"], [[str(n), why] for why, n in sorted(report["reasons"].items())]
        )
    if report["failures"]:
        yield ""
        yield from (f"* FAILED `{name}`" for name in report["failures"][:SHOWN])


def _fuzz(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    step = steps.get("fuzz")
    missing = _missing(step)
    if missing is not None or step is None:
        yield missing or ""
        return
    report = step["report"]
    counts = report["statuses"]
    shown = ", ".join(f"{counts.get(status, 0)} {status}" for status in ("passed", "failed", "unserved"))
    yield (
        f"Seed {report['seed']}, {sum(counts.values())} cases in {report['seconds']:.0f} s: {shown}. "
        f"{len(report['kernels'])} kernels were reached. `unserved` calls are refused, as they should be."
    )
    if report["failures"]:
        yield ""
        yield from (f"* `{text}`" for text in report["failures"][:SHOWN])


def _sanitizers(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    planted = {o["tool"]: o["status"] for o in steps.get("planted", {}).get("report", [])}
    rows, names = [], []
    for tool in SANITIZERS:
        bug = {"found": "reported", None: "not run"}.get(planted.get(tool), "NOT REPORTED")
        step = steps.get(tool)
        missing = _missing(step)
        if missing is not None or step is None:
            rows.append([tool, bug, missing or "", "", "", "", ""])
            continue
        for o in step["report"]:
            kinds, unreached = o["kinds"], o["kinds_left_out"]
            counts = [str(o[name]) for name in ("kernels", "launches", "left_out")]
            rows.append([tool, bug, o["status"], f"{kinds} of {kinds + len(unreached)}", *counts])
            names += [f"* {tool} reached no kernel of the kind of `{name}`" for name in unreached]
    titles = ["tool", "planted bug", "the kernels", "kinds", "kernels", "launches", "left out for want of time"]
    yield from _table(titles, rows)
    if names:
        yield from ("", *names)


def _builds(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    step = steps.get("tests")
    missing = _missing(step)
    if missing is not None or step is None:
        yield missing or ""
        return
    rows = [[b["test"], b["outcome"], f"{b['seconds']:.0f} s"] for b in step["report"]["builds"]]
    yield from _table(["test", "outcome", "time"], rows) if rows else ["None of these tests ran."]


def _broken(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    step = steps.get("broken")
    missing = _missing(step)
    if missing is not None or step is None:
        yield missing or ""
        return
    rows = [
        [f["fault"], f["kernel"], "noticed" if f["caught"] else "NOT NOTICED", f["by"], f["said"][:160]]
        for f in step["report"]
    ]
    yield from _table(["fault", "planted in", "", "by", "what it said"], rows)


def _edge_cases(steps: dict[str, dict[str, Any]]) -> Iterator[str]:
    table = steps.get("tests", {}).get("edge_cases")
    yield from (table.rstrip("\n").splitlines() if table else ["No table was written."])
