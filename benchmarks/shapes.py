"""Named sets of attention problems and their arithmetic."""

from __future__ import annotations

import hashlib
import re
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
WAVE_SEQLENS = (128, 512, 2048, 8192)  # the other buckets are next to one of these
SHORT_SEQLENS = (256, 1024, 4096, 16384)
MAX_HEAD_DIM = 256
HELD_OUT = 3  # one in three
WAVE = 66  # tiles of 128 rows that give each multiprocessor of an H200 one of 64
FEW_TILES = 8
SHORT_TILES, SHORT_QUERIES, SHORT_GROUP = 8 * WAVE, 16, 4  # heads, queries of each, heads that share keys


def _spread(head_dim: int, causal: bool, seqlen: int, tiles: int) -> list[Shape]:
    """A problem of about so many tiles of 128 rows: whole heads, or a part of one."""
    queries = min(seqlen, 128 * tiles)
    if causal and queries < seqlen:
        return []  # aligned at the top left, more keys than queries are never seen
    heads = max(1, tiles // -(-queries // 128))
    return [Shape(head_dim, causal, queries, seqlen, 1, heads, heads)]


def _cells() -> list[Shape]:
    """What the dispatch table is decided on: problems of few tiles, of half a wave to four, heavy ones as large as the
    grid's, and short ones."""
    found = []
    for head_dim in CELL_HEAD_DIMS:
        for causal in (False, True):
            for seqlen in CELL_SEQLENS:
                found += _spread(head_dim, causal, seqlen, FEW_TILES)
                if seqlen <= 128 * WAVE:
                    found += _spread(head_dim, causal, seqlen, WAVE)
                found.append(square(TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, causal))
            for seqlen in WAVE_SEQLENS:
                for tiles in (WAVE // 2, 2 * WAVE, 3 * WAVE, 4 * WAVE):
                    found += _spread(head_dim, causal, seqlen, tiles)
        for keys in SHORT_SEQLENS:
            found.append(Shape(head_dim, False, SHORT_QUERIES, keys, 1, SHORT_TILES, SHORT_TILES // SHORT_GROUP))
    return found


_CELLS = frozenset(_cells())


def _llm() -> list[Shape]:
    """Prefill with grouped heads, causal; two lengths are no multiple of a tile."""
    heads = ((1, 64), (1, 32), (4, 32))
    return [
        Shape(128, True, seqlen, seqlen, batch, count, 8)
        for batch, count in heads
        for seqlen in (300, 512, 1024, 2048, 3500, 4096, 8192, 16384)
        if batch * seqlen <= TOKENS
    ]


def _decode() -> list[Shape]:
    """A few new tokens against a cache: 1, and 4 to 16 as speculative decoding has them."""
    caches = ((1, 1024), (1, 8192), (1, 32768), (16, 4096), (64, 2048))
    return [Shape(128, False, new, keys, batch, 32, 8) for batch, keys in caches for new in (1, 4, 16)]


def _diffusion() -> list[Shape]:
    """Diffusion transformers: lengths that no tile divides, no mask."""
    widths = ((64, 24), (64, 30), (128, 24))
    sizes = ((2, 4250), (1, 4250), (1, 17550), (1, 33000))
    return [square(batch, heads, seqlen, head_dim, False) for head_dim, heads in widths for batch, seqlen in sizes]


def _vision() -> list[Shape]:
    """Vision transformers: patches of 224 and 384 pixels, and a class token."""
    return [
        square(batch, heads, seqlen, 64, False) for heads in (12, 16) for seqlen in (197, 577) for batch in (1, 8, 64)
    ]


def _cross() -> list[Shape]:
    """Many queries against the tokens of a prompt."""
    latents = ((64, 2, 20, 1024), (64, 2, 10, 4096), (64, 1, 30, 17550), (128, 1, 24, 4250), (128, 1, 24, 17550))
    return [
        Shape(head_dim, False, queries, keys, batch, heads, heads)
        for head_dim, batch, heads, queries in latents
        for keys in (77, 256, 512)
    ]


def _long() -> list[Shape]:
    """32k to 256k keys: prefill, chunks of 4,096 queries against a long cache, and no mask."""
    prefill = ((32768, 32, 4), (65536, 32, 4), (131072, 8, 1), (262144, 2, 1))
    return [
        *(Shape(128, True, seqlen, seqlen, 1, heads, kv_heads) for seqlen, heads, kv_heads in prefill),
        *(Shape(128, False, 4096, keys, 1, 32, 8) for keys in (32768, 65536, 131072, 262144)),
        *(square(1, 8, seqlen, 64, False) for seqlen in (32768, 65536)),
    ]


NAMED = ("grid", "llm", "decode", "diffusion", "vision", "cross", "long")  # what claims about the choice are made over

SETS: dict[str, Callable[[], list[Shape]]] = {
    "cells": _cells,
    "cross": _cross,
    "decode": _decode,
    "diffusion": _diffusion,
    "few": lambda: [s for s in _cells() if s.batch * s.heads * -(-s.seqlen_q // 128) <= FEW_TILES],
    "grid": lambda: [HISTORY, *_grid()],
    "history": lambda: [HISTORY],
    "llm": _llm,
    "long": _long,
    "named": lambda: select(*NAMED),
    "short": lambda: [HISTORY, *(s for s in _grid() if s.seqlen_k <= 1024)],
    "vision": _vision,
}


def select(
    *names: str,
    extra: Iterable[Shape] = (),
    head_dims: Iterable[int] = (),
    seqlens: Iterable[int] = (),
    masks: Iterable[str] = (),
) -> list[Shape]:
    """The shapes of some sets and ``extra`` ones, each once, that pass every filter given; an empty filter passes
    all."""
    head_dims, seqlens, masks = set(head_dims), set(seqlens), set(masks)
    every = [*(shape for name in names for shape in SETS[name]()), *extra]
    return [
        shape
        for shape in dict.fromkeys(every)
        if (not head_dims or shape.head_dim in head_dims)
        and (not seqlens or shape.seqlen_k in seqlens)
        and (not masks or shape.mask in masks)
    ]


_TEXT = re.compile(
    r"(?P<batch>\d+),(?P<heads>\d+)(?:/(?P<kv_heads>\d+))?,(?P<queries>\d+)(?:x(?P<keys>\d+))?,(?P<head_dim>\d+)"
    r"(?:,(?P<mask>full|causal))?",
    re.ASCII,
)


def parse(text: str) -> Shape:
    """The shape that a text names: ``B,H,S,D``, with H as ``H/Hkv`` and S as ``QUERIESxKEYS`` where they differ, and
    ``,causal`` behind it with a mask. Raises ValueError."""
    match = _TEXT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"{text!r} is not B,H[/HKV],S[xKEYS],D[,causal], such as 1,32/8,4096,128,causal")
    mask = match["mask"]
    sizes = {name: int(value) for name, value in match.groupdict().items() if name != "mask" and value}
    if min(sizes.values()) < 1:
        raise ValueError(f"{text!r}: every size must be at least 1")
    heads, queries = sizes["heads"], sizes["queries"]
    kv_heads = sizes.get("kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{text!r}: {kv_heads} heads of K and V do not divide {heads} of Q")
    if sizes["head_dim"] > MAX_HEAD_DIM:
        raise ValueError(f"{text!r}: head_dim {sizes['head_dim']} is beyond {MAX_HEAD_DIM}")
    keys = sizes.get("keys", queries)
    return Shape(sizes["head_dim"], mask == "causal", queries, keys, sizes["batch"], heads, kv_heads)


def held_out(shape: Shape) -> bool:
    """Whether nothing is ever tuned on this shape: about a third, by a hash, of those that are no cell of the dispatch
    table. A cell is what the table is made of and cannot be left out."""
    if shape in _CELLS:
        return False
    return hashlib.sha256(shape.label.encode()).digest()[0] % HELD_OUT == 0
