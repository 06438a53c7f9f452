"""The compiled kernels: where they are found, what they were built for, and their loading on first need.

The shared library is ``_C*.so`` beside this file; the environment variable ``FP8CUTLASS_LIBRARY`` names another one.
``_built/manifest.json`` and ``_built/dispatch.json`` beside the library describe what is compiled into it: the number
of a variant in the library is its position in that manifest, which may be smaller than the shipped one.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

import torch

from .errors import NoKernelError, UnsupportedError
from .manifest import PACKAGE_DIR, generated_dir, load_manifest

BUILD_HINT = (
    "build the kernels with `pip install .` (FP8CUTLASS_ARCHS='sm89;sm90a' picks the architectures), or name a built "
    "library in FP8CUTLASS_LIBRARY"
)

_lock = threading.Lock()
_loaded: set[Path] = set()


def find_library() -> Path | None:
    """Return the shared library, or None where there is none. A wrong FP8CUTLASS_LIBRARY is an error."""
    override = os.environ.get("FP8CUTLASS_LIBRARY")
    if override:
        if not Path(override).is_file():
            raise UnsupportedError(f"FP8CUTLASS_LIBRARY={override!r} is no file")
        return Path(override).resolve()
    return next(iter(sorted(PACKAGE_DIR.glob("_C*.so"))), None)


def built_dir() -> Path:
    """Return the directory with the manifest and the table of the library; UnsupportedError says what is missing."""
    library = find_library()
    if library is None:
        raise NoKernelError(f"the CUDA kernels are not built: there is no _C*.so in {PACKAGE_DIR}", BUILD_HINT)
    directory = library.parent / "_built"
    for name in ("manifest.json", "dispatch.json"):
        if not (directory / name).is_file():
            raise NoKernelError(f"{library} comes without {directory / name}", BUILD_HINT)
    return directory


@cache
def _capability(index: int) -> tuple[tuple[int, int], str, int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.name, properties.multi_processor_count


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return _capability(_index(device))[2]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def known_arch(device: torch.device) -> str:
    """Return the architecture whose kernels a CUDA device runs, built or not; UnsupportedError if there are none."""
    capability, name, _ = _capability(_index(device))
    known = load_manifest(generated_dir()).capability
    for arch, served in known.items():
        if served == capability:
            return arch
    raise NoKernelError(
        f"{name} ({device}) has compute capability {capability[0]}.{capability[1]}, the kernels are for "
        f"{', '.join(f'{arch} ({major}.{minor})' for arch, (major, minor) in known.items())}"
    )


def device_arch(device: torch.device) -> str:
    """Return :func:`known_arch` if the library was built for it.

    Raises UnsupportedError naming the device, what it needs and what the library was built for.
    """
    arch, archs = known_arch(device), load_manifest(built_dir()).archs
    if arch not in archs:
        name = _capability(_index(device))[1]
        raise NoKernelError(f"{name} ({device}) needs {arch}, the library was built for {', '.join(archs)}", BUILD_HINT)
    return arch


def load() -> None:
    """Register ``torch.ops.fp8cutlass_C``, once for each library, whichever thread comes first."""
    library = find_library()
    if library in _loaded:
        return
    built_dir()  # raises where there is no library
    with _lock:
        if library not in _loaded and library is not None:
            torch.ops.load_library(str(library))
            _loaded.add(library)
