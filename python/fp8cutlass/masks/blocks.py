"""Lists and bitmaps of blocks, and the masks of FlexAttention."""

from __future__ import annotations

from typing import Any

import torch

from ..checking import looks_at
from ..errors import UnsupportedError
from . import rules
from .bits import TILE, Packed, RowsOf, lists, pack_rows, tiles_of


def block_sizes(block: Any) -> tuple[int, int]:
    """Rows and keys of a block; UnsupportedError for what is none."""
    sizes = (block, block) if isinstance(block, int) else block
    good = isinstance(sizes, (tuple, list)) and len(sizes) == 2
    if not good or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in sizes):
        raise UnsupportedError(f"block must be the rows and keys of a block, two integers from 1 up, got {block!r}")
    return sizes[0], sizes[1]


def _blocks(size: int, block: int) -> int:
    return (size + block - 1) // block


def of_bitmap(bitmap: Any, block: tuple[int, int], rows: int, keys: int) -> tuple[Packed, int]:
    """The mask of a bitmap, and its rows: 1 where one row of blocks stands for all.

    Without bits where blocks are made of tiles.
    """
    if not isinstance(bitmap, torch.Tensor) or bitmap.dtype != torch.bool or bitmap.dim() > 4 or bitmap.dim() < 2:
        given = f"{bitmap.dtype} of shape {tuple(bitmap.shape)}" if isinstance(bitmap, torch.Tensor) else type(bitmap)
        raise UnsupportedError(f"bitmap must be boolean, ((batch, heads,) rows / block, keys / block), got {given}")
    bitmap = bitmap.reshape(*(1,) * (4 - bitmap.dim()), *bitmap.shape)
    wanted = _blocks(rules.size("rows", rows), block[0]), _blocks(rules.size("keys", keys), block[1])
    if bitmap.shape[2] not in (1, wanted[0]) or bitmap.shape[3] != wanted[1]:
        raise UnsupportedError(
            f"bitmap has {bitmap.shape[2]} x {bitmap.shape[3]} blocks; {rows} rows and {keys} keys in blocks of "
            f"{block[0]} x {block[1]} are {wanted[0]} x {wanted[1]}"
        )
    if bitmap.shape[2] == 1 and wanted[0] != 1:
        rows = 1
    if rows != 1 and block[0] % TILE or block[1] % TILE:
        cells = bitmap.shape[0] * bitmap.shape[1] * keys
        return pack_rows(rules.of_blocks(bitmap, block, rows, keys), rows, keys, cells), rows
    some = bitmap if rows == 1 else bitmap.repeat_interleave(block[0] // TILE, 2)[:, :, : tiles_of(rows)]
    some = some.repeat_interleave(block[1] // TILE, 3)[..., : tiles_of(keys)]
    return Packed(None, *lists(some, torch.zeros_like(some))), rows


def bitmap_of(indices: Any, counts: Any, blocks: int) -> torch.Tensor:
    """(B, H, row blocks, blocks) bool of the first ``counts`` of ``indices`` of each row of blocks, in any order.

    Numbers out of range are refused where the host looks at values (``checking``), else they mean no block.
    """
    at = rules.whole_numbers("indices", indices, (2, 3, 4))
    many = rules.whole_numbers("counts", counts, (1, 2, 3))
    if at.shape[:-1] != many.shape or at.device != many.device:
        raise UnsupportedError(
            f"counts must have the shape of indices without its last dimension, got {tuple(many.shape)} on "
            f"{many.device} for {tuple(at.shape)} on {at.device}"
        )
    rules.refuse_values(many, "counts", 0, at.shape[-1])
    valid = torch.arange(at.shape[-1], device=at.device) < many[..., None]
    if looks_at(at):
        rules.refuse_values(at[valid], "indices", 0, blocks - 1)
    place = torch.where(valid & (at >= 0) & (at < blocks), at, blocks)  # no block: one more than there are
    found = torch.zeros((*at.shape[:-1], blocks + 1), dtype=torch.bool, device=at.device)
    found = found.scatter(-1, place, True)[..., :-1]
    return found.reshape(*(1,) * (4 - found.dim()), *found.shape)


def of_flex(mask: Any) -> tuple[Packed, int, int]:
    """The mask of a ``BlockMask`` of FlexAttention, its rows and its keys."""
    if not hasattr(mask, "kv_num_blocks") or not hasattr(mask, "mask_mod"):
        raise UnsupportedError(f"mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(mask).__name__}")
    rows, keys = mask.seq_lengths
    block, device = tuple(mask.BLOCK_SIZE), mask.kv_indices.device
    if mask.kv_indices.dim() > 4:
        raise UnsupportedError(f"mask must have 4 dimensions, got {mask.kv_indices.dim()}")
    across = _blocks(keys, block[1])
    part = bitmap_of(mask.kv_indices, mask.kv_num_blocks, across)
    full = torch.zeros_like(part)
    if mask.full_kv_indices is not None:
        full = bitmap_of(mask.full_kv_indices, mask.full_kv_num_blocks, across)
    batch, heads = part.shape[:2]
    said = rules.mask_mod(mask.mask_mod, batch, heads, keys, device)
    parts, fulls = (rules.of_blocks(x, block, rows, keys) for x in (part, full))
    of: RowsOf = lambda first, last: fulls(first, last) | (parts(first, last) & said(first, last))  # noqa: E731
    return pack_rows(of, rows, keys, batch * heads * keys), rows, keys
