"""Named sets of attention problems and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

TOKENS = 16384  # batch * seqlen of every grid cell
WIDTH = 2048  # heads * head_dim of every grid cell
GRID_HEAD_DIMS = (64, 128, 256)
GRID_SEQLENS = tuple(512 << step for step in range(6))  # 512 .. 16k


@dataclass(frozen=True, order=True)
class Shape:
    """One forward problem. ``causal`` is top-left aligned, which for equal lengths is every convention."""

    head_dim: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    kv_heads: int

    @property
    def flops(self) -> float:
        """Useful operations: 4 B H Sq Sk D, half of that when causal, whatever a kernel computes beyond."""
        full = 4.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim
        return full / 2 if self.causal else full

    def tflops(self, microseconds: float) -> float:
        return self.flops / microseconds * 1e-6

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        return f"({self.batch}, {heads}, {lengths}, {self.head_dim}) {self.mask}"

    @property
    def in_grid(self) -> bool:
        return self in _GRID


def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Shape:
    """Self-attention: as many keys as queries, a K and V head for each head of Q."""
    return Shape(head_dim, causal, seqlen, seqlen, batch, heads, heads)


def _grid() -> list[Shape]:
    return [
        square(TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, causal)
        for head_dim in GRID_HEAD_DIMS
        for causal in (False, True)
        for seqlen in GRID_SEQLENS
    ]


_GRID = frozenset(_grid())
HISTORY = square(1, 8, 512, 64, False)  # the project's first measured problem: all latency

CELL_HEAD_DIMS = (64, 96, 128, 192, 256)
CELL_SEQLENS = tuple(64 << step for step in range(9))  # 64 .. 16k, a problem for each bucket of the dispatch table
LIGHT_TILES, FEW_TILES = 66, 8  # of 128 rows: half and a sixteenth of what an H200 has multiprocessors


def _cells() -> list[Shape]:
    """What the dispatch table is decided on: few query tiles, light problems, and heavy ones as large as the grid's."""
    found = []
    for head_dim in CELL_HEAD_DIMS:
        for causal in (False, True):
            for seqlen in CELL_SEQLENS:
                queries = min(seqlen, 128 * FEW_TILES)
                if queries == seqlen or not causal:  # aligned at the top left, more keys than queries are never seen
                    heads = max(1, FEW_TILES // -(-queries // 128))
                    found.append(Shape(head_dim, causal, queries, seqlen, 1, heads, heads))
                heads = max(1, LIGHT_TILES // -(-seqlen // 128))
                found.append(square(1, heads, seqlen, head_dim, causal))
                found.append(square(TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, causal))
    return found


SETS: dict[str, Callable[[], list[Shape]]] = {
    "cells": _cells,
    "few": lambda: [s for s in _cells() if s.batch * s.heads * -(-s.seqlen_q // 128) <= FEW_TILES],
    "grid": lambda: [HISTORY, *_grid()],
    "history": lambda: [HISTORY],
    "short": lambda: [HISTORY, *(s for s in _grid() if s.seqlen_k <= 1024)],
}


def select(
    name: str, *, head_dims: Iterable[int] = (), seqlens: Iterable[int] = (), masks: Iterable[str] = ()
) -> list[Shape]:
    """The shapes of a set that pass every filter given; an empty filter passes all."""
    head_dims, seqlens, masks = set(head_dims), set(seqlens), set(masks)
    return [
        shape
        for shape in SETS[name]()
        if (not head_dims or shape.head_dim in head_dims)
        and (not seqlens or shape.seqlen_k in seqlens)
        and (not masks or shape.mask in masks)
    ]
