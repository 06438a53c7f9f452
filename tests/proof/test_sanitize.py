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
from decode_host import Kernel, wrong

from codegen.arch import TARGETS
from codegen.decode import ALL, decodes_of
from codegen.outputs import CUT
from fp8cutlass.manifest import Decode, Variant
from scripts import sanitize, sanitize_decode, sanitize_problems


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
    assert {k.schedule for k in kinds if isinstance(k, Variant)} == {
        k.schedule for k in kernels if isinstance(k, Variant)
    }
    assert [sanitize._id(k) for k in sanitize.chosen("release", ids[3:5], False)] == ids[3:5]
    assert any(isinstance(k, dict) for k in kinds)


def test_each_decode_kernel_of_ci_is_a_kind() -> None:
    """They have each head_dim and each number of rows; what release has beside them comes after the other kinds."""
    of_ci = {d.id for target in TARGETS for d in decodes_of("ci", (target,))}
    assert {k.id for k in sanitize.chosen("release", [], True) if isinstance(k, Decode)} == of_ci
    every = {k.id for k in sanitize.chosen("release", [], False) if isinstance(k, Decode)}
    assert every == {d.id for d in ALL} > of_ci
    names = [part.removeprefix("kns=") for part in sanitize.KERNELS.split(",")]
    assert all(any(name in kernel for name in names) for kernel in (*every, CUT))


def test_every_kind_of_kernel_has_problems() -> None:
    """A kind without problems would end a tool's run with a KeyError, on a card."""
    kernels = sanitize.chosen("release", [], True)
    assert {sanitize_problems.kind_of(k) for k in kernels} == set(sanitize_problems.RUNS)


def test_decode_is_launched_with_all_that_it_may_meet(tmp_path: Path) -> None:
    """The batches of a card, on the host with the kernel's source: nothing is read outside, slots are used again, a CTA
    shares units with some and with many, and there are sequences enough for the cut to begin again."""
    kernel = Kernel("decode_sm90a_d64_r8", tmp_path / "decode")
    spec, reused, shared, sequences, wild = kernel.spec, 0, 0, 0, 0
    for batch, options in sanitize_decode.decode_batches(spec.head_dim, spec.rows, spec.tile):
        ctas = 2 * options.get("sms", 20)
        result = kernel.run(batch, ctas=ctas, whole=not options.get("share", True))
        tiles = sum(-(-n // spec.tile) for n in batch.lengths.clamp(0, batch.table.shape[1] * 16).tolist())
        reused = max(reused, 2 * tiles // ctas // spec.stages)
        shared = max(shared, int((result.cuts[:, 4] - result.cuts[:, 3]).max()))
        sequences = max(sequences, len(batch.lengths))
        in_range = batch.table.min() >= -5 and batch.table.max() < batch.k.shape[0]
        if in_range and bool((batch.cu_q.diff() >= 0).all()):
            assert wrong(batch, result) == ""
        else:
            wild += 1
    assert reused > 2 and shared >= 19 and sequences > 2 * 512 and wild == 4


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
    merging = [k.id for k in kernels if isinstance(k, Variant) and k.cluster != "solo"][:2]
    selection = [x for name in (*packs, *merging) for x in ("--only", name)]
    outcome = sanitize.sanitise("racecheck", selection, 2)
    assert outcome.status == "clean" and outcome.kernels == len(packs) + len(merging), outcome.text
