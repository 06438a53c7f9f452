"""Finds what compiles and takes apart CUDA code: nvcc, CUTLASS, torch's headers, nvdisasm, CMake, the card.

Standard library only, and torch is not imported (seconds, and a CUDA driver to start): only its folder is wanted.
Every `find_*` returns a path or raises `ToolchainError` with where it looked and what to do; none installs anything.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# FP8 mma.sync with f16 accumulators is PTX ISA 8.7, which CUDA 12.8 brought.
MIN_NVCC = (12, 8)
SYSTEM_CUDA = Path("/usr/local/cuda")
MIN_CMAKE = (3, 24)
MIN_TORCH = (2, 10)  # the first with the stable ABI that the binding is written against


class ToolchainError(RuntimeError):
    """Something needed for a build is not here. The message says what, where it was looked for, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Nvcc:
    """An nvcc that can be used.

    path: the executable. version: (major, minor).
    library_dir: where `libcudart_static.a` lies when nvcc would not find it by itself (packages from an index put it
    into `lib`, nvcc.profile names `lib64`), to be put on LIBRARY_PATH; else None.
    passed_over: the ones that were looked at first and cannot be used, each with its reason.
    """

    path: Path
    version: tuple[int, int]
    library_dir: Path | None
    passed_over: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """The process environment in which this nvcc links."""
        environment = dict(os.environ)
        if self.library_dir is not None:
            inherited = environment.get("LIBRARY_PATH")
            environment["LIBRARY_PATH"] = os.pathsep.join([str(self.library_dir)] + ([inherited] if inherited else []))
        return environment


def dotted(version: tuple[int, int]) -> str:
    """(12, 8) -> "12.8"."""
    return f"{version[0]}.{version[1]}"


def site_dirs() -> list[Path]:
    """Folders packages are imported from, the running environment's own first."""
    own = [sysconfig.get_paths()[key] for key in ("purelib", "platlib")]
    found = dict.fromkeys(Path(entry) for entry in own + sys.path if entry)
    return [path for path in found if path.is_dir()]


def _cuda_homes() -> Iterator[Path]:
    """Toolkit folders, from the most to the least explicit."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path).resolve().parent.parent  # /usr/local/bin/nvcc may be a launcher: then bin/nvcc is that
    yield SYSTEM_CUDA
    for site in site_dirs():
        yield from sorted(site.glob("nvidia/cu*"), reverse=True)


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """(major, minor) of an nvcc, or None when it does not run."""
    try:
        text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _library_dir(home: Path) -> Path | None:
    nvcc_finds = any((home / name / "libcudart_static.a").exists() for name in ("lib64", "targets/x86_64-linux/lib"))
    return None if nvcc_finds or not (home / "lib" / "libcudart_static.a").exists() else home / "lib"


def find_nvcc() -> Nvcc:
    """The first usable nvcc of CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda and installed packages.

    One that does not run or is older than `MIN_NVCC` is passed over, and listed in the result for the build to say so.
    """
    passed_over: list[str] = []
    for home in dict.fromkeys(_cuda_homes()):
        path = home / "bin" / "nvcc"
        if not path.is_file():
            continue
        version = nvcc_version(path)
        if version is not None and version >= MIN_NVCC:
            return Nvcc(path=path, version=version, library_dir=_library_dir(home), passed_over=tuple(passed_over))
        passed_over.append(f"{path} ({'does not run' if version is None else dotted(version)})")
    raise ToolchainError(
        f"no nvcc >= {dotted(MIN_NVCC)} in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or installed packages"
        + (f"; passed over: {', '.join(passed_over)}" if passed_over else "")
        + ". Install a CUDA toolkit, or run `python scripts/bootstrap.py build`, which takes nvcc from a package index."
    )


def find_cutlass() -> Path:
    """The folder that holds `cute/tensor.hpp`: CUTLASS_PATH[/include], else the installed `nvidia-cutlass` package."""
    places = []
    if os.environ.get("CUTLASS_PATH"):
        root = Path(os.environ["CUTLASS_PATH"])
        places = [root / "include", root]
    else:
        places = [site / "cutlass_library" / "source" / "include" for site in site_dirs()]
    for include in places:
        if (include / "cute" / "tensor.hpp").is_file():
            return include
    raise ToolchainError(
        f"no CUTLASS headers in {', '.join(map(str, places))}. "
        "Run `pip install --no-deps nvidia-cutlass==4.2.0.0`, or set CUTLASS_PATH to a CUTLASS 4.2 tree."
    )


def find_torch() -> Path:
    """The folder of the installed torch (>= 2.10), whose `include` and `lib` the binding is compiled against."""
    spec = importlib.util.find_spec("torch")
    seen: list[str] = []
    for folder in map(Path, (spec.submodule_search_locations or []) if spec else []):
        match = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", _read(folder / "version.py"))
        headers = (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file()
        if match and (int(match[2]), int(match[3])) >= MIN_TORCH and headers:
            return folder
        seen.append(f"{folder} ({match[1] if match else 'unknown version'}{'' if headers else ', no headers'})")
    raise ToolchainError(
        f"no torch >= {dotted(MIN_TORCH)} with its headers in this environment"
        + (f"; passed over: {', '.join(seen)}" if seen else "")
        + ". Install torch first, and let pip see it: `pip install --no-build-isolation .`"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def find_disassembler(name: str) -> Path:
    """`nvdisasm`, or another such tool: from PATH, a toolkit, or the package `nvidia-cuda-<name>`."""
    places = [home / "bin" / name for home in _cuda_homes()]
    on_path = shutil.which(name)
    for path in ([Path(on_path)] if on_path else []) + places:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise ToolchainError(f"no {name} on PATH or in a toolkit: run `pip install nvidia-cuda-{name}==13.*`")


def _tool(name: str) -> str | None:
    """An executable beside the running interpreter (a virtual environment that is not activated), else on PATH."""
    own = Path(sysconfig.get_path("scripts")) / name
    return str(own) if os.access(own, os.X_OK) else shutil.which(name)


def find_cmake() -> Path:
    """CMake of at least `MIN_CMAKE`."""
    path = _tool("cmake")
    if path:
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        match = re.search(r"(\d+)\.(\d+)", text)
        if match and (int(match[1]), int(match[2])) >= MIN_CMAKE:
            return Path(path)
    raise ToolchainError(f"no CMake >= {dotted(MIN_CMAKE)} ({path or 'none'} on PATH): run `pip install cmake`")


def find_ninja() -> Path:
    """Ninja, which the build is driven by: its status lines are the progress display."""
    path = _tool("ninja")
    if path is None:
        raise ToolchainError("no ninja on PATH: run `pip install ninja`")
    return Path(path)


def card_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of this machine's NVIDIA cards, each once, lowest first; empty without a card or driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    result = subprocess.run([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    if result.returncode != 0:
        return []
    return sorted({(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)", result.stdout, re.M)})


def _memory_bytes() -> int | None:
    """Memory a build may use: the smaller of what is available and the control group's limit; None when unknown."""
    limits = []
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            limits.append(int(match[1]) * 1024)
    except OSError:
        return None
    try:
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return min(limits, default=None)


def job_count() -> int:
    """Compilers to run at once: FP8CUTLASS_JOBS, else one a core and one for every 4 GB, which a large kernel takes."""
    text = os.environ.get("FP8CUTLASS_JOBS")
    if text is not None:
        if not text.isdigit() or int(text) < 1:
            raise ToolchainError(f"FP8CUTLASS_JOBS must be a whole number >= 1, got {text!r}")
        return int(text)
    cores = len(os.sched_getaffinity(0))
    memory = _memory_bytes()
    return max(1, cores if memory is None else min(cores, memory // (4 << 30)))
