"""Where tokens of a batch stand in their sequences, and where new ones go in the pages. Nothing waits for a device."""

from __future__ import annotations

import torch

from ..cache.checks import check_places
from ..cache.paged import PagedKVCache
from ..checking import looks_at
from ..native.append import Table
from ..quant.rope import rope

Turn = tuple[torch.Tensor, torch.Tensor, bool]  # cos, sin, interleaved


def places(cu: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens (T,): their sequences, their numbers in these, and whether they belong to one. ``cu`` rises."""
    token = torch.arange(tokens, device=cu.device)
    ends = cu[1:].long()
    sequence = torch.searchsorted(ends, token, right=True)
    there = (sequence < len(ends)) & (token >= cu[0])
    sequence = sequence.clamp(max=len(ends) - 1)
    return sequence, token - cu.long()[sequence], there


def positions(cu: torch.Tensor | None, lengths: torch.Tensor, tokens: int, step: int) -> torch.Tensor:
    """Where tokens (T,) stand that begin at the length of their sequence, ``step`` apart. Without ``cu`` all sequences
    have as many; one token each stands at its length."""
    if len(lengths) == 0:
        return torch.zeros(tokens, dtype=torch.int64, device=lengths.device)
    if cu is None:
        each = tokens // len(lengths)
        if each == 1:
            return lengths
        return (lengths.long()[:, None] + step * torch.arange(each, device=lengths.device)).flatten()
    sequence, number, _ = places(cu, tokens)
    return lengths.long()[sequence] + step * number


def turned(
    q: torch.Tensor, cu: torch.Tensor | None, lengths: torch.Tensor, window: tuple[int, int], turn: Turn
) -> torch.Tensor:
    """Queries (T, H, D) turned by where they stand. With ``window`` (-1, -1), where a row sees all keys, all rows of a
    sequence stand at its length, as FlashAttention has it."""
    cos, sin, interleaved = turn
    return rope(q, cos, sin, positions(cu, lengths, len(q), 0 if window == (-1, -1) else 1), interleaved)


def append(
    cache: PagedKVCache,
    tokens: tuple[torch.Tensor, torch.Tensor],
    cu: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    descales: tuple[torch.Tensor, torch.Tensor],
    layer: int,
    turn: Turn | None,
) -> torch.Tensor:
    """Write k and v (T, Hkv, D) behind ``lengths``; return the lengths with them, int32.

    ``descales`` of K and V are (sequences, Hkv). A token whose page is not in the table or not in the cache is not
    written.
    """
    k, v = tokens
    if not len(k) or not len(lengths) or not page_table.shape[1]:
        return lengths + cu.diff()
    # Where numbers are looked at, torch operations write the same bytes.
    done = (
        None if k.is_cuda and looks_at(k) else cache.launch(k, v, Table(cu, lengths, page_table), layer, descales, turn)
    )
    if done is not None and done.used is not None:
        return done.used
    sequence, number, there = places(cu, len(k))
    position = lengths.long()[sequence] + number
    column = position // cache.page_size
    there = there & (position >= 0) & (column < page_table.shape[1])
    page = page_table.long()[sequence, column.clamp(0, page_table.shape[1] - 1)]
    there = there & (page >= 0) & (page < cache.num_pages)
    slots = torch.where(there, page * cache.page_size + position % cache.page_size, -1)
    if looks_at(slots):
        check_places("the slots of k and v", slots, cache.num_pages * cache.page_size, -1)
    if turn is not None:
        cos, sin, interleaved = turn
        k = rope(k, cos, sin, position, interleaved)
    of_token = (descales[0][sequence], descales[1][sequence])
    cache.write(k, v, slots, layer, of_token)
    return lengths + cu.diff()
