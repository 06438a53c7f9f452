"""``BlockMask``: a mask that is packed once and read by many calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from . import blocks, rules
from .bits import TILE, WORDS, Packed, listed, lists, pack, pack_rows, tiles_of, unexpanded, unlisted, unpack


class Counted(NamedTuple):
    """How many tiles of 128 rows and 128 keys nobody sees, how many are seen in part, and how many whole."""

    skipped: int
    part: int
    whole: int


@dataclass(frozen=True, repr=False, eq=False)
class BlockMask:
    """Which keys rows see, as ``attention`` takes it for ``attn_mask``: of each 128 rows the blocks of 128 keys that
    they visit, and a bit for each row and key of the blocks that are seen in part. All others are skipped.

    It is made by one of the functions below, on the device of their tensors, and nothing is waited for. It may be used
    for every layer and step, and moved by ``to``. Batches, heads and rows that share a mask share its memory.
    ``a & b`` has what both see, ``a | b`` what one of them does.

    It is a node of torch's pytrees, whose leaves are its tensors, and ``torch.load`` reads it with its defaults.
    """

    tiles: torch.Tensor  # (Bm, Hm, R, key tiles) int32, see masks/bits.py
    counts: torch.Tensor  # (Bm, Hm, R) int32
    bits: torch.Tensor | None  # (Bm, Hm, R, K, 512) int32; None where blocks are seen whole
    extent: torch.Tensor  # (rows, keys, 0): sizes, in a form that torch.compile traces like those of other tensors

    @classmethod
    def _of(cls, packed: Packed, rows: int, keys: int) -> BlockMask:
        return cls(packed.tiles, packed.counts, packed.bits, packed.tiles.new_empty((rows, keys, 0)))

    @classmethod
    def _by(cls, rule: rules.Rule) -> BlockMask:
        return cls._of(pack_rows(rule.of, rule.rows, rule.keys, rule.batch * rule.keys), rule.rows, rule.keys)

    @classmethod
    def from_dense(cls, mask: torch.Tensor, keys: int | None = None) -> BlockMask:
        """Of a boolean tensor with 1 to 4 dimensions, True where a row sees a key: ((((batch,) heads,) rows,) keys).

        Sizes of 1, and axes along which it is expanded, stay so: one row stands for all. ``keys`` is needed where the
        last size is 1 and there are more keys.
        """
        if isinstance(mask, torch.Tensor) and (mask.is_nested or mask.layout != torch.strided):
            raise UnsupportedError(
                f"mask must be a dense tensor, got a {'nested' if mask.is_nested else mask.layout} one"
            )
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not 1 <= mask.dim() <= 4:
            given = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask)
            raise UnsupportedError(f"mask must be a boolean tensor with 1 to 4 dimensions, got {given}")
        keys = mask.shape[-1] if keys is None else rules.size("keys", keys)
        if mask.shape[-1] != 1 and mask.shape[-1] != keys:
            raise UnsupportedError(f"mask has {mask.shape[-1]} keys, got keys={keys}")
        mask = unexpanded(mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape))
        return cls._of(pack(mask, keys), mask.shape[2], keys)

    @classmethod
    def padding(cls, lengths: torch.Tensor, keys: int) -> BlockMask:
        """All rows of sequence b see its first ``lengths[b]`` keys: (B,) integers in 0..keys."""
        return cls._by(rules.padding(lengths, keys))

    @classmethod
    def documents(cls, ids: torch.Tensor, key_ids: torch.Tensor | None = None) -> BlockMask:
        """Rows see the keys with their own number: ``ids`` (S,) or (B, S), integers; ``key_ids`` where they differ."""
        return cls._by(rules.documents(ids, key_ids))

    @classmethod
    def window(
        cls,
        rows: int,
        keys: int,
        left: int = -1,
        right: int = -1,
        *,
        bottom_right: bool = False,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Row i sees ``left`` keys before its own and ``right`` after it, -1 for all: key i, or with ``bottom_right``
        key ``i + keys - rows``, is its own. ``right=0`` is a causal mask."""
        return cls._by(rules.window(rows, keys, left, right, bottom_right, device))

    @classmethod
    def prefix(cls, lengths: torch.Tensor, rows: int, keys: int, *, bottom_right: bool = False) -> BlockMask:
        """Rows of sequence b see its first ``lengths[b]`` keys, (B,) integers, and all keys up to their own."""
        return cls._by(rules.prefix(lengths, rows, keys, bottom_right))

    @classmethod
    def tree(cls, parents: torch.Tensor, keys: int) -> BlockMask:
        """Row i sees itself, its ancestors, and all keys before the nodes of the tree, which are the last keys.

        ``parents`` is (nodes,) or (B, nodes): integers, -1 for a root.
        """
        return cls._by(rules.tree(parents, keys))

    @classmethod
    def blocks(cls, bitmap: torch.Tensor, rows: int, keys: int, block: int | tuple[int, int] = TILE) -> BlockMask:
        """Block-sparse: ``bitmap`` ((batch, heads,) ceil(rows / block), ceil(keys / block)) bool, True for a block of
        rows and keys that is seen. Blocks of multiples of 128 need no bits."""
        packed, rows_of = blocks.of_bitmap(bitmap, blocks.block_sizes(block), rows, keys)
        return cls._of(packed, rows_of, keys)

    @classmethod
    def block_lists(
        cls, indices: torch.Tensor, counts: torch.Tensor, rows: int, keys: int, block: int | tuple[int, int] = TILE
    ) -> BlockMask:
        """The same of lists: the first ``counts``, ((batch, heads,) row blocks), of ``indices``, (..., row blocks, N),
        are the numbers of the key blocks that a block of rows sees, in any order. A number out of range is refused on
        the CPU, and on a card with FP8CUTLASS_CHECK=1; else it means no block."""
        sizes = blocks.block_sizes(block)
        across = (rules.size("keys", keys) + sizes[1] - 1) // sizes[1]
        packed, rows_of = blocks.of_bitmap(blocks.bitmap_of(indices, counts, across), sizes, rows, keys)
        return cls._of(packed, rows_of, keys)

    @classmethod
    def flex(cls, mask: Any) -> BlockMask:
        """Of a ``torch.nn.attention.flex_attention.BlockMask``; its ``mask_mod`` becomes bits."""
        return cls._of(*blocks.of_flex(mask))

    @property
    def rows(self) -> int:
        """1 where all rows see the same keys."""
        return self.extent.shape[0]

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.extent.shape[1]

    @property
    def shape(self) -> torch.Size:
        """(batch, heads, rows, keys), 1 for what is the same for all."""
        return torch.Size((*self.tiles.shape[:2], *self.extent.shape[:2]))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.tiles.device

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockMask:
        """The same on another device."""
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()}
        return replace(self, **moved)

    def dense(self) -> torch.Tensor:
        """(batch, heads, rows, keys) bool."""
        bits = self._bits()
        return unpack(bits.expand(*bits.shape[:3], tiles_of(self.keys), WORDS))[:, :, : self.rows, : self.keys]

    def visited(self) -> torch.Tensor:
        """(batch, heads, R, key tiles) bool: the blocks of 128 keys that 128 rows visit. R is 1 where rows are."""
        return unlisted(self.tiles, self.counts)[0]

    def counted(self) -> Counted:
        """How many tiles are skipped, seen in part and whole, of those in memory. This waits for the device."""
        some, part = unlisted(self.tiles, self.counts)
        visited, parts = int(some.sum()), int(part.sum())
        return Counted(some.numel() - visited, parts, visited - parts)

    def _bits(self) -> torch.Tensor:
        if self.bits is not None:
            return self.bits
        return torch.where(self.visited(), -1, 0).to(torch.int32)[..., None].expand(*self.tiles.shape, WORDS)

    def _joined(self, other: Any, both: bool) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        sizes = [(x, y) for x, y in zip(self.shape[:3], other.shape[:3], strict=True) if x != y]
        if self.keys != other.keys or self.device != other.device or any(1 not in pair for pair in sizes):
            raise UnsupportedError(
                f"masks must broadcast to one shape, with equal keys, on one device, got {tuple(self.shape)} on "
                f"{self.device} and {tuple(other.shape)} on {other.device}"
            )
        rows, keys = max(self.rows, other.rows), self.keys
        if self.bits is None and other.bits is None:
            some, more = self.visited(), other.visited()
            some = some & more if both else some | more
            return self._of(Packed(None, *lists(some, torch.zeros_like(some))), rows, keys)
        bits = self._bits() & other._bits() if both else self._bits() | other._bits()
        return self._of(Packed(bits, *listed(bits, rows, keys)), rows, keys)

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, both=True)

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._joined(other, both=False)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for name in LEAVES if (x := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        size = sum(x.numel() * x.element_size() for x in self._tensors().values())
        return f"BlockMask({tuple(self.shape)}, {self.device}, {'no bits, ' * (self.bits is None)}{size} bytes)"


LEAVES = ("tiles", "counts", "extent", "bits")


def _flatten(mask: BlockMask) -> tuple[list[Any], tuple[str, ...]]:
    found = mask._tensors()
    return list(found.values()), tuple(found)


def _flatten_with_keys(mask: BlockMask) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
    leaves, names = _flatten(mask)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(names, leaves, strict=True)], names


def _unflatten(leaves: Any, names: tuple[str, ...]) -> BlockMask:
    return BlockMask(**dict.fromkeys(LEAVES) | dict(zip(names, leaves, strict=True)))  # type: ignore[arg-type]


pytree.register_pytree_node(
    BlockMask,
    _flatten,
    _unflatten,
    serialized_type_name=f"{__name__.partition('.')[0]}.{BlockMask.__name__}",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([BlockMask])
