"""Masks as kernels read them: lists of tiles and bits, and the kernel that packs a boolean mask."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from .._ops import compiled
from ..errors import UnsupportedError
from ..manifest import load_manifest
from . import extension

TILE = 128  # rows, and keys
WORDS = TILE * TILE // 32  # of a tile


class MaskParts(NamedTuple):
    """A mask in lists of tiles (``BlockMask``), contiguous, or a bias, (B, H, Sq, Sk) or sizes of 1; all None where
    there is none."""

    tiles: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    bias: torch.Tensor | None = None


NO_MASK = MaskParts()


def packs(seen: torch.Tensor) -> bool:
    """Whether the kernel packs ``seen``: a plain tensor with elements, on a card that it was built for."""
    if (
        type(seen) is not torch.Tensor
        or seen.device.type != "cuda"
        or not seen.numel()
        or torch.compiler.is_compiling()
    ):
        return False
    try:
        return _built(extension.built_dir(), extension.device_arch(seen.device))
    except UnsupportedError:
        return False


@lru_cache(maxsize=64)
def _built(directory: Path, arch: str) -> bool:
    """A build has it wherever it has kernels that walk lists of tiles."""
    return any(v.kind == "blocks" and arch in v.targets for v in load_manifest(directory).variants)


def pack_mask(seen: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles, counts and bits of ``seen``, (Bm, Hm, rows, keys) bool on a card, any strides, no dimension empty.

    A size of 1 stands for all rows, or for all keys. The numbers are those of ``masks.bits``; nothing is waited for."""
    batch, heads, rows, columns = seen.shape
    row_tiles, key_tiles = -(-rows // TILE), -(-keys // TILE)
    sizes = (batch, heads, row_tiles, key_tiles), (batch, heads, row_tiles)
    tiles, counts = (torch.empty(size, dtype=torch.int32, device=seen.device) for size in sizes)
    shape = (batch, heads, row_tiles, 1 if columns == 1 else key_tiles, WORDS)
    bits = torch.empty(shape, dtype=torch.int32, device=seen.device)
    extension.load()
    compiled().pack_mask(seen, keys, tiles, counts, bits)
    return tiles, counts, bits
