"""Compilers for tests: a C++ program that prints, kernels as a library of the host, and nvcc with the project's
headers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.toolchain import ToolchainError, find_cutlass, find_nvcc

ROOT = Path(__file__).resolve().parent.parent


def run_cpp(blocks: list[str], folder: Path) -> str:
    """What a C++17 program prints whose `main` holds these blocks. `folder` takes its files."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.fail("no C++ compiler: the extension could not be built either")
    source, program = folder / "program.cpp", folder / "program"
    source.write_text("#include <cstdio>\nint main() {\n" + "\n".join(blocks) + "\n}\n")
    subprocess.run([compiler, "-std=c++17", "-O0", str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def planted(path: Path, old: str, new: str) -> None:
    """Replaces a text of a source, which must stand there once."""
    text = path.read_text()
    if text.count(old) != 1:
        raise LookupError(f"{path} has {text.count(old)} times what is to be edited: {old!r}")
    path.write_text(text.replace(old, new))


def host_library(program: str, folder: Path, headers: Path, *flags: str) -> ctypes.CDLL:
    """The library that g++ makes in ``folder`` of ``program``, a file of tests/host, with the stand-ins for what only a
    card has. RuntimeError has what the compiler says."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    host, library = ROOT / "tests" / "host", folder / "kernel.so"
    # Jumps from fiber to fiber are none that glibc's hardened ones would accept.
    flags = ("-U_FORTIFY_SOURCE", *flags)
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *flags, "-I", host / "device", "-I", headers, host / program]
    made = subprocess.run([*map(str, command), "-o", str(library)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError(made.stderr)
    return ctypes.CDLL(str(library))


def nvcc(*arguments: str | Path, include: Path = ROOT / "include") -> subprocess.CompletedProcess[str]:
    """nvcc with this project's headers, or others, and CUTLASS'; skips the test, saying why, where one is not
    installed."""
    try:
        compiler, cutlass = find_nvcc(), find_cutlass()
    except ToolchainError as error:
        pytest.skip(str(error))
    command = [compiler.path, "-std=c++17", "-I", include, "-I", cutlass, *arguments]
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, env=compiler.environment())
