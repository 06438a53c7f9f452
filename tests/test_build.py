"""The built extension as a file and as a torch library, on a machine without a card; and the discovery of compilers.

Regressions these catch: an operator whose schema drifted from what the package calls, a registry in another order than
the manifest (every kernel would run under another's name), a library that drags in a CUDA runtime or a Python, a target
that was not compiled, an nvcc too old for the kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts import build_extension, toolchain

ROOT = Path(__file__).resolve().parent.parent
PLACES = (ROOT / "build" / "test" / "fp8cutlass", ROOT / "python" / "fp8cutlass")

COMMON = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor? out_descale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? amax, float scale, int causal_offset"
)
PACK = (
    "int key_block, Tensor? q, Tensor? k, Tensor? v, int q_granularity, int k_granularity, int v_granularity, "
    "float score_amax, float v_amax, bool negate_q, Tensor(a!)? q8, Tensor(b!)? k8, Tensor(c!)? v8, "
    "Tensor(d!)? q_descale, Tensor(e!)? k_descale, Tensor(f!)? v_descale, Tensor(g!)? amax, bool hadamard, "
    "Tensor(h!)? k_mean"
)
ATTEND = (
    "Tensor constants, Tensor q, Tensor k, Tensor v, Tensor(a!)? k_mean=None, Tensor? out_descale=None, "
    "Tensor(b!)? lse=None, Tensor(c!)? amax=None"
)
DIAGNOSTIC = "Tensor(d!) scores, Tensor(e!) p, Tensor(f!) weight, Tensor(g!) tile_o"

ATTEND_RAGGED = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor(a!)? lse, float score_amax, float v_amax, float scale, int window_left, "
    "int window_right, bool bottom_right, bool leave_q, Tensor(b!)? workspace=None"
)
RAGGED = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor(a!) plan, "
    "Tensor(b!) out, Tensor(c!)? lse, float scale, int window_left, int window_right, bool bottom_right, "
    "bool keys_in_blocks"
)

# Run in its own process: the operators can be registered once, and the package may have loaded another copy.
INSPECT = """
import ctypes, json, sys, torch
path = sys.argv[1]
torch.ops.load_library(path)
ops = torch.ops.fp8cutlass_C
c = ctypes.CDLL(path)
c.fp8cutlass_variant_id.restype = ctypes.c_char_p
count = c.fp8cutlass_variant_count()
x = torch.zeros(1, 1, 128, 32, dtype=torch.uint8)
one = torch.ones(1)
try:
    ops.forward(0, x, x, x, one, one, one, None, x.to(torch.bfloat16), None, None, 1.0, 0)
    refusal = None
except NotImplementedError as error:
    refusal = str(error)
print(json.dumps({
    "schemas": [str(ops.forward.default._schema), str(ops.diagnose.default._schema),
                str(ops.pack.default._schema), str(ops.attend.default._schema),
                str(ops.forward_ragged.default._schema), str(ops.ragged_plan_words.default._schema),
                str(ops.attend_ragged.default._schema)],
    "ids": [c.fp8cutlass_variant_id(i).decode() for i in range(count)],
    "outside": [c.fp8cutlass_variant_id(-1), c.fp8cutlass_variant_id(count)],
    "refusal": refusal,
}))
"""


@dataclass(frozen=True)
class Built:
    """A built extension and the manifest that describes it."""

    library: Path
    manifest: dict[str, Any]

    def inspect(self) -> dict[str, Any]:
        """What the library says about itself in a fresh process."""
        result = subprocess.run(
            [sys.executable, "-c", INSPECT, str(self.library)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            pytest.fail(result.stderr)
        answers: dict[str, Any] = json.loads(result.stdout)
        return answers


@pytest.fixture(scope="module")
def built() -> Built:
    for place in PLACES:
        if (place / "_C.so").is_file():
            return Built(place / "_C.so", json.loads((place / "_built" / "manifest.json").read_text()))
    pytest.skip("nothing is built: run `make compile`")


@pytest.fixture(scope="module")
def answers(built: Built) -> dict[str, Any]:
    return built.inspect()


def test_schemas(answers: dict[str, Any]) -> None:
    assert answers["schemas"] == [
        f"fp8cutlass_C::forward({COMMON}, int window_offset=0) -> ()",
        f"fp8cutlass_C::diagnose({COMMON}, {DIAGNOSTIC}) -> ()",
        f"fp8cutlass_C::pack({PACK}) -> ()",
        f"fp8cutlass_C::attend({ATTEND}) -> Tensor",
        f"fp8cutlass_C::forward_ragged({RAGGED}) -> ()",
        "fp8cutlass_C::ragged_plan_words(int variant, int tokens, int sequences) -> int",
        f"fp8cutlass_C::attend_ragged({ATTEND_RAGGED}) -> Tensor",
    ]


def test_errors_are_made_without_streams() -> None:
    """Linked with a libstdc++ of its own, the library once ended the process where it should have raised: the locales
    of two copies took each other's place in an ostringstream."""
    streams = re.compile(r"#include <(sstream|iostream|ostream|fstream|iomanip)>|stringstream")
    assert [path.name for path in (ROOT / "csrc").iterdir() if streams.search(path.read_text())] == []


def test_variants_are_those_of_the_manifest_in_its_order(built: Built, answers: dict[str, Any]) -> None:
    assert answers["ids"] == [variant["id"] for variant in built.manifest["variants"]]
    assert answers["outside"] == [None, None]


def test_cpu_tensors_are_refused(answers: dict[str, Any]) -> None:
    assert answers["refusal"] is not None and "'CPU' backend" in answers["refusal"]


def test_library_needs_neither_python_nor_a_cuda_runtime(built: Built) -> None:
    listing = subprocess.run(["readelf", "-d", str(built.library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listing)
    assert {"libtorch_cpu.so", "libc10.so"} <= set(needed)
    assert not [
        name for name in needed if re.match(r"libpython|libcuda|libtorch_python|libtorch_cuda|libc10_cuda", name)
    ]
    assert "RPATH" not in listing and "RUNPATH" not in listing


def test_library_does_not_name_the_builders_folders(built: Built) -> None:
    assert str(ROOT).encode() not in built.library.read_bytes()


def test_every_kernel_is_compiled_for_its_targets(built: Built) -> None:
    tool = toolchain.find_disassembler("cuobjdump")
    listing = subprocess.run([tool, "-lelf", str(built.library)], capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"\.(sm_\w+)\.cubin", listing)
    # "-gencode=arch=compute_89,code=sm_89" -> "sm_89"
    code = {arch: option.rsplit("=", 1)[1] for arch, option in built.manifest["gencode"].items()}
    kernels = [*built.manifest["variants"], *built.manifest["packs"]]
    promised = Counter(code[arch] for kernel in kernels for arch in kernel["targets"])
    assert Counter(targets) == promised and set(promised) == set(code.values())


def test_what_is_generated_is_what_the_build_asks_for(tmp_path: Path) -> None:
    """The sm90a build without and with kernels that are only emulated there."""
    families = []
    for emulated in (False, True):
        build_extension.generate(tmp_path, profile="dev", archs=["sm90a"], emulated=emulated)
        variants = json.loads((tmp_path / "manifest.json").read_text())["variants"]
        assert all(variant["targets"] == ["sm90a"] for variant in variants)
        families.append({variant["family"] for variant in variants})
    assert families == [{"sm90a"}, {"sm89", "sm90a"}]


def fake_tool(path: Path, output: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which only what the test puts into the returned folder can be found."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "FP8CUTLASS_JOBS", "FP8CUTLASS_ARCHS", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "site_dirs", lambda: [tmp_path / "site"])
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "system-cuda")
    return tmp_path


def test_nvcc_too_old_is_passed_over_by_name(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_tool(bare / "old" / "bin" / "nvcc", "Cuda compilation tools, release 12.4, V12.4.99")
    monkeypatch.setenv("CUDA_HOME", str(bare / "old"))
    with pytest.raises(toolchain.ToolchainError, match=rf"nvcc >= 12\.8.*{old} \(12\.4\)"):
        toolchain.find_nvcc()
    new = fake_tool(bare / "bin" / "nvcc", "Cuda compilation tools, release 12.8, V12.8.61")
    found = toolchain.find_nvcc()
    assert (found.path, found.version) == (new, (12, 8))
    assert found.passed_over == (f"{old} (12.4)",)


def test_nvcc_that_does_not_run_is_passed_over(bare: Path) -> None:
    broken = fake_tool(bare / "bin" / "nvcc", "")
    broken.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(toolchain.ToolchainError, match="does not run"):
        toolchain.find_nvcc()


def test_nvcc_of_packages_links_from_lib(bare: Path) -> None:
    home = bare / "site" / "nvidia" / "cu13"
    fake_tool(home / "bin" / "nvcc", "release 13.0,")
    (home / "lib").mkdir()
    (home / "lib" / "libcudart_static.a").touch()
    found = toolchain.find_nvcc()
    assert found.library_dir == home / "lib"
    assert found.environment()["LIBRARY_PATH"] == str(home / "lib")
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    assert toolchain.find_nvcc().library_dir is None


def test_cutlass_is_found_in_a_package_or_a_tree(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(toolchain.ToolchainError, match=r"no CUTLASS headers.*CUTLASS_PATH"):
        toolchain.find_cutlass()
    package = bare / "site" / "cutlass_library" / "source" / "include"
    tree = bare / "tree" / "include"
    for include in (package, tree):
        (include / "cute").mkdir(parents=True)
        (include / "cute" / "tensor.hpp").touch()
    assert toolchain.find_cutlass() == package
    monkeypatch.setenv("CUTLASS_PATH", str(bare / "tree"))
    assert toolchain.find_cutlass() == tree
    monkeypatch.setenv("CUTLASS_PATH", str(bare / "nowhere"))  # what was asked for is not replaced silently
    with pytest.raises(toolchain.ToolchainError, match="nowhere"):
        toolchain.find_cutlass()


def test_disassembler_missing_names_the_package(bare: Path) -> None:
    with pytest.raises(toolchain.ToolchainError, match="nvidia-cuda-nvdisasm"):
        toolchain.find_disassembler("nvdisasm")
    tool = fake_tool(bare / "site" / "nvidia" / "cu13" / "bin" / "nvdisasm", "")
    assert toolchain.find_disassembler("nvdisasm") == tool


def test_job_count(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for gigabytes, jobs in ((64, 16), (11, 2), (2, 1)):
        monkeypatch.setattr(toolchain, "_memory_bytes", lambda gigabytes=gigabytes: gigabytes << 30)
        assert toolchain.job_count() == jobs
    monkeypatch.setenv("FP8CUTLASS_JOBS", "5")
    assert toolchain.job_count() == 5
    for wrong in ("0", "-1", "many", ""):
        monkeypatch.setenv("FP8CUTLASS_JOBS", wrong)
        with pytest.raises(toolchain.ToolchainError, match="FP8CUTLASS_JOBS"):
            toolchain.job_count()


def test_archs_follow_the_cards(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(bare / "bin" / "nvidia-smi", "")  # shadows that of a machine with a card
    assert build_extension.requested_archs() == ["sm89"]
    fake_tool(bare / "bin" / "nvidia-smi", "9.0\n8.9\n9.0")
    assert toolchain.card_capabilities() == [(8, 9), (9, 0)]
    assert build_extension.requested_archs() == ["sm89", "sm90a"]
    fake_tool(bare / "bin" / "nvidia-smi", "8.0")
    with pytest.raises(build_extension.BuildError, match=r"compute capability 8\.0.*FP8CUTLASS_SKIP_BUILD"):
        build_extension.requested_archs()
    monkeypatch.setenv("FP8CUTLASS_ARCHS", "sm90a; sm89")
    assert build_extension.requested_archs() == ["sm90a", "sm89"]
    monkeypatch.setenv("FP8CUTLASS_ARCHS", " ;")
    with pytest.raises(build_extension.BuildError, match="FP8CUTLASS_ARCHS"):
        build_extension.requested_archs()


def test_progress_lines() -> None:
    plan = "\n".join(f"[{i}/3] Building CUDA object CMakeFiles/kernels.dir/gen/sm89/k{i}.cu.o" for i in (1, 2))
    lines: list[str] = []
    clock = iter([0.0, 30.0, 90.0])
    progress = build_extension.Progress(build_extension.Progress.count(plan), lines.append, lambda: next(clock))
    progress.feed("[1/3] Building CUDA object CMakeFiles/kernels.dir/gen/sm89/k1.cu.o")
    progress.feed("ptxas info    : Used 6 registers")
    progress.feed("k1.cu(3): warning #177-D: variable declared but never referenced")
    progress.feed("[2/3] Building CUDA object CMakeFiles/kernels.dir/gen/sm89/k2.cu.o")
    progress.feed("[3/3] Linking CUDA shared module _C.so")
    assert lines == [
        "[1/2] k1  30s, ETA 30s",
        "k1.cu(3): warning #177-D: variable declared but never referenced",
        "[2/2] k2  1m30s",
    ]


def test_progress_shows_everything_after_a_failure() -> None:
    lines: list[str] = []
    progress = build_extension.Progress(1, lines.append, lambda: 0.0)
    for line in ("quiet", "FAILED: k1.cu.o", "nvcc k1.cu", "ptxas fatal"):
        progress.feed(line)
    assert lines == ["FAILED: k1.cu.o", "nvcc k1.cu", "ptxas fatal"]
