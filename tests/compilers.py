"""Compilers for tests: a C++ program that prints, and nvcc with the project's headers."""

from __future__ import annotations

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


def nvcc(*arguments: str | Path, include: Path = ROOT / "include") -> subprocess.CompletedProcess[str]:
    """nvcc with this project's headers, or others, and CUTLASS'; skips the test, saying why, where one is not
    installed."""
    try:
        compiler, cutlass = find_nvcc(), find_cutlass()
    except ToolchainError as error:
        pytest.skip(str(error))
    command = [compiler.path, "-std=c++17", "-I", include, "-I", cutlass, *arguments]
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, env=compiler.environment())
