"""Compilers for tests: a C++ program that prints, kernels as a library of the host, and nvcc with the project's
headers."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
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


HOST = ROOT / "tests" / "host"
HOST_MADE = ROOT / "build" / "host"  # what is below is made once for all test processes, and kept between runs
# -Og: compiling takes half of -O2's time, 0.8 s instead of 1.8, and the programs run for milliseconds. No contraction:
# kernels round where their sources say so. And jumps from fiber to fiber are none that glibc's hardened ones accept.
HOST_FLAGS = ("-std=c++17", "-fPIC", "-Og", "-ffp-contract=off", "-U_FORTIFY_SOURCE")


@contextmanager
def made_once(path: Path) -> Iterator[Path | None]:
    """Where to make a file that other processes may want as well; None where it is there. It gets its name when the
    block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            path.touch()
            yield None
            return
        partial = path.with_name("partial-" + path.name)
        yield partial
        partial.replace(path)


def _forget() -> None:
    """Deletes what nobody has used for a day."""
    for path in HOST_MADE.glob("*/*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 86_400:
                path.unlink()


@cache
def _host_compiler() -> tuple[str, str, str]:
    """The compiler, a digest of it and of all that tests/host has, and a header for ``-include``: the stand-ins of
    CUDA's, which g++ finds compiled beside it (0.3 s less for each program). Others read it as it is."""
    _forget()
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    says = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join((compiler, says, *HOST_FLAGS)).encode())
    for path in sorted(p for p in HOST.rglob("*") if p.is_file()):
        digest.update(f"{path}\0".encode() + path.read_bytes())
    key = digest.hexdigest()[:16]
    header = HOST_MADE / key / "host.h"
    with made_once(header) as partial:
        if partial is not None:
            partial.write_text(f'#include "{HOST / "device" / "cuda_runtime.h"}"\n')
    with made_once(header.with_name("host.h.gch")) as partial:
        if partial is not None:
            command = [compiler, *HOST_FLAGS, "-I", HOST / "device", "-x", "c++-header", header, "-o", partial]
            subprocess.run([*map(str, command)], check=True)
    return compiler, key, str(header)


def host_library(program: str, folder: Path, headers: Path, *flags: str) -> ctypes.CDLL:
    """The library that g++ makes in ``folder`` of ``program``, a file of tests/host, with the stand-ins for what only a
    card has. RuntimeError has what the compiler says. One of the same sources is not compiled again."""
    compiler, key, common = _host_compiler()
    command = [compiler, *HOST_FLAGS, "-include", common, "-shared", *flags, "-I", HOST / "device", "-I", headers]
    words = [str(word) for word in (*command, HOST / program)]
    digest = hashlib.sha256("\0".join(words).replace(str(folder), "").encode())
    for root in (folder, headers):
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    library, kept = folder / "kernel.so", HOST_MADE / key / f"{digest.hexdigest()[:32]}.so"
    with made_once(kept) as partial:
        if partial is not None:
            made = subprocess.run([*words, "-o", str(partial)], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise RuntimeError(made.stderr)
    shutil.copyfile(kept, library)  # each has its own static memory
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
