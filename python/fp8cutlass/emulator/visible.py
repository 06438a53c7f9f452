"""What the rows of some heads see, and which tiles of keys they visit: bands beside a diagonal, masks, biases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .softmax import fma

BLOCK = 128  # rows and keys of a tile of a mask, whatever the kernel's
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Mask:
    """Which keys each row sees, and which blocks of BLOCK keys are visited by BLOCK rows. Sizes of 1 broadcast."""

    seen: torch.Tensor  # (B, H, Sq, Sk) bool
    visited: torch.Tensor  # (B, H, ceil(Sq / BLOCK), ceil(Sk / BLOCK)) bool


@dataclass(frozen=True)
class Heads:
    """Sizes of a call, and the groups of a chunk: number ``b * kv_heads + h`` of batch b and KV head h."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    groups: slice

    def of(self, x: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
        """(G, H / Hkv, rows, keys) of a tensor that broadcasts to (B, H, rows, keys)."""
        numbers = torch.arange(self.groups.start, self.groups.stop, device=x.device)
        wide = x.expand(self.batch, self.heads, rows, keys).unflatten(1, (self.kv_heads, self.heads // self.kv_heads))
        return wide[numbers // self.kv_heads, numbers % self.kv_heads]


class Visible:
    """Of a chunk's rows, (G, R), what they see.

    ``offsets``: row i sees keys up to i plus the first, and from i plus the second on; None is no such end. ``end`` is
    one past the last key that any tile of rows looks at, ``begin`` (..., R, 1) the tile of keys that rows begin with.
    """

    def __init__(
        self,
        heads: Heads,
        tile_m: int,
        tile_n: int,
        offsets: tuple[int | None, int | None],
        mask: Mask | None,
        bias: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self.heads, self.tile_n, self.mask, self.bias = heads, tile_n, mask, bias
        self.row = torch.arange(heads.rows, device=device).repeat(heads.heads // heads.kv_heads)[:, None]
        self.last, self.first = offsets
        # One past the last key that the kernel's query tile, not only the row, looks at; the tile that it begins with.
        seen = torch.full_like(self.row, heads.keys)
        self.begin = torch.zeros_like(self.row)
        tile_row = self.row // tile_m * tile_m
        if self.last is not None:
            seen = ((tile_row + tile_m).clamp(max=heads.rows) + self.last).clamp(0, heads.keys)
        if self.first is not None:
            last_tile = (seen - 1).clamp(min=0) // tile_n
            self.begin = torch.minimum((tile_row + self.first).clamp(min=0) // tile_n, last_tile)
        self._seen, self.end = seen, int(seen.max())
        self._visited = None if mask is None else self._of_blocks(mask.visited)
        if self._visited is not None:
            self.begin = self._visited.int().argmax(-1, keepdim=True)  # the first one

    def _of_blocks(self, visited: torch.Tensor) -> torch.Tensor:
        """(G, R, tiles) bool: a tile of keys is visited where one of the blocks is in which it lies."""
        sizes, keys = self.heads, self.heads.keys
        blocks = sizes.of(visited, -(-sizes.rows // BLOCK), -(-keys // BLOCK))
        rows = blocks[:, :, torch.arange(sizes.rows, device=blocks.device) // BLOCK].flatten(1, 2)
        ends = [
            (start // BLOCK, (min(start + self.tile_n, keys) - 1) // BLOCK) for start in range(0, keys, self.tile_n)
        ]
        return torch.stack([rows[..., first : last + 1].any(-1) for first, last in ends], -1)

    def visited(self, tile: int) -> torch.Tensor:
        """Whether rows visit a tile of keys: an unvisited one adds nothing, not even the NaN of 0 * NaN."""
        if self._visited is not None:
            return self._visited[..., tile : tile + 1]
        return (tile * self.tile_n < self._seen) & (self.begin <= tile)

    def _of_keys(self, x: torch.Tensor, start: int, count: int) -> torch.Tensor:
        part = x if x.shape[3] == 1 else x[..., start : start + count]
        return self.heads.of(part, self.heads.rows, count).flatten(1, 2)

    def biased(self, s: torch.Tensor, slope: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the keys from ``start`` on and what makes octaves of them; with a bias they are octaves already."""
        if self.bias is None:
            return s, slope
        octaves = self._of_keys(self.bias, start, s.shape[2]).float() * LOG2E
        return fma(s, slope, octaves.double()), torch.ones_like(slope)

    def hide(self, s: torch.Tensor, start: int) -> torch.Tensor:
        """Scores of the keys from ``start`` on, (G, R, N), -inf where a row does not see the key."""
        key = torch.arange(start, start + s.shape[2], device=s.device)
        if self.last is not None:
            s = s.masked_fill(key > self.row + self.last, -torch.inf)
        if self.first is not None:
            s = s.masked_fill(key < self.row + self.first, -torch.inf)
        return s if self.mask is None else s.masked_fill(~self._of_keys(self.mask.seen, start, s.shape[2]), -torch.inf)
