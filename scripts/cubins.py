"""Compiles kernels to cubins, a few at a time; what did not change since an earlier run is not compiled again.

A cubin lies in `<folder>/<target>/<source>.cubin`, beside it what the compiler said (`.log`: registers, spills, advice)
and what it was made of (`.made`). A cubin is up to date when its source, the headers that this includes, the compiler
and its options are the same, whatever the times of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from scripts import toolchain

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"  # the project's own headers

# nvcc's options, here and nowhere else. expt-relaxed-constexpr: CuTe calls constexpr host functions from device code.
# resource-usage puts registers and spills of every kernel into the log.
OPTIONS = ("-O3", "-DNDEBUG", "-std=c++17", "--expt-relaxed-constexpr", "--resource-usage")
SHOWN_LINES = 20  # of a compiler's complaint; the first error is the one that counts

_INCLUDED = re.compile(r'^#include "(fp8cutlass/[^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel that the compiler refused; the message is what it said."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """version is nvcc's full release ("13.0.88"): another patch release may allocate registers differently."""

    nvcc: Path
    version: str
    options: tuple[str, ...]
    includes: tuple[str, ...]
    cutlass_digest: str
    environment: dict[str, str]

    def command(self, gencode: str, source: Path, cubin: Path) -> list[str]:
        """The nvcc line of one kernel: its device code alone, with ptxas reporting its resources."""
        options = [*self.options, gencode, "-Xptxas=-v", *self.includes]
        return [str(self.nvcc), "-cubin", *options, str(source), "-o", str(cubin)]

    def key(self, gencode: str, source: Path) -> str:
        """Changes whenever compiling could give another result."""
        headers = digest_of(INCLUDE, own_headers([source]), code_of)
        parts = [self.version, self.cutlass_digest, headers, *self.options, gencode]
        return hashlib.sha256("\0".join(parts).encode() + b"\0" + code_of(source)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A source to be compiled for a target, by nvcc's option for that."""

    target: str
    gencode: str
    source: Path


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled source. log: what the compiler said. seconds: wall time of nvcc; peak_mib: its largest process."""

    path: Path
    key: str
    log: str
    seconds: float
    peak_mib: float


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
    """A source without its comments, which change nothing that is compiled."""
    return re.sub(rb"\s*//[^\n]*", b"", path.read_bytes())


def digest_of(folder: Path, paths: Iterable[Path], content: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Of the names, relative to `folder`, and the contents of these files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder)}\0".encode() + content(path))
    return digest.hexdigest()


def files_in(folder: Path, *parts: str) -> list[Path]:
    """All files below some folders of `folder`, in order."""
    return sorted(p for part in parts for p in (folder / part).rglob("*") if p.is_file())


def _version(nvcc: Path) -> str:
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise toolchain.ToolchainError(f"{nvcc} --version names no version: {text.strip()}")
    return match[1]


def open_compiler() -> Compiler:
    """That of this machine, with the options in FP8CUTLASS_CUDA_FLAGS as well. Raises ToolchainError."""
    nvcc, cutlass = toolchain.find_nvcc(), toolchain.find_cutlass()
    return Compiler(
        nvcc=nvcc.path,
        version=_version(nvcc.path),
        options=(*OPTIONS, *shlex.split(os.environ.get("FP8CUTLASS_CUDA_FLAGS", ""))),
        includes=("-I", str(INCLUDE), "-isystem", str(cutlass)),
        cutlass_digest=digest_of(cutlass, files_in(cutlass, "cute", "cutlass")),
        environment=nvcc.environment(),
    )


def _head(text: str) -> str:
    lines = text.strip().splitlines()
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def run_nvcc(command: Sequence[str], environment: dict[str, str]) -> tuple[str, float, float]:
    """Output, seconds, and MiB of the largest process of nvcc's tree (its compilers run one after the other).

    Raises CompileError.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        raise CompileError(f"nvcc failed with status {process.returncode}:\n{_head(text)}")
    return text, seconds, usage.ru_maxrss / 1024


def _place(job: Job, folder: Path) -> Path:
    return folder / job.target / f"{job.source.stem}.cubin"


def stored(job: Job, compiler: Compiler, folder: Path) -> Cubin | None:
    """The cubin of an earlier run if it is up to date."""
    path = _place(job, folder)
    try:
        made, log = json.loads(path.with_suffix(".made").read_text()), path.with_suffix(".log").read_text()
        key = compiler.key(job.gencode, job.source)
        if made["key"] != key or not path.is_file():
            return None
        return Cubin(path=path, key=key, log=log, seconds=made["seconds"], peak_mib=made["peak_mib"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make(job: Job, compiler: Compiler, folder: Path) -> Cubin:
    """Compiles a source. Raises CompileError. Two runs may share the folder: files get their names when complete."""
    path = _place(job, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    key = compiler.key(job.gencode, job.source)
    partial = path.with_suffix(f".{os.getpid()}.cubin")
    log, seconds, peak = run_nvcc(compiler.command(job.gencode, job.source, partial), compiler.environment)
    path.with_suffix(".made").unlink(missing_ok=True)
    partial.replace(path)
    seconds, peak = round(seconds, 2), round(peak)
    made = {"key": key, "seconds": seconds, "peak_mib": peak}
    for suffix, text in ((".log", log), (".made", json.dumps(made))):
        partial = path.with_suffix(f".{os.getpid()}{suffix}")
        partial.write_text(text)
        partial.replace(path.with_suffix(suffix))
    return Cubin(path=path, key=key, log=log, seconds=seconds, peak_mib=peak)


def make_all(
    jobs: Iterable[Job], compiler: Compiler, folder: Path, workers: int, done: Callable[[Job, Cubin], None]
) -> dict[Job, Cubin]:
    """Compiles what is not up to date, `workers` at a time, and calls `done` for each that it compiled.

    Raises CompileError for the first source that is refused, naming it; the others are not begun then.
    """
    wanted = list(dict.fromkeys(jobs))
    result = {job: cubin for job in wanted if (cubin := stored(job, compiler, folder)) is not None}
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(make, job, compiler, folder): job for job in wanted if job not in result}
        try:
            for future in as_completed(running):
                job = running[future]
                try:
                    result[job] = future.result()
                except CompileError as error:
                    raise CompileError(f"{job.source} for {job.target}: {error}") from error
                done(job, result[job])
        except BaseException:  # an interrupt as well: without this the pool would first compile all the rest
            pool.shutdown(cancel_futures=True)
            raise
    return {job: result[job] for job in wanted}
