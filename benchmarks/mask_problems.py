"""The masks that are timed: each a rule of rows and keys, and the same as a `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp8cutlass import BlockMask

HEADS = (32, 8)
NODES = 64  # of a tree
TILE = 128
# Which keys are seen, of numbers of batch, head, row and key that broadcast.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """``forms`` makes a mask in both forms on a device. ``bias``: nothing is hidden, and a tensor of this type is added
    to the scores of all batches."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    forms: Callable[[torch.device], tuple[Rule, BlockMask]]
    bias: torch.dtype | None = None

    @property
    def label(self) -> str:
        sizes = f"({self.batch}, {self.heads}/{self.kv_heads}, {self.rows}x{self.keys}, {self.head_dim})"
        return f"{self.name} {sizes}"


Forms = Callable[[torch.device], tuple[Rule, BlockMask]]


def everything(tokens: int) -> Forms:
    """Nothing is hidden."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        return lambda b, h, i, j: j >= 0, BlockMask.window(tokens, tokens, device=at)

    return forms


def documents(tokens: int, each: int) -> Forms:
    """Documents of ``each`` tokens, causal."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        ids = torch.arange(tokens, device=at) // each
        mask = BlockMask.documents(ids) & BlockMask.window(tokens, tokens, right=0, device=at)
        return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i), mask

    return forms


def window(tokens: int, size: int) -> Forms:
    """A row's own key and those before it, ``size`` in all."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        mask = BlockMask.window(tokens, tokens, size - 1, 0, device=at)
        return lambda b, h, i, j: (j <= i) & (j > i - size), mask

    return forms


def prefix(tokens: int, first: int) -> Forms:
    """Causal, but for the first keys, which all rows see."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        mask = BlockMask.prefix(torch.full((1,), first, device=at), tokens, tokens)
        return lambda b, h, i, j: (j < first) | (j <= i), mask

    return forms


def tree(keys: int) -> Forms:
    """Draft tokens in a tree, whose nodes have three children each, after keys that all of them see."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        parents = [(node - 1) // 3 if node else -1 for node in range(NODES)]
        seen = torch.eye(NODES, dtype=torch.bool)
        for node, parent in enumerate(parents[1:], 1):
            seen[node] |= seen[parent]
        seen, first = seen.to(at), keys - NODES
        mask = BlockMask.tree(torch.tensor(parents, device=at), keys)
        return lambda b, h, i, j: (j < first) | seen[i, (j - first).clamp(min=0)], mask

    return forms


def padding(batch: int, tokens: int) -> Forms:
    """Lengths of 40% to 100%: 30% of the keys are padding."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        ends = torch.linspace(0.4, 1.0, batch, device=at).mul(tokens).round().long()
        return lambda b, h, i, j: j < ends[b], BlockMask.padding(ends, tokens)

    return forms


def blocks(tokens: int, share: float) -> Forms:
    """Blocks of 128 at random, a ``share`` of each row of blocks."""

    def forms(at: torch.device) -> tuple[Rule, BlockMask]:
        count = -(-tokens // TILE)
        scores = torch.rand(count, count, generator=torch.Generator().manual_seed(count))
        most = scores.topk(max(1, round(share * count)), -1).indices
        seen = torch.zeros(count, count, dtype=torch.bool).scatter_(-1, most, True).to(at)
        return lambda b, h, i, j: seen[i // TILE, j // TILE], BlockMask.blocks(seen, tokens, tokens)

    return forms


def problems(head_dims: Sequence[int], tiny: bool = False) -> list[Problem]:
    """All masks of all head_dims; ``tiny`` ones have few heads and short sequences."""
    shrink, (heads, kv_heads) = (32, (4, 2)) if tiny else (1, HEADS)
    long, longest, cache, padded = (n // shrink for n in (16384, 32768, 8192, 4096))
    span = 1024 // shrink
    made: list[tuple[str, int, int, int, Forms]] = [
        ("nothing is hidden", 1, long, long, everything(long)),
        ("8 documents, causal", 1, long, long, documents(long, long // 8)),
        (f"window of {span}", 1, long, long, window(long, span)),
        (f"prefix of {long // 4}, causal", 1, long, long, prefix(long, long // 4)),
        (f"tree of {NODES} tokens", 8, NODES, cache, tree(cache)),
        ("padding of 30%", 8, padded, padded, padding(8, padded)),
        ("blocks, 25% seen", 1, longest, longest, blocks(longest, 0.25)),
        ("blocks, 50% seen", 1, longest, longest, blocks(longest, 0.5)),
    ]
    found = []
    for head_dim in head_dims:
        found += [
            Problem(name, batch, heads, kv_heads, rows, keys, head_dim, forms)
            for name, batch, rows, keys, forms in made
        ]
        found += [
            Problem(f"bias, {name}", 1, heads, kv_heads, padded, padded, head_dim, everything(padded), dtype)
            for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32))
        ]
    return found
