"""Runs compiled kernels on small problems under compute-sanitizer. Needs a card and a built extension; the planted bugs
also nvcc.

    python scripts/sanitize.py                          # four tools, all kernels
    python scripts/sanitize.py --tool racecheck --each --seconds 60 --jobs 4
    python scripts/sanitize.py --planted                # is each tool able to see its kind of bug here?
    python scripts/sanitize.py --run                    # the problems alone, without a sanitizer

A subset is chosen by --profile, --only and --each; --seconds ends a tool's run early, which is said with what was
left out. racecheck found a descale overwritten by the next tile's copy while the softmax still read it, which no result
ever showed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts import toolchain  # noqa: E402  (needs the path above when run as a file)
from scripts.build_extension import PROFILES  # noqa: E402
from scripts.sanitize_problems import launches  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Parts of their names.
KERNELS = (
    "kns=sm89_,kns=sm90a_,kns=pack_d,kns=pack_mask,kns=planning,kns=decode_,kns=cut,kns=route,kns=resident_,kns=merge"
)
FOUND = 9  # exit status of compute-sanitizer when it has something to say
PLANTED = ROOT / "tests" / "planted"
PROGRAM_SECONDS = 120  # a planted barrier error may also hang
_DONE = re.compile(r"^(\d+) launches of (\d+) kernels of (\d+) kinds, (\d+) left out$", re.M)
_KIND = re.compile(r"^no kernel of its kind: (\S+)$", re.M)


@dataclass(frozen=True)
class Outcome:
    """What a tool said: clean, found (its words in ``text``), or error where it did not run through. ``kernels`` ran
    ``launches`` times, ``left_out`` did not for want of time. ``kinds`` is how many kinds of kernel ran; of each of the
    others a kernel is named."""

    tool: str
    status: str
    kernels: int = 0
    launches: int = 0
    left_out: int = 0
    kinds: int = 0
    kinds_left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    text: str = ""


def chosen(profile: str, only: Sequence[str], each: bool) -> list[Any]:
    """The built kernels of a selection: ``only`` these ids, or one of ``each`` head_dim, schedule, form of its loop and
    cluster; of decode and of those that keep K and V all of profile ci. The first of every kind comes first, so that
    what time leaves out is more of the same."""
    gpu = importlib.import_module("gpu")
    profiles = PROFILES[: PROFILES.index(profile) + 1]
    kinds = ("fwd", "window", "blocks", "ragged", "capped", "biased")
    forward = [v for kind in kinds for v in gpu.built_variants(kind)]
    variants = [v for v in forward if v.profile in profiles and (not only or v.id in only)]
    built = [*gpu.built_packs(), *gpu.built_packs(fp8=True)]
    packs = [p for p in built if p["profile"] in profiles and (not only or p["id"] in only)]
    decodes = [d for d in gpu.built_decodes() if d.profile in profiles and (not only or d.id in only)]
    residents = [r for r in gpu.built_residents() if r.profile in profiles and (not only or r.id in only)]
    others: list[Any] = [*decodes, *residents]
    first = {(v.family, v.kind, v.head_dim, v.schedule, gpu.loop_form(v), v.cluster): v for v in reversed(variants)}
    first_packs = {(p["head_dim"], p["key_block"], p["source"] == "fp8"): p for p in reversed(packs)}
    leading = [*first_packs.values(), *(x for x in others if x.profile != PROFILES[-1]), *first.values()]
    ids = {_id(k) for k in leading}
    return leading if each else leading + [k for k in (*packs, *others, *variants) if _id(k) not in ids]


def _id(kernel: Any) -> str:
    return str(kernel["id"] if isinstance(kernel, dict) else kernel.id)


def run_problems(kernels: Sequence[Any], seconds: float | None) -> tuple[int, int]:
    """Launches the kernels one after the other; returns launches, and kernels that were not begun in time."""
    import torch

    started, launched = time.monotonic(), 0
    for number, kernel in enumerate(kernels):
        if seconds is not None and time.monotonic() - started >= seconds:
            return launched, len(kernels) - number
        for _ in launches(kernel):
            torch.cuda.synchronize()
            launched += 1
    return launched, 0


def run_part(profile: str, only: Sequence[str], each: bool, part: str, seconds: float | None) -> None:
    """Runs the part "number/parts" of a selection, and says what ``sanitise`` reads."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
    number, parts = map(int, part.split("/"))
    kernels = chosen(profile, only, each)[number::parts]
    launches, left = run_problems(kernels, seconds)
    kinds = {_id(k) for k in chosen(profile, only, True)}
    ran, late = kernels[: len(kernels) - left], kernels[len(kernels) - left :]
    for kernel in late:
        if _id(kernel) in kinds:
            print(f"no kernel of its kind: {_id(kernel)}")
    reached = sum(_id(kernel) in kinds for kernel in ran)
    print(f"{launches} launches of {len(ran)} kernels of {reached} kinds, {left} left out")


def under(tool: str, command: Sequence[str | Path], *, filtered: bool, seconds: float | None = None) -> tuple[str, str]:
    """Status and output of a command under a tool of compute-sanitizer; ``seconds`` is when it is given up."""
    names = ["--kernel-name", KERNELS] if filtered else []
    # Each allocation of its own, so that memcheck sees the ends of tensors.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    line = ["compute-sanitizer", "--tool", tool, *names, "--error-exitcode", str(FOUND), *map(str, command)]
    try:
        done = subprocess.run(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    except FileNotFoundError:
        return "error", "compute-sanitizer is not on PATH"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return "found" if " Error" in output or "hazard" in output else "error", f"{output}\nover {seconds} s"
    status = {0: "clean", FOUND: "found"}.get(done.returncode, "error")
    return status, done.stdout


def sanitise(tool: str, selection: Sequence[str], jobs: int) -> Outcome:
    """One tool over a selection of kernels, in ``jobs`` processes that share them."""
    started = time.monotonic()

    def part(number: int) -> tuple[str, str]:
        command = [sys.executable, __file__, "--run", "--part", f"{number}/{jobs}", *selection]
        # initcheck has to see torch's kernels as well, or what they wrote counts as never written.
        return under(tool, command, filtered=tool != "initcheck")

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(part, range(jobs)))
    counts = [match for _, text in parts for match in _DONE.findall(text)]
    launches, kernels, kinds, left = (sum(int(match[i]) for match in counts) for i in range(4))
    unreached = tuple(sorted(name for _, text in parts for name in _KIND.findall(text)))
    statuses = {status for status, _ in parts}
    status = next((s for s in ("found", "error") if s in statuses), "clean")
    if status == "clean" and (len(counts) != jobs or launches == 0):
        status = "error"
    text = "" if status == "clean" else "\n".join(text for s, text in parts if s != "clean" or not launches)
    seconds = time.monotonic() - started
    return Outcome(tool, status, kernels, launches, left, kinds, unreached, seconds, text)


def planted(tool: str, folder: Path) -> Outcome:
    """Builds the tool's program and runs it as it is, where the tool must be silent, and with its bug, where it must
    not: found is what is wanted."""
    started = time.monotonic()
    nvcc = toolchain.find_nvcc()
    program = folder / tool
    command = [nvcc.path, "-arch=native", "-lineinfo", PLANTED / f"{tool}.cu", "-o", program]
    built = subprocess.run([str(x) for x in command], env=nvcc.environment(), capture_output=True, text=True)
    if built.returncode != 0:
        return Outcome(tool, "error", text=built.stderr)
    clean, text = under(tool, [program], filtered=False, seconds=PROGRAM_SECONDS)
    if clean != "clean":
        return Outcome(tool, "error", text=f"the program without its bug is not clean:\n{text}")
    status, text = under(tool, [program, "broken"], filtered=False, seconds=PROGRAM_SECONDS)
    return Outcome(tool, status, 1, 2, seconds=time.monotonic() - started, text=text)


def main() -> int:
    """The command line; returns 0 when every tool is clean, or saw what was planted for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable (default: all)")
    parser.add_argument("--profile", choices=PROFILES, default=PROFILES[-1], help="default: everything that is built")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="only this kernel; repeatable")
    parser.add_argument("--each", action="store_true", help="one kernel of each kind")
    parser.add_argument("--seconds", type=float, help="begin no kernel after this time of a tool's run")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share a tool's kernels")
    parser.add_argument("--planted", action="store_true", help="run the programs with planted bugs instead")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--run", action="store_true", help="run the problems without a sanitizer")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_part(options.profile, options.only, options.each, options.part, options.seconds)
        return 0
    wanted = "found" if options.planted else "clean"
    outcomes = []
    selection = ["--profile", options.profile, *(x for name in options.only for x in ("--only", name))]
    selection += ["--each"] if options.each else []
    selection += [] if options.seconds is None else ["--seconds", str(options.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        for tool in options.tool or TOOLS:
            o = planted(tool, Path(folder)) if options.planted else sanitise(tool, selection, options.jobs)
            outcomes.append(o)
            if o.status != wanted:
                print(o.text, flush=True)
            ran = f"{o.kernels} kernels of {o.kinds} kinds, {o.launches} launches"
            left = f"{o.left_out} kernels and {len(o.kinds_left_out)} kinds left out"
            what = "its planted bug" if options.planted else f"{ran}, {left}"
            print(f"{tool}: {o.status}, {what}, {o.seconds:.0f} s", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1), encoding="utf-8")
    return 0 if all(o.status == wanted for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
