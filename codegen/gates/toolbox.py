"""What the gates compile and take apart with: the compiler of the extension's build, and nvdisasm."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from scripts import toolchain
from scripts.cubins import Compiler, open_compiler


class ToolboxError(RuntimeError):
    """The gates cannot compile the way the extension build does; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Toolbox(Compiler):
    nvdisasm: Path


def open_toolbox() -> Toolbox:
    """The tools of this machine. Raises ToolboxError naming what is missing and the remedy."""
    try:
        compiler, nvdisasm = open_compiler(), toolchain.find_disassembler("nvdisasm")
    except toolchain.ToolchainError as error:
        raise ToolboxError(str(error)) from error
    return Toolbox(nvdisasm=nvdisasm, **{f.name: getattr(compiler, f.name) for f in fields(Compiler)})
