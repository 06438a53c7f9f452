"""The repository, where this package runs out of it or beside it: the benchmarks and the discovery of compilers are
there and are not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ..manifest import PACKAGE_DIR

MARKS = ("benchmarks/__main__.py", "scripts/toolchain.py", "python/fp8cutlass/__init__.py")


def repository() -> Path | None:
    """The checkout that this package is part of, else the first on Python's path (with ``python -m`` the working
    directory is on it)."""
    candidates = [PACKAGE_DIR.parent.parent, *(Path(entry or ".").resolve() for entry in sys.path)]
    return next((path for path in candidates if all((path / mark).is_file() for mark in MARKS)), None)


def toolchain(root: Path) -> ModuleType:
    """``scripts/toolchain.py`` of a checkout: where a build looks for nvcc and headers. It needs no torch."""
    name = "fp8cutlass_toolchain"
    spec = importlib.util.spec_from_file_location(name, root / "scripts" / "toolchain.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{root / 'scripts' / 'toolchain.py'} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
