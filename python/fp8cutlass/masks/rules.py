"""Masks that follow from a few numbers: which rows see which keys, made some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..checking import looks_at
from ..errors import UnsupportedError
from .bits import RowsOf

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class Rule(NamedTuple):
    """A mask of these sizes, of which batches, heads and rows are 1 where all have the same."""

    batch: int
    rows: int
    keys: int
    of: RowsOf
    device: torch.device


def whole_numbers(name: str, given: Any, dims: Sequence[int]) -> torch.Tensor:
    """``given`` as (B, ...) int64; UnsupportedError for anything but a tensor of integers with so many dimensions."""
    if not isinstance(given, torch.Tensor):
        raise UnsupportedError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
    if given.dtype not in INTEGERS or given.dim() not in dims:
        raise UnsupportedError(
            f"{name} must be of integers with {' or '.join(map(str, dims))} dimensions, "
            f"got {given.dtype} of shape {tuple(given.shape)}"
        )
    return given.long()


def size(name: str, given: Any) -> int:
    """``given``; UnsupportedError for what is no number of tokens."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)) or given < 0:
        raise UnsupportedError(f"{name} must be a number of tokens, got {given!r}")
    return given  # type: ignore[return-value]


def refuse_values(x: torch.Tensor, name: str, least: int, most: int) -> None:
    """UnsupportedError for values out of range, where the host looks at values (``checking``)."""
    if x.numel() and looks_at(x) and not (least <= int(x.min()) and int(x.max()) <= most):
        raise UnsupportedError(f"{name} must lie in {least}..{most}, got {int(x.min())} to {int(x.max())}")


def _refuse_flag(name: str, given: Any) -> None:
    if not isinstance(given, bool):
        raise UnsupportedError(f"{name} must be True or False, got {given!r}")


def _rows(first: int, last: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, last, device=device)[None, None, :, None]


def _keys(keys: int, device: torch.device) -> torch.Tensor:
    return torch.arange(keys, device=device)[None, None, None]


def padding(lengths: Any, keys: int) -> Rule:
    """Sequence b has ``lengths[b]`` keys."""
    ends, keys = whole_numbers("lengths", lengths, (1,)), size("keys", keys)
    refuse_values(ends, "lengths", 0, keys)
    seen = _keys(keys, ends.device) < ends[:, None, None, None]
    return Rule(ends.shape[0], 1, keys, lambda first, last: seen, ends.device)


def documents(ids: Any, key_ids: Any = None) -> Rule:
    """Rows see the keys of their own document."""
    rows = whole_numbers("ids", ids, (1, 2))
    keys = rows if key_ids is None else whole_numbers("key_ids", key_ids, (1, 2))
    rows, keys = (x[None] if x.dim() == 1 else x for x in (rows, keys))
    if keys.device != rows.device or (1 not in (rows.shape[0], keys.shape[0]) and rows.shape[0] != keys.shape[0]):
        raise UnsupportedError(
            f"ids and key_ids must share batches and device, got {tuple(rows.shape)} on {rows.device} and "
            f"{tuple(keys.shape)} on {keys.device}"
        )
    of = keys[:, None, None]
    return Rule(
        max(rows.shape[0], keys.shape[0]),
        rows.shape[1],
        keys.shape[1],
        lambda first, last: rows[:, None, first:last, None] == of,
        rows.device,
    )


def window(rows: int, keys: int, left: int, right: int, bottom_right: bool, device: Any) -> Rule:
    """Row i sees ``left`` keys before its own and ``right`` after it; -1 for all."""
    rows, keys, at = size("rows", rows), size("keys", keys), torch.device("cpu" if device is None else device)
    _refuse_flag("bottom_right", bottom_right)
    for name, end in (("left", left), ("right", right)):
        if isinstance(end, bool) or not isinstance(end, (int, torch.SymInt)) or end < -1:
            raise UnsupportedError(f"{name} must be an integer from -1 up, got {end!r}")
    shift = keys - rows if bottom_right else 0

    def of(first: int, last: int) -> torch.Tensor:
        own, key = _rows(first, last, at) + shift, _keys(keys, at)
        seen = torch.ones((), dtype=torch.bool, device=at).expand(1, 1, last - first, keys)
        seen = seen if left == -1 else seen & (key >= own - left)
        return seen if right == -1 else seen & (key <= own + right)

    return Rule(1, rows, keys, of, at)


def prefix(lengths: Any, rows: int, keys: int, bottom_right: bool) -> Rule:
    """Rows see the first ``lengths[b]`` keys, and those up to their own."""
    ends, keys = whole_numbers("lengths", lengths, (1,)), size("keys", keys)
    _refuse_flag("bottom_right", bottom_right)
    refuse_values(ends, "lengths", 0, keys)
    shift = keys - size("rows", rows) if bottom_right else 0

    def of(first: int, last: int) -> torch.Tensor:
        key = _keys(keys, ends.device)
        return (key < ends[:, None, None, None]) | (key <= _rows(first, last, ends.device) + shift)

    return Rule(ends.shape[0], rows, keys, of, ends.device)


def tree(parents: Any, keys: int) -> Rule:
    """Row i is node i of a tree, and key ``keys - nodes + i``; it sees all keys before the nodes, itself and its
    ancestors."""
    above = whole_numbers("parents", parents, (1, 2))
    above, keys = above[None] if above.dim() == 1 else above, size("keys", keys)
    batch, nodes = above.shape
    if nodes > keys:
        raise UnsupportedError(f"parents has {nodes} nodes, which are among the keys, got keys={keys}")
    refuse_values(above, "parents", -1, nodes - 1)
    if looks_at(above) and _has_cycle(above):
        raise UnsupportedError("parents has a cycle: a node must not be its own ancestor")
    number = torch.arange(nodes, device=above.device)
    seen = (above[..., None] == number) | (number[:, None] == number)
    reach = 1
    while reach < nodes:  # twice as far with each product
        seen = (seen.float() @ seen.float()) > 0
        reach *= 2
    whole = torch.cat((seen.new_ones(batch, nodes, keys - nodes), seen), 2)[:, None]
    return Rule(batch, nodes, keys, lambda first, last: whole[:, :, first:last], above.device)


def _has_cycle(above: torch.Tensor) -> bool:
    """Whether a node of some tree (B, nodes) has no root above it."""
    far = above
    for _ in range(above.shape[1].bit_length()):  # twice as far up each time
        far = torch.where(far < 0, far, far.gather(1, far.clamp_min(0)))
    return bool((far >= 0).any())


def of_blocks(bitmap: torch.Tensor, block: tuple[int, int], rows: int, keys: int) -> RowsOf:
    """A row sees the keys of the blocks that ``bitmap``, (B, H, row blocks, key blocks) bool, has for its own."""
    of_key = torch.arange(keys, device=bitmap.device) // block[1]

    def of(first: int, last: int) -> torch.Tensor:
        of_row = torch.arange(first, last, device=bitmap.device) // block[0]
        return bitmap[:, :, of_row][..., of_key]

    return of


def mask_mod(function: Callable[..., Any], batch: int, heads: int, keys: int, device: torch.device) -> RowsOf:
    """What a ``mask_mod`` of FlexAttention says of every (b, h, row, key)."""
    each = function
    for axis in (3, 2, 1, 0):
        each = torch.vmap(each, in_dims=tuple(0 if i == axis else None for i in range(4)))
    numbers = [torch.arange(n, device=device) for n in (batch, heads, keys)]

    def of(first: int, last: int) -> torch.Tensor:
        return each(numbers[0], numbers[1], torch.arange(first, last, device=device), numbers[2])

    return of
