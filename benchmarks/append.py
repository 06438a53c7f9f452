"""Append to a paged cache alone: the kernel and the torch operations that it replaces, for the tokens of a step of
decode and of a prefill. ``measure`` gives the rows of one number of tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8cutlass import PagedKVCache
from fp8cutlass.native.append import Slots
from fp8cutlass.timing import Capture

from .grid import Settings
from .results import OK, UNAVAILABLE, Timed, first_line
from .turns import checked, in_turns

TOKENS = (1, 32, 128, 2048)
DECODE = 128  # up to so many tokens each is of a sequence of its own
KV_HEADS, HEAD_DIM, PAGE = 8, 128, 64
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "native pow2": {"v_scale": "pow2"},
    "native hadamard": {"hadamard": True},
    "nhd": {"format": "nhd"},
}


@dataclass(frozen=True)
class AppendTime(Timed):
    """What was found of one way to append so many tokens."""

    tokens: int
    kv_heads: int
    head_dim: int
    format: str
    contender: str
    precision: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class AppendData:
    """Random tokens in bf16, their slots, and a cache that has room for them."""

    cache: PagedKVCache
    k: torch.Tensor  # (T, KV_HEADS, HEAD_DIM)
    v: torch.Tensor
    slots: torch.Tensor  # (T,) int64

    @property
    def pages(self) -> torch.Tensor:
        if self.cache.pages is None:
            raise TypeError("the cache is an engine's")
        return self.cache.pages


def make(tokens: int, format: str, device: torch.device | str = "cuda") -> AppendData:
    """Tokens of one sequence that begin at a page, or with ``DECODE`` or fewer each the first of a page of its own."""
    generator = torch.Generator(device).manual_seed(tokens)
    step = PAGE if tokens <= DECODE else 1
    cache = PagedKVCache(-(-tokens * step // PAGE), KV_HEADS, HEAD_DIM, PAGE, device=device, **FORMATS[format])
    shape = (tokens, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    return AppendData(cache, k, v, torch.arange(0, tokens * step, step, device=device))


def by_kernel(data: AppendData) -> torch.Tensor:
    """RuntimeError where torch operations would do it."""
    cache, given = data.cache, (data.cache.k_descale[0], data.cache.v_descale[0])
    if cache.launch(data.k, data.v, Slots(data.slots), 0, given, None) is None:
        raise RuntimeError("the kernel does not take it")
    return data.pages


def by_torch(data: AppendData) -> torch.Tensor:
    data.cache.write(data.k, data.v, data.slots, 0, (data.cache.k_descale[0], data.cache.v_descale[0]))
    return data.pages


WAYS: Mapping[str, Callable[[AppendData], torch.Tensor]] = {"kernel": by_kernel, "torch operations": by_torch}


def different(wanted: torch.Tensor, out: torch.Tensor) -> float:
    """0 where all bytes are equal, else infinite: there is no tolerance."""
    return float("inf") if not torch.equal(wanted, out) else 0.0


def measure(tokens: int, format: str, settings: Settings) -> list[AppendTime]:
    """Rows of one number of tokens and one format, taken in turns. The bytes of each are those of torch operations."""
    gc.collect()
    rows: list[AppendTime] = []
    running: list[tuple[AppendTime, None, Capture]] = []
    right = make(tokens, format)
    right.pages.fill_(0xFF)
    wanted = by_torch(right).clone()
    for name, way in WAYS.items():
        row = AppendTime(tokens, KV_HEADS, HEAD_DIM, format, name, "fp8", OK)
        data = make(tokens, format)
        try:
            way(data)
        except (LookupError, RuntimeError, ValueError) as refusal:
            rows.append(replace(row, status=UNAVAILABLE, reason=first_line(refusal)))
            continue
        row, recorded = checked(row, partial(way, data), partial(different, wanted), settings)
        if recorded is None:
            rows.append(row)
        else:
            running.append((row, None, recorded))
    return rows + [row for row, _, _ in in_turns(running, settings)]
