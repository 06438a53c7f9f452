"""What follows from the generator's files alone and takes seconds to work out, kept between processes in build/kept.

A file there is named by a digest of all that it follows from, so that nothing in it can be out of date. Without a
folder that can be written everything is worked out again.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from os import getpid
from pathlib import Path
from typing import TypeVar, cast

from codegen import evidence

Value = TypeVar("Value")

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "kept"
SOURCES = ("codegen/**/*.py", "templates/**/*.j2")
MOST = 8  # files; the oldest goes


@cache
def _of_sources() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def kept(name: str, make: Callable[[], Value]) -> Value:
    """What ``make`` returns, which follows from the sources and what was measured."""
    digest = hashlib.sha256((_of_sources() + evidence.digest()).encode()).hexdigest()[:16]
    path = FOLDER / f"{name}-{digest}.pickle"
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        return cast(Value, _read(path))
    value = make()
    with suppress(OSError):
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{getpid()}")
        partial.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        partial.replace(path)
        for old in sorted(FOLDER.glob("*.pickle"), key=lambda p: p.stat().st_mtime)[:-MOST]:
            old.unlink()
    return value


def _read(path: Path) -> object:
    """Without the collector, which would look at every object again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return pickle.loads(path.read_bytes())
    finally:
        if enabled:
            gc.enable()
