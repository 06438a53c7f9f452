"""Appending by one kernel, where there is one; else torch operations do it (``write``), with the same bytes.

The kernel runs on a card that the extension was built for, outside of torch.compile, for k and v of one dtype, head_dim
up to 256 and pages that :func:`~fp8cutlass.native.append.takes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ..choose.target import target
from ..errors import NoKernelError
from ..manifest import load_manifest
from ..native import append as kernel
from .pages import Pages


@dataclass(frozen=True)
class Launched:
    """The kernel was launched. ``used``: (sequences,) int32, the lengths with the new tokens, of a table."""

    used: torch.Tensor | None


def launch(
    pages: Pages,
    k: torch.Tensor,
    v: torch.Tensor,
    at: kernel.Slots | kernel.Table,
    descales: tuple[torch.Tensor, torch.Tensor | None],
    change: kernel.Change,
) -> Launched | None:
    """Append k and v (T, Hkv, D); None where torch operations have to. ``descales``: as ``write.append`` has them, or
    (sequences, Hkv) with a table."""
    if not k.shape[0] or torch.compiler.is_compiling() or not _there(k.device):
        return None
    inside = pages.k_descale is not None
    room = kernel.Room(pages.k, pages.v, pages.k_descale, pages.v_descale, None if inside else descales[0], descales[1])
    columns = at.page_table.shape[1] if isinstance(at, kernel.Table) else 1
    if not columns or not kernel.takes(k, v, room, columns):
        return None
    with torch.no_grad():
        return Launched(kernel.append(k, v, room, at, change))


def _there(device: torch.device) -> bool:
    """Whether the extension has the kernel for a device."""
    if device.type != "cuda":
        return False
    try:
        at = target(device)
    except NoKernelError:
        return False
    return _built(at.directory, at.arch)


@lru_cache(maxsize=64)
def _built(directory: Path, arch: str) -> bool:
    """A build has it wherever it has kernels of decode."""
    return any(d.arch == arch for d in load_manifest(directory).decodes)
