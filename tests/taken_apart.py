"""One source taken apart as the gates take many, and disassemblies that are written in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codegen.gates import compile as gates
from codegen.gates.sass import INSTRUCTION_BYTES, functions, parse
from codegen.gates.subject import Kernel, Listing, Measured
from codegen.gates.toolbox import Toolbox
from scripts.cubins import CompileError


def measure(kernels: Sequence[Kernel], tools: Toolbox, folder: Path) -> list[Measured]:
    """What was measured of kernels that share a source. Raises CompileError."""
    (found,) = gates.measure([kernels], tools, folder)
    if isinstance(found, CompileError):
        raise found
    return found


def listing(text: str, *names: str, entry: str = "") -> Listing:
    """Of functions of these names, as many instructions each, which end where the text does."""
    size = INSTRUCTION_BYTES * text.count(";") // len(names)
    return parse(functions(text, [(name, size) for name in names]), entry)
