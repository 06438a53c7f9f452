"""Boolean masks as tiles of TILE x TILE bits, and as lists of the tiles that are seen.

A tile lies in the order of the accumulators of a warpgroup's product, which is also that of ``mma.sync``: 8 warps of 16
rows, in a warp 32 lanes, of a lane two words. Lane ``4 g + q`` has rows g and g + 8. Bit ``2 n + c`` of a row's word
stands for the key ``8 n + 2 q + c`` of the tile. So a thread of a kernel reads its bits of a tile at once, in 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..native.masks import TILE, WORDS, pack_mask, packs

MOST_CELLS = 1 << 26  # of a boolean mask that are looked at together: a byte each, and as many again of temporaries

# Which of the rows `first` to `last` - 1 see which keys: (Bm, Hm, last - first, keys) bool, sizes of 1 for whatever is
# the same along an axis.
RowsOf = Callable[[int, int], torch.Tensor]


class Packed(NamedTuple):
    """A mask in tiles. Bm, Hm and R are 1 where batches, heads or rows have one mask; so is K of ``bits``."""

    bits: torch.Tensor | None  # (Bm, Hm, R, K, WORDS) int32; None where every tile that is visited is seen whole
    tiles: torch.Tensor  # (Bm, Hm, R, key tiles) int32: 2 * tile + (1 if in part), ascending; past the count 0
    counts: torch.Tensor  # (Bm, Hm, R) int32: tiles that rows visit


def tiles_of(size: int) -> int:
    """How many tiles rows or keys make."""
    return (size + TILE - 1) // TILE


def pack(seen: torch.Tensor, keys: int) -> Packed:
    """Tiles of ``seen``, (Bm, Hm, rows, keys) bool; a size of 1 stands for all rows, or for all keys.

    No value is waited for.
    """
    batch, heads, rows, columns = seen.shape
    if packs(seen):
        return _packed(seen, rows, keys)
    return pack_rows(lambda first, last: seen[:, :, first:last], rows, keys, batch * heads * columns)


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    """``x`` with size 1 along each axis on which it is expanded."""
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


def pack_rows(seen: RowsOf, rows: int, keys: int, cells: int) -> Packed:
    """The same of a mask that is made some rows at a time, a row of which has ``cells`` elements."""
    step = rows
    if not torch.compiler.is_compiling():
        step = max(1, MOST_CELLS // (TILE * max(1, cells))) * TILE
    if rows <= step:
        return _packed(seen(0, rows), rows, keys)
    ends = ((start, min(start + step, rows)) for start in range(0, rows, step))
    made = [_packed(seen(start, end), end - start, keys) for start, end in ends]
    return Packed(*(torch.cat(parts, 2) for parts in zip(*made, strict=True)))


def _packed(seen: torch.Tensor, rows: int, keys: int) -> Packed:
    """A mask of so many rows, in one piece."""
    if packs(seen):
        tiles, counts, bits = pack_mask(seen, keys)
    else:
        bits = _words(seen)
        tiles, counts = listed(bits, rows, keys)
    return Packed(bits, tiles, counts)


def _words(seen: torch.Tensor) -> torch.Tensor:
    """(Bm, Hm, row tiles, key tiles, WORDS) int32 of (Bm, Hm, rows, keys) bool; past the ends bits are 0."""
    batch, heads, rows, keys = seen.shape
    if rows == 1:
        seen, rows = seen.expand(batch, heads, TILE, keys), TILE
    if keys == 1:
        seen, keys = seen.expand(batch, heads, rows, TILE), TILE
    row_tiles, key_tiles = tiles_of(rows), tiles_of(keys)
    seen = F.pad(seen, (0, key_tiles * TILE - keys, 0, row_tiles * TILE - rows))
    # batch, head, row tile, warp, half, group, key tile, block of 8 keys, lane of 4, key of 2
    cells = seen.reshape(batch, heads, row_tiles, 8, 2, 8, key_tiles, 16, 4, 2)
    cells = cells.permute(0, 1, 2, 6, 3, 5, 8, 4, 7, 9).reshape(batch, heads, row_tiles, key_tiles, WORDS, 4, 8)
    # Made on the device: a capture takes no copy from the host.
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=seen.device)
    return (cells.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8).view(torch.int32).squeeze(-1)


def unpack(bits: torch.Tensor) -> torch.Tensor:
    """(Bm, Hm, R * TILE, K * TILE) bool of (Bm, Hm, R, K, WORDS) int32."""
    batch, heads, row_tiles, key_tiles, _ = bits.shape
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    cells = (bits[..., None] >> places & 1).bool()
    cells = cells.reshape(batch, heads, row_tiles, key_tiles, 8, 8, 4, 2, 16, 2)
    cells = cells.permute(0, 1, 2, 4, 7, 5, 3, 8, 6, 9)
    return cells.reshape(batch, heads, row_tiles * TILE, key_tiles * TILE)


def listed(bits: torch.Tensor, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``tiles`` and ``counts`` of a mask by its bits. What lies past an end makes no tile one that is seen in part."""
    some, words = (bits != 0).any(-1), bits
    if rows != 1:
        words = words | _words(_past(rows, bits).view(1, 1, -1, 1))
    words = words | _words(_past(keys, bits).view(1, 1, 1, -1))
    whole = (words == -1).all(-1)
    return lists(some.expand_as(whole), ~whole)


def _past(size: int, bits: torch.Tensor) -> torch.Tensor:
    """Of the places in whole tiles, which lie past the end, (tiles * TILE,) bool."""
    return torch.arange(tiles_of(size) * TILE, device=bits.device) >= size


def lists(some: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``tiles`` and ``counts`` of (Bm, Hm, R, key tiles) bool: which tiles are visited, and which of them in part."""
    number = torch.arange(some.shape[3], dtype=torch.int32, device=some.device)
    entries = torch.where(some, 2 * number + part.to(torch.int32), 0)
    order = torch.argsort(~some, dim=-1, stable=True)  # those that are visited first, in their order
    return entries.gather(-1, order).to(torch.int32), some.sum(-1, dtype=torch.int32)


def unlisted(tiles: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo :func:`lists`."""
    valid = torch.arange(tiles.shape[3], device=tiles.device) < counts[..., None]
    place = torch.where(valid, tiles >> 1, tiles.shape[3]).long()  # of what is past the count: one more than there are
    found = tiles.new_zeros((*tiles.shape[:3], tiles.shape[3] + 1), dtype=torch.bool)
    some = found.scatter(-1, place, valid)
    part = found.scatter(-1, place, valid & (tiles & 1).bool())
    return some[..., :-1], part[..., :-1]
