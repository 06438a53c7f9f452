"""The built extension as a file and as a torch library, on a machine without a card; and the discovery of compilers.

Regressions these catch: an operator whose schema drifted from what the package calls, a registry in another order than
the manifest (every kernel would run under another's name), a library that drags in a CUDA runtime or a Python, a target
that was not compiled, a kernel that the library asks for by another name, an nvcc too old for the kernels, a cubin
that is taken for up to date.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from operators import SCHEMAS, schema

from codegen.cli import main as codegen_main
from codegen.gates import machine
from fp8cutlass._ops import LIBRARY
from scripts import build_extension, cubins, kernel_file, toolchain
from scripts.progress import forecast

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("library")  # one process makes what all of these read
PLACES = (ROOT / "build" / "test" / "fp8cutlass", ROOT / "python" / "fp8cutlass")

# Run in its own process: the operators can be registered once, and the package may have loaded another copy.
INSPECT = """
import ctypes, json, sys, torch
path = sys.argv[1]
torch.ops.load_library(path)
ops = torch.ops.fp8cutlass_C
c = ctypes.CDLL(path)
c.fp8cutlass_variant_id.restype = ctypes.c_char_p
c.fp8cutlass_kernel_name.restype = ctypes.c_char_p
c.fp8cutlass_manifest.restype = c.fp8cutlass_library.restype = ctypes.c_char_p
count = c.fp8cutlass_variant_count()
def names(source):
    found = [c.fp8cutlass_kernel_name(source, form) for form in range(-1, 8)]
    return [name.decode() for name in found if name is not None]

x = torch.zeros(1, 1, 128, 32, dtype=torch.uint8)
one = torch.ones(1)
try:
    ops.forward(0, x, x, x, one, one, one, None, x.to(torch.bfloat16), None, None, 1.0, 0)
    refusal = None
except NotImplementedError as error:
    refusal = str(error)
print(json.dumps({
    "schemas": {name: str(getattr(ops, name).default._schema) for name in sys.argv[3:]},
    "ids": [c.fp8cutlass_variant_id(i).decode() for i in range(count)],
    "outside": [c.fp8cutlass_variant_id(-1), c.fp8cutlass_variant_id(count), c.fp8cutlass_kernel_name(-1, 0)],
    "names": [names(source) for source in range(int(sys.argv[2]) + 1)],
    "manifest": c.fp8cutlass_manifest().decode(),
    "library": c.fp8cutlass_library().decode(),
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
            [
                sys.executable,
                "-c",
                INSPECT,
                str(self.library),
                str(len(sources_of(self.manifest))),
                *SCHEMAS,
            ],
            capture_output=True,
            text=True,
            check=False,
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
    assert answers["schemas"] == {name: str(schema(text)) for name, text in SCHEMAS.items()}


def test_errors_are_made_without_streams() -> None:
    """Linked with a libstdc++ of its own, the library once ended the process where it should have raised: the locales
    of two copies took each other's place in an ostringstream."""
    streams = re.compile(r"#include <(sstream|iostream|ostream|fstream|iomanip)>|stringstream")
    assert [path.name for path in (ROOT / "csrc").iterdir() if streams.search(path.read_text())] == []


def test_variants_are_those_of_the_manifest_in_its_order(built: Built, answers: dict[str, Any]) -> None:
    assert answers["ids"] == [variant["id"] for variant in built.manifest["variants"]]
    assert answers["outside"] == [None, None, None]


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


def kernel_files(built: Built) -> dict[str, kernel_file.KernelFile]:
    folder = built.library.parent / "_built"
    assert {p.name for p in folder.glob("*.bin")} == {kernel_file.name_of(arch) for arch in built.manifest["archs"]}
    return {arch: kernel_file.read(folder / kernel_file.name_of(arch)) for arch in built.manifest["archs"]}


def sources_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What the library numbers, in its order; what its profile does not have, without targets."""
    plans = {plan["id"]: plan for plan in manifest["plans"]}
    last = [
        plans.get(name, {"id": name, "targets": []})
        for name in ("plan", "cut", "append", "route", "pack_mask", "merge")
    ]
    return [*manifest["variants"], *manifest["packs"], *manifest["decodes"], *last, *manifest["residents"]]


def test_every_kernel_is_compiled_for_its_targets(built: Built) -> None:
    promised: dict[str, set[str]] = {arch: set() for arch in built.manifest["archs"]}
    for kernel in sources_of(built.manifest):
        for arch in kernel["targets"]:
            promised[arch].add(kernel["id"])
    files = kernel_files(built)
    assert {arch: set(file.cubins) for arch, file in files.items()} == promised
    for arch, file in files.items():
        assert file.target == arch and file.build.encode() in built.library.read_bytes()
        # An ELF file for CUDA (machine 190) whose flags name the architecture: 0x59 is 89, 0x5a is 90.
        flags = {(code[18:20], code[49]) for code in file.cubins.values()}
        assert flags == {((190).to_bytes(2, "little"), {"sm89": 89, "sm90a": 90}[arch])}


def test_the_library_asks_for_kernels_by_their_names(built: Built, answers: dict[str, Any]) -> None:
    """All functions of every cubin, and no others: a name that is spelled otherwise would be found out by a launch."""
    sources = sources_of(built.manifest)
    assert answers["names"][len(sources) :] == [[]]
    files = kernel_files(built)
    for source, names in zip(sources, answers["names"], strict=False):
        for arch in source["targets"]:
            sections = machine.sections(files[arch].cubins[source["id"]])
            held = {name.removeprefix(".text.") for name in sections if name.startswith(".text.")}
            assert held == set(names) and len(held) == len(names), source["id"]


def test_the_library_knows_its_manifest(built: Built, answers: dict[str, Any]) -> None:
    text = (built.library.parent / "_built" / "manifest.json").read_bytes()
    assert answers["manifest"] == hashlib.sha256(text).hexdigest()


def test_the_library_knows_where_its_operators_are(answers: dict[str, Any]) -> None:
    """Python looks for them under this name."""
    assert answers["library"] == LIBRARY == build_extension.LIBRARY


def test_what_is_generated_is_what_the_build_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sm90a build without and with kernels that are only emulated there; the command runs in this process, which
    has selected already."""
    monkeypatch.setattr(build_extension, "_run", codegen_here)
    families = []
    for emulated in (False, True):
        build_extension.generate(tmp_path, profile="dev", archs=["sm90a"], emulated=emulated)
        variants = json.loads((tmp_path / "manifest.json").read_text())["variants"]
        assert all(variant["targets"] == ["sm90a"] for variant in variants)
        families.append({variant["family"] for variant in variants})
    assert families == [{"sm90a"}, {"sm89", "sm90a"}]


def codegen_here(command: Sequence[str | Path]) -> None:
    assert command[:3] == [sys.executable, "-m", "codegen"]
    result = CliRunner().invoke(codegen_main, [str(x) for x in command[3:]])
    assert result.exit_code == 0, result.output


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


def test_archs_follow_the_cards(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tool(bare / "bin" / "nvidia-smi", "")  # shadows that of a machine with a card
    assert build_extension.requested_archs() == ["sm89"]
    said = capsys.readouterr().err
    assert "a guess" in said and "FP8CUTLASS_ARCHS=sm90a" in said
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


def test_a_build_says_first_what_it_compiles_and_how_long_that_takes() -> None:
    """And that there is a smaller one, where it is much smaller."""
    entries = [{"id": f"k{i}", "profile": "ci" if i < 2 else "release"} for i in range(20)]
    job = cubins.Job(target="sm89", gencode="", source=Path("k.cu"))
    kernels = {"sm89": {str(entry["id"]): job for entry in entries}}
    manifest = {"archs": ["sm89"], "profile": "release", "packs": [], "variants": entries}
    said = forecast(manifest, kernels, 2)
    assert said == (
        "building 20 kernels for sm89, 2 at a time: about 1m00s. "
        "FP8CUTLASS_PROFILE=ci builds 2 that serve fewer calls, in about 33s"
    )
    assert "FP8CUTLASS_PROFILE" not in forecast(manifest | {"profile": "ci"}, kernels, 2)


def test_progress_lines() -> None:
    lines: list[str] = []
    clock = iter([0.0, 30.0, 90.0])
    progress = build_extension.Progress(2, lines.append, lambda: next(clock))
    progress.done("k1", "ptxas info    : Used 6 registers\nk1.cu(3): warning #177-D: variable never referenced\n")
    progress.done("k2", "ptxas info    : a warning of the kind that belongs into the log\n")
    assert lines == ["[1/2] k1  30s, ETA 30s", "k1.cu(3): warning #177-D: variable never referenced", "[2/2] k2  1m30s"]


# ---- cubins ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(tmp_path: Path) -> cubins.Compiler:
    """One that writes its source behind its options, and fails where the source says so."""
    script = tmp_path / "nvcc"
    script.write_text(
        "#!/bin/sh\n"
        'for last; do :; done\nfor x; do [ "${x%.cu}" = "$x" ] || source=$x; done\n'
        'if grep -q refused "$source"; then echo "$source(1): error: refused"; exit 1; fi\n'
        'echo "compiling $source"; cat "$source" > "$last"\n'
    )
    script.chmod(0o755)
    return cubins.Compiler(
        nvcc=script, version="13.0.1", options=("-O3",), includes=(), cutlass_digest="", environment=dict(os.environ)
    )


def job(source: Path, text: str) -> cubins.Job:
    source.write_text(text)
    return cubins.Job(target="sm89", gencode="-gencode=arch=compute_89,code=sm_89", source=source)


def test_only_what_changed_is_compiled_again(compiler: cubins.Compiler, tmp_path: Path) -> None:
    compiled: list[str] = []

    def make(jobs: list[cubins.Job], compiler: cubins.Compiler = compiler) -> list[str]:
        compiled.clear()
        made = cubins.make_all(jobs, compiler, tmp_path / "out", 2, lambda j, cubin: compiled.append(j.source.stem))
        assert list(made) == jobs
        assert all(made[j].path.read_text() == j.source.read_text() and "compiling" in made[j].log for j in jobs)
        return sorted(compiled)

    header = '#include "fp8cutlass/params.h"\n'
    jobs = [job(tmp_path / f"{name}.cu", f"{header}int {name};\n") for name in "abc"]
    assert make(jobs) == ["a", "b", "c"]
    assert make(jobs) == []
    os.utime(jobs[0].source)  # a copy of a checkout, or another branch and back
    assert make(jobs) == []
    job(jobs[1].source, f"{header}int b = 2;\n")
    assert make(jobs) == ["b"]
    other = dataclasses.replace(compiler, options=("-O3", "-DFP8CUTLASS_DELAY=1"))
    assert make(jobs, other) == ["a", "b", "c"]
    (tmp_path / "out" / "sm89" / "a.cubin").unlink()
    assert make(jobs, other) == ["a"]


def test_a_changed_header_compiles_what_includes_it(
    compiler: cubins.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = tmp_path / "include"
    (include / "fp8cutlass").mkdir(parents=True)
    monkeypatch.setattr(cubins, "INCLUDE", include)
    (include / "fp8cutlass" / "a.h").write_text('#include "fp8cutlass/b.h"\n')
    (include / "fp8cutlass" / "b.h").write_text("int b;\n")
    with_header = job(tmp_path / "with.cu", '#include "fp8cutlass/a.h"\n')
    without = job(tmp_path / "without.cu", "int x;\n")
    for j in (with_header, without):
        cubins.make(j, compiler, tmp_path / "out")
    (include / "fp8cutlass" / "b.h").write_text("int b; // as before\n")
    assert cubins.stored(with_header, compiler, tmp_path / "out") is not None
    (include / "fp8cutlass" / "b.h").write_text("int c;\n")
    assert cubins.stored(with_header, compiler, tmp_path / "out") is None
    assert cubins.stored(without, compiler, tmp_path / "out") is not None


def test_a_kernel_that_is_refused_is_named(compiler: cubins.Compiler, tmp_path: Path) -> None:
    bad = job(tmp_path / "bad.cu", "refused\n")
    with pytest.raises(cubins.CompileError, match=r"bad\.cu for sm89: nvcc failed with status 1:\n.*error: refused"):
        cubins.make_all([bad], compiler, tmp_path / "out", 1, lambda *_: None)
    assert cubins.stored(bad, compiler, tmp_path / "out") is None


def test_a_file_of_kernels_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / kernel_file.name_of("sm89")
    code = {"a": b"\x7fELF" + bytes(100), "b_c": b"\n\n" * 40}
    data = kernel_file.pack("sm89", "ab" * 32, code)
    path.write_bytes(data)
    assert kernel_file.read(path) == kernel_file.KernelFile(target="sm89", build="ab" * 32, cubins=code)
    for offset in (line.split()[1] for line in data.split(b"\n\n")[0].decode().splitlines()[3:]):
        assert int(offset) % kernel_file.ALIGNMENT == 0
    path.write_bytes(data.replace(b"\x7fELF", b"\x7fELG"))
    with pytest.raises(ValueError, match="damaged: kernel a"):
        kernel_file.read(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no file of kernels"):
        kernel_file.read(path)


def test_a_build_is_known_by_its_manifest_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by its sources, which experiments change by hand."""
    include = tmp_path / "include"
    (include / "fp8cutlass").mkdir(parents=True)
    monkeypatch.setattr(cubins, "INCLUDE", include)
    names = []
    for manifest, header in (("{}", "a"), ("{}", "a"), ("{1}", "a"), ("{}", "b")):
        (tmp_path / "manifest.json").write_text(manifest)
        (include / "fp8cutlass" / "params.h").write_text(header)
        names.append(build_extension.build_identity(tmp_path))
    assert names[0] == names[1] and len(set(names)) == 3
