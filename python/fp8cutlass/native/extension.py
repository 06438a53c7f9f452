"""The compiled kernels: where they are found, what they were built for, and their loading on first need.

The shared library is ``_C*.so`` beside this file; the environment variable ``FP8CUTLASS_LIBRARY`` names another one.
Beside it ``_built/kernels-<target>.bin`` holds the code of the kernels, which the library loads as they are needed, and
the files of ``manifest.TABLES`` in ``_built/`` describe them: the number of a variant in the library is its position in
that manifest, which may be smaller than the shipped one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from .._ops import LIBRARY, compiled
from ..errors import NoKernelError, UnsupportedError
from ..manifest import PACKAGE_DIR, TABLES, Manifest, generated_dir, load_manifest

BUILD_HINT = (
    "build the kernels with `pip install .` (FP8CUTLASS_ARCHS='sm89;sm90a' picks the architectures), or name a built "
    "library in FP8CUTLASS_LIBRARY"
)

# What kernels that pack read: positions in SourceType of csrc/registry.h.
SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 2}

Properties = tuple[tuple[int, int], str, int]  # of a card: compute capability, name, multiprocessors

_assumed: ContextVar[Properties | None] = ContextVar("assumed", default=None)
_lock = threading.Lock()
_registered: Path | None = None  # its operators are in torch, whether or not it may be used
_ready: Path | None = None


def find_library() -> Path | None:
    """Return the shared library, or None where there is none. A wrong FP8CUTLASS_LIBRARY is an error.

    One that was found is not looked for again.
    """
    try:
        return _find_library(os.environ.get("FP8CUTLASS_LIBRARY"), PACKAGE_DIR)
    except FileNotFoundError:
        return None


@cache  # not of exceptions: a library that is built later is found
def _find_library(override: str | None, package: Path) -> Path:
    if override:
        if not Path(override).is_file():
            raise UnsupportedError(f"FP8CUTLASS_LIBRARY={override!r} is no file")
        return Path(override).resolve()
    found = sorted(package.glob("_C*.so"))
    if not found:
        raise FileNotFoundError(package)
    return found[0]


def built_dir() -> Path:
    """Return the directory with the manifest and the table of the library; UnsupportedError says what is missing."""
    library = find_library()
    if library is None:
        raise NoKernelError(f"the CUDA kernels are not built: there is no _C*.so in {PACKAGE_DIR}", BUILD_HINT)
    directory = library.parent / "_built"
    for name in TABLES:
        if not (directory / name).is_file():
            raise NoKernelError(f"{library} comes without {directory / name}", BUILD_HINT)
    return directory


@contextmanager
def assume(card: Properties) -> Iterator[None]:
    """Answer for every CUDA device as if it were this card, which need not be here. Nothing can be launched on it."""
    token = _assumed.set(card)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> Properties | None:
    """The card of the enclosing ``assume``, None outside of one."""
    return _assumed.get()


@cache
def _capability(index: int) -> Properties:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.name, properties.multi_processor_count


def _properties(device: torch.device) -> Properties:
    return assumed() or _capability(_index(device))


def size(device: torch.device) -> tuple[int, str]:
    """Multiprocessors and name of a CUDA device."""
    _, name, multiprocessors = _properties(device)
    return multiprocessors, name


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def known_arch(device: torch.device) -> str:
    """Return the architecture whose kernels a CUDA device runs, built or not; UnsupportedError if there are none."""
    capability, name, _ = _properties(device)
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
        name = _properties(device)[1]
        raise NoKernelError(f"{name} ({device}) needs {arch}, the library was built for {', '.join(archs)}", BUILD_HINT)
    return arch


def load() -> None:
    """Register the library's operators, whichever thread comes first.

    Raises UnsupportedError, at each call, where the library does not hold the variants of the manifest beside it (the
    number that dispatch takes from there would run another kernel), where it is for another copy of this package, or
    where another library is loaded already.
    """
    global _registered, _ready
    library = find_library()
    if library is not None and library == _ready:
        return
    manifest = load_manifest(built_dir())  # raises where there is no library
    with _lock:
        if _registered is not None and _registered != library:
            raise UnsupportedError(
                f"{_registered} is loaded and {library} cannot be loaded beside it: a process registers "
                f"torch.ops.{LIBRARY} once; restart the process with FP8CUTLASS_LIBRARY set before the first call"
            )
        if _registered is None:
            torch.ops.load_library(str(library))
            _registered = library
        _compare(str(library), manifest)
        _ready = library


@cache
def call_fields() -> tuple[str, ...]:
    """The names of the numbers that ``fp8cutlass_C.attend`` and its sisters take, in order (csrc/call.def).

    :func:`load` comes first.
    Raises UnsupportedError where the library does not say.
    """
    return _fields("fp8cutlass_call_fields")


@cache
def decode_fields() -> tuple[str, ...]:
    """The same of ``fp8cutlass_C.cut`` and ``decode`` (csrc/decode.def)."""
    return _fields("fp8cutlass_decode_fields")


def _fields(function: str) -> tuple[str, ...]:
    try:
        names = getattr(ctypes.CDLL(str(_registered)), function)
    except AttributeError as error:
        raise UnsupportedError(f"{_registered} does not name the fields of a call: {error}", BUILD_HINT) from error
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split())


@cache
def load_kernels(number: int, device: int, source: torch.dtype | None = None) -> None:
    """Load the code of variant ``number`` on a card, and of the kernel that packs operands of dtype ``source`` for it.

    A launch would do so at its first time, which takes a millisecond and more."""
    load()
    compiled().load(number, device, -1 if source is None else SOURCES[source])


def load_resident(number: int, device: int) -> None:
    """The same for a kernel that keeps K and V in shared memory."""
    load()
    compiled().load_resident(number, device)


def _compare(library: str, manifest: Manifest) -> None:
    """UnsupportedError unless the loaded library holds the variants of ``manifest``, in their order, and launches them
    with the numbers that it lists."""
    loaded = ctypes.CDLL(library)
    path = manifest.directory / "manifest.json"
    try:
        count, name = loaded.fp8cutlass_variant_count, loaded.fp8cutlass_variant_id
        digest, registered = loaded.fp8cutlass_manifest, loaded.fp8cutlass_library
    except AttributeError as error:
        raise UnsupportedError(f"{library} does not say which variants it holds: {error}", BUILD_HINT) from error
    name.restype = digest.restype = registered.restype = ctypes.c_char_p
    if (operators := (registered() or b"").decode()) != LIBRARY:
        raise UnsupportedError(f"{library} has its operators in {operators!r}, this copy of the package in {LIBRARY!r}")
    ids = [(name(number) or b"").decode() for number in range(count())]
    if len(ids) != len(manifest.variants):
        raise UnsupportedError(
            f"{library} holds {len(ids)} variants, {path} lists {len(manifest.variants)}: they are of different builds",
            BUILD_HINT,
        )
    for number, (held, variant) in enumerate(zip(ids, manifest.variants, strict=True)):
        if held != variant.id:
            raise UnsupportedError(
                f"{library} holds {held!r} as variant {number}, {path} lists {variant.id!r}: they are of different "
                "builds",
                BUILD_HINT,
            )
    if (digest() or b"").decode() != hashlib.sha256(path.read_bytes()).hexdigest():
        raise UnsupportedError(f"{library} was built from another {path.name} than {path}", BUILD_HINT)


def name_memory_error(error: RuntimeError) -> None:
    """Raise torch's error where an operator found no memory: the stable ABI has no type for it."""
    if "out of memory" in str(error):
        raise torch.OutOfMemoryError(str(error)) from error
