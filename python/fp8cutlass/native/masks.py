"""Masks as kernels read them: lists of tiles and bits, and the kernel that packs a boolean mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops import compiled
from . import extension

TILE = 128  # rows, and keys
WORDS = TILE * TILE // 32  # of a tile


class Lists(NamedTuple):
    """A mask in lists of tiles (``BlockMask``), contiguous; all None where there is none."""

    tiles: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bits: torch.Tensor | None = None


NO_LISTS = Lists()


def pack_mask(seen: torch.Tensor, keys: int) -> Lists:
    """The lists of ``seen``, (Bm, Hm, rows, keys) bool on a card, any strides, no dimension empty. A size of 1 stands
    for all rows, or for all keys. The bits are those of ``masks.bits.pack``; nothing is waited for."""
    batch, heads, rows, columns = seen.shape
    row_tiles, key_tiles = -(-rows // TILE), -(-keys // TILE)
    sizes = (batch, heads, row_tiles, key_tiles), (batch, heads, row_tiles)
    tiles, counts = (torch.empty(size, dtype=torch.int32, device=seen.device) for size in sizes)
    shape = (batch, heads, row_tiles, 1 if columns == 1 else key_tiles, WORDS)
    bits = torch.empty(shape, dtype=torch.int32, device=seen.device)
    extension.load()
    compiled().pack_mask(seen, keys, tiles, counts, bits)
    return Lists(tiles, counts, bits)
