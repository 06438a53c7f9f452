"""The tools and options that kernels are compiled with: those of the extension build, read from CMakeLists.txt."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from codegen.arch import TARGETS

ROOT = Path(__file__).resolve().parent.parent.parent
INCLUDE = ROOT / "include"  # the project's own headers

_INCLUDED = re.compile(r'^#include "(fp8cutlass/[^"]+)"', re.MULTILINE)
_STATEMENTS = {
    "CMAKE_CUDA_FLAGS_RELEASE": r"set\(CMAKE_CUDA_FLAGS_RELEASE\s+\"([^\"$]*)\"\)",
    "CMAKE_CUDA_STANDARD": r"set\(CMAKE_CUDA_STANDARD\s+(\d+)\)",
    "fp8cutlass_nvcc_options": r"set\(fp8cutlass_nvcc_options\s+([^)$]*)\)",
}


class ToolboxError(RuntimeError):
    """The gates cannot compile the way the extension build does; the message says what is missing."""


def cmake_options(text: str) -> list[str]:
    """nvcc's options in the Release build that a CMakeLists.txt with this text describes, without -I and -gencode."""
    found = {}
    for name, pattern in _STATEMENTS.items():
        matches = re.findall(pattern, text)
        if len(matches) != 1:
            raise ToolboxError(f"CMakeLists.txt sets {name} to a plain value {len(matches)} times, expected once")
        found[name] = matches[0]
    release, standard, own = (found[name] for name in _STATEMENTS)
    return [*shlex.split(release), f"-std=c++{standard}", *shlex.split(own)]


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """nvcc_version is its full release ("13.0.88"): another patch release may allocate registers differently."""

    nvcc: Path
    nvcc_version: str
    nvdisasm: Path
    options: tuple[str, ...]
    includes: tuple[str, ...]
    cutlass_digest: str
    environment: dict[str, str]

    def command(self, target: str, source: Path, cubin: Path) -> list[str]:
        """The nvcc line of one kernel, with ptxas reporting its resources."""
        options = [*self.options, TARGETS[target].gencode, "-Xptxas=-v", *self.includes]
        return [str(self.nvcc), "-cubin", *options, str(source), "-o", str(cubin)]

    def digest(self, target: str, source: Path) -> str:
        """Changes whenever compiling could give another result."""
        headers = digest_of(INCLUDE, own_headers([source]), code_of)
        parts = [self.nvcc_version, self.cutlass_digest, headers, *self.options, TARGETS[target].gencode]
        return hashlib.sha256("\0".join(parts).encode() + b"\0" + code_of(source)).hexdigest()


def own_headers(sources: Iterable[Path]) -> list[Path]:
    """The project's headers that these files include, directly or through one another."""
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        included = {INCLUDE / name for name in _INCLUDED.findall(waiting.pop().read_text())} - found
        found |= included
        waiting += included
    return sorted(found)


def code_of(path: Path) -> bytes:
    """A source without its comments, which change nothing that is measured."""
    return re.sub(rb"\s*//[^\n]*", b"", path.read_bytes())


def digest_of(folder: Path, paths: Iterable[Path], content: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Of the names, relative to `folder`, and the contents of these files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder)}\0".encode() + content(path))
    return digest.hexdigest()


def _files(folder: Path, *parts: str) -> list[Path]:
    return sorted(p for part in parts for p in (folder / part).rglob("*") if p.is_file())


def _version(nvcc: Path) -> str:
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise ToolboxError(f"{nvcc} --version names no version: {text.strip()}")
    return match[1]


def open_toolbox() -> Toolbox:
    """The tools of this machine. Raises ToolboxError naming what is missing and the remedy."""
    from scripts import toolchain  # the generator itself must not need the build's scripts

    try:
        nvcc, nvdisasm, cutlass = (
            toolchain.find_nvcc(),
            toolchain.find_disassembler("nvdisasm"),
            toolchain.find_cutlass(),
        )
    except toolchain.ToolchainError as error:
        raise ToolboxError(str(error)) from error
    return Toolbox(
        nvcc=nvcc.path,
        nvcc_version=_version(nvcc.path),
        nvdisasm=nvdisasm,
        options=(
            *cmake_options((ROOT / "CMakeLists.txt").read_text()),
            *shlex.split(os.environ.get("FP8CUTLASS_CUDA_FLAGS", "")),
        ),
        includes=("-I", str(INCLUDE), "-isystem", str(cutlass)),
        cutlass_digest=digest_of(cutlass, _files(cutlass, "cute", "cutlass")),
        environment=nvcc.environment(),
    )
