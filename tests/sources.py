"""Sources of kernels, as the generator renders them: generated/ shows only some."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from codegen.render import environment, render_kernel
from codegen.variant import parse_id


@cache
def source_of(variant_id: str) -> str:
    """The whole source of a kernel."""
    return render_kernel(parse_id(variant_id), environment())


def write_source(variant_id: str, folder: Path) -> Path:
    """The source of a kernel as a file in a folder."""
    path = folder / f"{variant_id}.cu"
    path.write_text(source_of(variant_id))
    return path
