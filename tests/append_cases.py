"""Calls of append, with everything that can vary, and what the torch operations make of them."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8cutlass import PagedKVCache
from fp8cutlass.cache.write import E4M3
from fp8cutlass.call.kvappend import places
from fp8cutlass.native.append import Slots, Table
from fp8cutlass.quant.rope import rope

Turn = tuple[torch.Tensor, torch.Tensor, bool]


@dataclass
class Case:
    """A call, on the CPU: tokens k and v, and the cache that they go to, whose pages hold older tokens and poison."""

    cache: PagedKVCache
    k: torch.Tensor
    v: torch.Tensor
    at: Slots | Table
    turn: Turn | None = None
    descales: tuple[torch.Tensor, torch.Tensor] | None = None  # else those of the cache
    layer: int = 0

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.descales is not None:
            return self.descales
        found = self.cache.k_descale[self.layer], self.cache.v_descale[self.layer]
        if isinstance(self.at, Slots):
            return found
        sequences = len(self.at.lengths)
        return found[0].expand(sequences, -1), found[1].expand(sequences, -1)

    def slots(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Of the specification: slots, positions, and the row of the descales, of each token."""
        if isinstance(self.at, Slots):
            return self.at.slots, self.at.positions, torch.arange(len(self.k))
        size, table = self.cache.page_size, self.at.page_table
        sequence, number, there = places(self.at.cu, len(self.k))
        position = self.at.lengths.long()[sequence] + number
        column = position // size
        there = there & (position >= 0) & (column < table.shape[1])
        page = table.long()[sequence, column.clamp(0, table.shape[1] - 1)]
        there = there & (page >= 0) & (page < self.cache.num_pages)
        return torch.where(there, page * size + position % size, -1), position, sequence

    def wanted(self) -> bytes:
        """All bytes of the cache after torch operations have appended, which find the places here."""
        cache, k = copy.deepcopy(self.cache), self.k
        slots, positions, rows = self.slots()
        if self.turn is not None and positions is not None:
            k = rope(k, *self.turn[:2], positions, self.turn[2])
        k_descale, v_descale = (d[rows] if d.dim() == 2 else d for d in self.given())
        cache.write(k, self.v, slots, self.layer, (k_descale, v_descale))
        return everything(cache)

    def found(self, launch: Callable[[Case, PagedKVCache], Any]) -> bytes:
        cache = copy.deepcopy(self.cache)
        launch(self, cache)
        return everything(cache)


def everything(cache: PagedKVCache) -> bytes:
    """The bytes of a cache and what lies around its views."""
    rooms = cache._rooms() if cache.pages is None else [cache.pages]
    stored = {x.untyped_storage().data_ptr(): x.cpu().untyped_storage() for x in rooms}
    return b"".join(ctypes.string_at(x.data_ptr(), x.nbytes()) for x in stored.values())


def odd(x: torch.Tensor, seed: int) -> torch.Tensor:
    """The same with rows of zeros, infinities, NaN, denormals and the largest numbers in some places."""
    random = torch.Generator().manual_seed(seed)
    flat = x.view(-1)
    info = torch.finfo(x.dtype)
    odd_ones = [torch.inf, -torch.inf, torch.nan, info.tiny / 4, -info.smallest_normal, info.max, -0.0, info.min]
    for value in odd_ones:
        flat[torch.randint(len(flat), (2,), generator=random)] = value
    x[0, 0] = 0.0
    x[-1, -1] = info.tiny / 2
    return x


def draw(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int, strange: bool = True) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, head_dim, generator=random) * torch.exp2(
        torch.randint(-6, 7, (tokens, heads, 1), generator=random).float()
    )
    x = x.to(dtype) if dtype == E4M3 or not strange else odd(x.to(dtype), seed)
    return x


def new_cache(head_dim: int, heads: int = 2, pages: int = 9, page_size: int = 16, **more: Any) -> PagedKVCache:
    """Pages with older tokens in half of their slots, and poison in the others; descales of V are no poison."""
    if more.get("format", "native") != "native":
        more = {"k_descale": torch.linspace(0.01, 2.0, heads), "v_descale": torch.linspace(0.5, 0.02, heads)} | more
    cache = PagedKVCache(pages, heads, head_dim, page_size, layers=2, **more)
    assert cache.pages is not None
    random = torch.Generator().manual_seed(7)
    for layer in range(2):
        views = cache.views(layer)
        for x in (views.k, views.v):
            x.copy_(torch.randint(0, 256, x.shape, generator=random, dtype=torch.uint8))
        if views.k_descale is not None and views.v_descale is not None:
            views.k_descale.fill_(torch.nan)
            views.v_descale.copy_(torch.exp2(torch.randint(-12, 1, views.v_descale.shape, generator=random).float()))
    return cache


def angles(rows: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(rows)[:, None] * torch.exp2(-torch.arange(half) / 3.0)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def spread(tokens: int, slots: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Slots in any order, some twice, some -1, some far outside."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randint(0, slots, (tokens,), generator=random)
    for i, wrong in enumerate((-1, slots, 2**31 - 1, -(2**31), 2**40 if dtype == torch.int64 else -7)):
        at[(5 * i + 3) % tokens] = wrong
    return at.to(dtype)


LENGTHS, NEW = (30, 0, 16, 5, 47), (3, 20, 0, 1, 17)


def table_of(pages: int, page_size: int, lengths: Any = LENGTHS, new: Any = NEW, seed: int = 3) -> Table:
    """A page table whose unused entries lie."""
    random = torch.Generator().manual_seed(seed)
    used = [-(-(n + m) // page_size) for n, m in zip(lengths, new, strict=True)]
    order = iter(torch.randperm(pages, generator=random).tolist())
    table = torch.full((len(used), max(used) + 1), 10**9, dtype=torch.int32)
    table[:, -1] = -5
    for row, count in zip(table, used, strict=True):
        for i in range(count):
            row[i] = next(order)
    ends = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    return Table(ends, torch.tensor(lengths, dtype=torch.int32), table)


def cases() -> dict[str, Case]:
    """Of each kind one."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    made: dict[str, Case] = {}

    def slots(
        name: str, head_dim: int, dtype: torch.dtype, tokens: int = 40, turn: Turn | None = None, **more: Any
    ) -> None:
        cache, wide = new_cache(head_dim, **more), torch.int64 if len(made) % 2 else torch.int32
        at = spread(tokens, cache.num_pages * cache.page_size, len(made), wide)
        positions = None if turn is None else torch.arange(tokens, dtype=wide) * 3 - 2
        k, v = (draw(tokens, cache.kv_heads, head_dim, dtype, s) for s in (len(made), 100 + len(made)))
        made[name] = Case(cache, k, v, Slots(at, positions), turn, layer=len(made) % 2)

    def table(name: str, head_dim: int, dtype: torch.dtype, turn: Turn | None = None, **more: Any) -> None:
        cache = new_cache(head_dim, pages=20, **more)
        at, tokens = table_of(20, cache.page_size), sum(NEW)
        k, v = (draw(tokens, cache.kv_heads, head_dim, dtype, s) for s in (len(made), 100 + len(made)))
        made[name] = Case(cache, k, v, at, turn, layer=len(made) % 2)

    for dtype in (bf16, fp16, fp32):
        slots(f"native {dtype}", 128, dtype)
        slots(f"pow2 {dtype}", 64, dtype, v_scale="pow2")
    for layout in ("nhd", "hnd"):
        slots(layout, 96, bf16, format=layout)
        slots(f"{layout} e4m3", 64, E4M3, format=layout)
        slots(f"{layout}, one token a page", 64, fp16, format=layout, page_size=1, pages=40)
    for head_dim in (16, 32, 48, 64, 96, 128, 192, 256):
        mean = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(head_dim))
        slots(f"rotated {head_dim}", head_dim, fp16, hadamard=True)
        slots(f"rotated {head_dim} less a mean", head_dim, bf16, hadamard=True, k_mean=mean)
    slots("less a mean", 80, fp32, k_mean=torch.linspace(-3, 3, 160).view(2, 80))
    for interleaved in (True, False):
        for half in (8, 24, 32, 64):
            slots(f"turned {2 * half} {interleaved}", 128, bf16 if half % 16 else fp16,
                  turn=(*angles(60, half), interleaved))  # fmt: skip
        slots(f"turned fp32 {interleaved}", 64, fp32, turn=(*angles(200, 32, fp16), interleaved))
        slots(f"turned and all {interleaved}", 64, bf16, turn=(*angles(200, 16, bf16), interleaved), hadamard=True,
              k_mean=torch.linspace(-3, 3, 128).view(2, 64), v_scale="pow2")  # fmt: skip
    slots("one head of 16", 16, bf16, heads=1, tokens=300, pages=30)
    slots("one token", 128, bf16, heads=8, tokens=1)
    slots("all in a page", 64, bf16, tokens=90, pages=1, v_scale="pow2")
    table("table", 128, bf16)
    table("table pow2", 64, fp16, v_scale="pow2")
    table("table hnd", 64, fp32, format="hnd", heads=3)
    table("table turned", 64, bf16, turn=(*angles(40, 16), False), hadamard=True)
    table("table of pages of 32, pow2, turned", 96, bf16, turn=(*angles(99, 48), True), page_size=32, v_scale="pow2")
    return made
