"""Everything that shows on a card whether the kernels are right, within a time, and a report of what really ran.

    python scripts/proof.py --out DIR                 # within 50 minutes
    python scripts/proof.py --out DIR --minutes 8     # the same steps, fewer random calls and fewer sanitised kernels
    python scripts/proof.py --out DIR --step tests    # some steps only; --whole: the tests that need no card, too
    python scripts/proof.py --out DIR --render        # write the report again from DIR/results.json
    python scripts/proof.py --out DIR --join A --join B     # one report of the steps that A and B ran, of one state
    python scripts/proof.py --out DIR --render --note TEXT  # with a remark: why something failed or was left out

DIR gets results.json, report.md and the output of every step. The exit status is 0 when every step ran and passed.
Needs a card, nvcc and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import toolchain  # noqa: E402  (needs the path above when run as a file)
from scripts.proof_report import read_tests, render  # noqa: E402
from scripts.sanitize import TOOLS  # noqa: E402

STEPS = ("build", "planted", "broken", "tests", "fuzz", *TOOLS)
WHOLE_SUITE = 20.0  # minutes from which the tests that need no card run too, without which no edge case is whole
FUZZ_SHARE = 0.4  # of the time that the other steps leave; the sanitizers share the rest
TESTS_END = 40.0  # seconds in which pytest says what failed, where it is told to stop before the end
FUZZ_ENDS = 45.0  # seconds in which calls that were begun are judged, on a busy host
SEED = 20


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def machine(commit: str | None) -> dict[str, str]:
    """What ran where, as the tools say."""
    import torch

    card, _, driver = _first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).partition(
        ", "
    )
    try:
        nvcc = toolchain.dotted(toolchain.find_nvcc().version)
    except toolchain.ToolchainError as error:
        nvcc = str(error)
    changed = bool(_first_line(["git", "status", "--porcelain", "--untracked-files=no"]))
    head = _first_line(["git", "rev-parse", "HEAD"])
    manifest = ROOT / "generated" / "manifest.json"
    return {
        "card": card or "none found",
        "driver": driver or "unknown",
        "CPU cores": str(os.cpu_count()),
        "nvcc": nvcc,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "commit": commit or (f"{head}{', with changes' if changed else ''}" if head else "unknown"),
        "generated/manifest.json": f"sha256 {hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]}",
        "started": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _hears_interrupts() -> None:
    """In a new process: what a shell starts in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Proof:
    """The steps of one run, with the time they may take."""

    def __init__(self, out: Path, minutes: float, jobs: int, *, whole: bool = False) -> None:
        self.out = out
        self.whole = whole
        self.jobs = jobs
        self.minutes = minutes
        self.deadline = time.monotonic() + 60 * minutes
        self.steps: list[dict[str, Any]] = []

    def left(self) -> float:
        """Seconds until the end."""
        return self.deadline - time.monotonic()

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        wanted_s: float,
        report: Path | None = None,
        ends_s: float = 0.0,
    ) -> None:
        """One step. ``wanted_s``: what it needs at least, or it is not begun. It is ended at the deadline, and told to
        stop (SIGINT) ``ends_s`` before. ``report`` is a JSON file that it writes."""
        line = " ".join("python" if str(x) == sys.executable else str(x) for x in command).replace(str(self.out), "DIR")
        step: dict[str, Any] = {"name": name, "command": line, "seconds": 0.0}
        self.steps.append(step)
        if self.left() < wanted_s:
            reason = f"{max(0.0, self.left()):.0f} s were left, {wanted_s:.0f} are needed"
            step |= {"status": "not run", "reason": reason}
            print(f"{name}: not run, {reason}", flush=True)
            return
        if report is not None:
            report.unlink(missing_ok=True)  # of an earlier run
        print(f"{name}: {line}", flush=True)
        started = time.monotonic()
        with (self.out / f"{name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [str(x) for x in command],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hears_interrupts,
            )
            try:
                status = process.wait(timeout=max(0.0, self.left() - ends_s))
                step |= {"status": "passed" if status == 0 else "failed", "exit": status}
            except subprocess.TimeoutExpired:
                if ends_s > 0:
                    process.send_signal(signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=max(0.0, self.left()))
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a group of its own
                process.wait()
                step |= {"status": "failed", "reason": "ended at the deadline"}
        step["seconds"] = time.monotonic() - started
        if report is not None:
            try:
                step["report"] = json.loads(report.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                step["status"] = "failed"
                step.setdefault("reason", "wrote no report")
        print(f"{name}: {step['status']}, {step['seconds']:.0f} s", flush=True)

    def build(self) -> None:
        """The release profile for this machine's cards."""
        command = [sys.executable, "scripts/build_extension.py", "--profile", "release", "--jobs", str(self.jobs)]
        self.run("build", command, wanted_s=60)

    def planted(self) -> None:
        """Whether each sanitizer sees its kind of bug here."""
        report = self.out / "planted.json"
        command: list[str | Path] = [sys.executable, "scripts/sanitize.py", "--planted", "--json", report]
        self.run("planted", command, wanted_s=30, report=report)

    def broken(self) -> None:
        """Kernels broken on purpose."""
        report = self.out / "broken.json"
        self.run("broken", [sys.executable, "scripts/broken.py", "--json", report], wanted_s=60, report=report)

    def tests(self) -> None:
        """pytest, with the table of edge cases."""
        xml = self.out / "tests.xml"
        selection = [] if self.whole or self.minutes >= WHOLE_SUITE else ["-m", "gpu"]
        # Some tests take minutes: what is queued behind them goes to processes that have nothing left.
        spread = ["-n", str(max(1, self.jobs - 1)), "--dist", "worksteal"]
        command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", *spread, *selection]
        table = self.out / "edge_cases.md"
        for file in (xml, table):
            file.unlink(missing_ok=True)
        self.run("tests", [*command, "--junitxml", xml, "--edge-table", table], wanted_s=60, ends_s=TESTS_END)
        step = self.steps[-1]
        if xml.is_file():
            step["report"] = read_tests(xml)
        elif step["status"] == "passed":
            step |= {"status": "failed", "reason": "wrote no report"}
        if table.is_file():
            step["edge_cases"] = table.read_text(encoding="utf-8")

    def fuzz(self, share: float) -> None:
        """Random calls for their share of what is left."""
        report = self.out / "fuzz.json"
        command: list[str | Path] = [sys.executable, "-m", "tests.fuzz", "--device", "cuda", "--seed", str(SEED)]
        minutes = max(0.25, min(self.left() * share, self.left() - FUZZ_ENDS) / 60)
        more = ["--minutes", f"{minutes:.2f}", "--jobs", str(max(1, self.jobs // 2))]
        self.run("fuzz", [*command, *more, "--json", report], wanted_s=30, report=report)

    def sanitizer(self, tool: str, tools_left: int) -> None:
        """One tool over one kernel of each kind first, then over what time allows."""
        report = self.out / f"{tool}.json"
        seconds = max(10.0, 0.8 * self.left() / tools_left - 10)  # a kernel that was begun is finished
        command: list[str | Path] = [sys.executable, "scripts/sanitize.py", "--tool", tool]
        more = ["--seconds", f"{seconds:.0f}", "--jobs", str(max(1, self.jobs // 4))]
        self.run(tool, [*command, *more, "--json", report], wanted_s=20, report=report)


def run_steps(proof: Proof, wanted: Sequence[str]) -> None:
    """The steps in their order."""
    for name in ("build", "planted", "broken", "tests"):
        if name in wanted:
            getattr(proof, name)()
    tools = [tool for tool in TOOLS if tool in wanted]
    if "fuzz" in wanted:
        proof.fuzz(FUZZ_SHARE if tools else 0.9)
    for number, tool in enumerate(tools):
        proof.sanitizer(tool, len(tools) - number)


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The steps of several runs as one; of two of a name the later. ValueError where they are not of one state."""

    def state(run: dict[str, Any]) -> dict[str, str]:
        return {name: value for name, value in run["machine"].items() if name != "started"}

    first = runs[0]
    for run in runs[1:]:
        if different := [name for name, value in state(run).items() if value != state(first).get(name)]:
            raise ValueError(f"the runs differ in {', '.join(different)}")
    ran = {step["name"]: step for run in runs for step in run["steps"]}
    started = [run["machine"]["started"] for run in runs]
    return first | {
        "machine": first["machine"] | {"started": ", ".join(dict.fromkeys(started))},
        "steps": [ran[name] for name in STEPS if name in ran],
        "left_out": [name for name in STEPS if name not in ran],
    }


def main() -> int:
    """The command line; returns 0 when every step ran and passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--step", action="append", choices=STEPS, help="repeatable (default: all)")
    parser.add_argument("--whole", action="store_true", help="the tests that need no card, too, in whatever time")
    parser.add_argument("--commit", help="what to call the state, where there is no git")
    parser.add_argument("--render", action="store_true", help="write the report again, run nothing")
    parser.add_argument(
        "--join", action="append", type=Path, help="a folder of an earlier run; run nothing (repeatable)"
    )
    parser.add_argument("--note", action="append", help="with --join or --render: a remark by hand (repeatable)")
    options = parser.parse_args()
    if options.note and not (options.join or options.render):
        parser.error("--note goes with --join or --render: remarks come after what ran")
    if options.commit and (options.join or options.render):
        parser.error("--commit goes with a run: --join and --render keep the state that ran")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    if options.join or options.render:
        runs = [json.loads((run / file.name).read_text(encoding="utf-8")) for run in options.join or [out]]
        results = joined(runs) if options.join else runs[0]
        results["notes"] = options.note or results.get("notes", [])
        file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    else:
        if shutil.which("nvidia-smi") is None:
            parser.error("there is no card here")
        results = {"machine": machine(options.commit), "minutes": options.minutes, "seed": SEED, "left_out": []}
        proof = Proof(out, options.minutes, options.jobs, whole=options.whole)
        wanted = options.step or STEPS
        results |= {"steps": proof.steps, "left_out": [name for name in STEPS if name not in wanted]}
        try:
            run_steps(proof, wanted)
        finally:  # what ran, ran
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    (out / "report.md").write_text(render(results), encoding="utf-8")
    print(f"{out / 'report.md'} written")
    return 0 if results["steps"] and all(step["status"] == "passed" for step in results["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
