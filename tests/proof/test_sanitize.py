"""What scripts/sanitize.py makes of what the tools say, without a card: a stand-in takes compute-sanitizer's place.

Regressions these catch: silence that counts as clean when nothing ran, a planted bug that a tool missed, a finding in
one of several processes that the others hide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import ROOT, nvcc

from scripts import sanitize, sanitize_problems


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script on PATH that does what the variable SAYS says."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\nexec {sys.executable} - \"$@\" <<'END'\nimport os, sys\nexec(os.environ['SAYS'])\nEND\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tool


RAN = "print('no kernel of its kind: x\\n12 launches of 4 kernels of 3 kinds, 1 left out')"


@pytest.mark.parametrize(
    ("says", "status", "counts"),
    [
        (RAN, "clean", (8, 24, 2)),
        (f"{RAN}; sys.exit(9)", "found", (8, 24, 2)),
        (f"{RAN}; sys.exit(9 if '--part' in sys.argv and '1/2' in sys.argv else 0)", "found", (8, 24, 2)),
        (f"{RAN}; sys.exit(1)", "error", (8, 24, 2)),
        ("pass", "error", (0, 0, 0)),
        ("print('0 launches of 0 kernels of 0 kinds, 5 left out')", "error", (0, 0, 10)),
    ],
)
def test_what_a_tool_says(
    says: str, status: str, counts: tuple[int, ...], stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAYS", says)
    outcome = sanitize.sanitise("racecheck", ["--each"], 2)
    assert (outcome.status, (outcome.kernels, outcome.launches, outcome.left_out)) == (status, counts)
    assert (outcome.kinds, outcome.kinds_left_out) == ((6, ("x", "x")) if RAN in says else (0, ()))


@pytest.mark.parametrize(
    ("says", "status"),
    [
        ("sys.exit(9 if sys.argv[-1] == 'broken' else 0)", 0),
        ("sys.exit(0)", 1),  # silent
        ("sys.exit(9)", 1),  # says so of everything
        ("sys.exit(3)", 1),
    ],
)
def test_silence_about_a_planted_bug_is_a_failure(
    says: str, status: int, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAYS", says)
    report = tmp_path / "planted.json"
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--planted", "--tool", "memcheck", "--json", str(report)])
    monkeypatch.setattr(sanitize.toolchain, "find_nvcc", lambda: FakeNvcc())
    assert sanitize.main() == status
    assert [o["status"] == "found" for o in json.loads(report.read_text())] == [status == 0]


class FakeNvcc:
    """A compiler that makes nothing, as nothing is run."""

    path = Path("/bin/true")

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def test_a_missing_tool_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert sanitize.under("memcheck", ["/bin/true"], filtered=False)[0] == "error"


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_the_planted_programs_compile(tool: str, tmp_path: Path) -> None:
    built = nvcc("-arch=sm_90", "-cubin", ROOT / "tests" / "planted" / f"{tool}.cu", "-o", tmp_path / "x.cubin")
    assert built.returncode == 0, built.stderr


def test_kinds_come_before_more_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a time limit leaves out is more of what ran: one kernel of each kind is first, each kernel once."""
    kernels = sanitize.chosen("release", [], False)
    ids = [sanitize._id(k) for k in kernels]
    kinds = sanitize.chosen("release", [], True)
    assert len(set(ids)) == len(ids) and ids[: len(kinds)] == [sanitize._id(k) for k in kinds]
    assert {k.schedule for k in kinds if not isinstance(k, dict)} == {
        k.schedule for k in kernels if not isinstance(k, dict)
    }
    assert [sanitize._id(k) for k in sanitize.chosen("release", ids[3:5], False)] == ids[3:5]
    assert any(isinstance(k, dict) for k in kinds)


def test_every_kind_of_kernel_has_problems() -> None:
    """A kind without problems would end a tool's run with a KeyError, on a card."""
    kernels = sanitize.chosen("release", [], True)
    assert {k.kind for k in kernels if not isinstance(k, dict)} == set(sanitize_problems.RUNS)


@pytest.mark.parametrize("cluster", ["solo", "split4"])
def test_problems_fill_every_slot_twice(cluster: str) -> None:
    """Fewer keys than that would not show a slot that is loaded while it is still read."""
    tile_m, tile_n, stages = 128, 64, 3
    found = sanitize_problems.problems(tile_m, tile_n, stages, cluster, ((1, 64), (65, 128)))
    keys = [x[3] for x in found]
    assert keys[0] > 2 * stages * tile_n * (4 if cluster == "split4" else 1) and keys[0] % tile_n
    assert keys[-2:] == [59, 123] and all(heads * kv and rows for heads, kv, rows, _ in found)


@pytest.mark.gpu
@pytest.mark.edge(47)
def test_reductions_do_not_race(tmp_path: Path) -> None:
    """racecheck over the kernels that reduce in shared memory and use it again: those that quantise, and those that
    merge the parts of a cluster. And it sees the race that is planted for it."""
    if subprocess.run(["which", "compute-sanitizer"], capture_output=True).returncode != 0:
        pytest.skip("needs compute-sanitizer")
    assert sanitize.planted("racecheck", tmp_path).status == "found"
    kernels = sanitize.chosen("release", [], True)
    packs = [k["id"] for k in kernels if isinstance(k, dict)][:2]
    merging = [k.id for k in kernels if not isinstance(k, dict) and k.cluster != "solo"][:2]
    selection = [x for name in (*packs, *merging) for x in ("--only", name)]
    outcome = sanitize.sanitise("racecheck", selection, 2)
    assert outcome.status == "clean" and outcome.kernels == len(packs) + len(merging), outcome.text
