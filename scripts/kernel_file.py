"""A file of cubins, which the extension loads kernels from (csrc/kernel_file.cpp): `kernels-<target>.bin`.

Lines of text, ended by an empty one, then the cubins:

    fp8cutlass kernels 1
    target sm90a
    build <64 hex digits>                      what the library must have been built with, too
    <id> <offset> <bytes> <SHA-256>            a line for each source; offsets count from the file's first byte
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FORMAT = "fp8cutlass kernels 1"
ALIGNMENT = 64  # of a cubin


def name_of(target: str) -> str:
    """How the file of a target is called."""
    return f"kernels-{target}.bin"


@dataclass(frozen=True, kw_only=True)
class KernelFile:
    """What a file holds. cubins: by the id of their source."""

    target: str
    build: str
    cubins: dict[str, bytes]


def _up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def pack(target: str, build: str, cubins: Mapping[str, bytes]) -> bytes:
    """The file's bytes."""

    def head(begin: int) -> bytes:
        lines = [FORMAT, f"target {target}", f"build {build}"]
        for name, code in cubins.items():
            # Of fixed width, so that the head's length does not depend on where the cubins lie.
            lines.append(f"{name} {begin:012d} {len(code):010d} {hashlib.sha256(code).hexdigest()}")
            begin = _up(begin + len(code))
        return ("\n".join(lines) + "\n\n").encode()

    begin = _up(len(head(0)))
    parts = [head(begin).ljust(begin, b"\0")]
    parts += [code.ljust(_up(len(code)), b"\0") for code in cubins.values()]
    return b"".join(parts)


def read(path: Path) -> KernelFile:
    """What is in a file. Raises ValueError for one that is none, or is damaged."""
    data = path.read_bytes()
    head, ended, _ = data.partition(b"\n\n")
    lines = head.decode(errors="replace").splitlines()
    if not ended or len(lines) < 3 or lines[0] != FORMAT:
        raise ValueError(f"{path} is no file of kernels in the format {FORMAT!r}")
    cubins = {}
    for line in lines[3:]:
        name, offset, size, digest = line.split()
        cubins[name] = data[int(offset) : int(offset) + int(size)]
        if hashlib.sha256(cubins[name]).hexdigest() != digest:
            raise ValueError(f"{path} is damaged: kernel {name} has another SHA-256")
    return KernelFile(target=lines[1].removeprefix("target "), build=lines[2].removeprefix("build "), cubins=cubins)
