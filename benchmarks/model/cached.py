"""Ways to attend in a step of decoding: keys and values of bf16 side by side, or e4m3 in pages of ours. Each step
appends its token, so that a replay writes where the one before wrote."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import torch

from fp8cutlass import PagedKVCache, attention_with_kvcache

from ..peers.fa3 import MODULE
from .dense import BACKENDS, FA3, OURS, Way, exact, sdpa_call
from .layers import Attend, Drawn
from .problems import Problem

PAGE = 64
CHUNK = 1 << 15  # tokens that are appended at a time


class Caches:
    """Keys and values of all layers but for the token of the step, (B, keys, Hkv, D) bf16, standard normal. The pages
    are filled when they are first asked for."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        draw = Drawn(device, seed=1)
        size = (problem.batch, problem.keys, problem.kv_heads, problem.head_dim)
        self.problem, self.device = problem, device
        self.k, self.v = ([draw.normal(*size) for _ in range(problem.layers)] for _ in range(2))
        self._pages: PagedKVCache | None = None
        each = -(-problem.keys // PAGE)
        order = torch.randperm(problem.batch * each, generator=draw.generator, device=device)
        self.table = order.to(torch.int32).view(problem.batch, each)
        self.before = torch.full((problem.batch,), problem.keys - 1, dtype=torch.int32, device=device)
        self.lengths = self.before + 1

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's token, (B, 1, Hkv, D), and return all keys and values."""
        keys, values = self.k[layer], self.v[layer]
        keys[:, -1:], values[:, -1:] = k, v
        return keys, values

    def pages(self) -> PagedKVCache:
        """The same numbers in native pages."""
        if self._pages is None:
            problem = self.problem
            self._pages = PagedKVCache(
                self.table.numel(), problem.kv_heads, problem.head_dim, PAGE, layers=problem.layers, device=self.device
            )
            at = torch.arange(problem.keys - 1, device=self.device)
            slots = (self.table.long()[:, at // PAGE] * PAGE + at % PAGE).flatten()
            for layer in range(problem.layers):
                k, v = (x[:, :-1].flatten(0, 1) for x in (self.k[layer], self.v[layer]))
                for part in torch.arange(len(slots), device=self.device).split(CHUNK):
                    self._pages.append(k[part], v[part], slots[part], layer=layer)
        return self._pages


def _after_append(caches: Caches, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Attend:
    def step(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        return attend(q, *caches.append(layer, k, v))

    return step


def reference(caches: Caches) -> Attend:
    """In float32."""
    return _after_append(caches, lambda q, k, v: exact(0, q, k, v, causal=False))


def sdpa(name: str, caches: Caches) -> Way:
    """All sequences are equally long, so that there is no mask."""
    backend = BACKENDS.get(name)
    return Way(name, "bf16", _after_append(caches, lambda q, k, v: sdpa_call(q, k, v, False, backend)))


def fa3(caches: Caches) -> Way:
    function = importlib.import_module(MODULE).flash_attn_with_kvcache

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(q, k, v, cache_seqlens=caches.lengths, causal=True)
        return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)

    return Way(FA3, "bf16", _after_append(caches, attend))


def ours(caches: Caches) -> Way:
    """``attention_with_kvcache`` over native pages, append included."""
    pages = caches.pages()

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        out = attention_with_kvcache(
            q, pages, page_table=caches.table, cache_seqlens=caches.before, k=k, v=v, layer=layer
        )
        return cast(torch.Tensor, out)

    return Way(OURS, "fp8", attend)
