"""Decode by FlashAttention-3, in FP8 and bf16, its own choice of splits. The wheel is built without pages, so keys and
values are (B, tokens, Hkv, D) each, which spares it the page table."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch

from ..decode import Q_DESCALE, DecodeData, Way, to_fp8
from ..steps import PAGE
from .fa3 import MODULE, FlashAttention3


def contiguous(pages: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> dict[int, torch.Tensor]:
    """(B, tokens, Hkv, D) by each table, found by where the table begins."""
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages
    return {t.data_ptr(): raw[t.long()].flatten(1, 2).view(pages.dtype) for t in tables}


class PagedFa3(FlashAttention3):
    """``flash_attn_with_kvcache``: as one call, and with the work of its scheduler done before. FP8 takes e4m3 queries,
    whose making is timed apart."""

    def __call__(self, data: DecodeData) -> list[Way]:
        step, fp8 = data.step, self.precision == "fp8"
        sequences, device = len(step.lengths), data.q.device
        interface = importlib.import_module(MODULE)
        q = data.q.view(sequences, step.queries, step.heads, step.head_dim)
        caches, more = (data.k, data.v), {}
        if fp8:
            shared = data.descale.expand(sequences, step.kv_heads)
            q_descale = torch.full((sequences, step.kv_heads), Q_DESCALE, device=device)
            q, caches = to_fp8(q, Q_DESCALE), (data.k8, data.v8)
            more = {"q_descale": q_descale, "k_descale": shared, "v_descale": shared}

        k, v = (contiguous(cache, data.tables) for cache in caches)

        def attend(table: torch.Tensor, **ready: Any) -> torch.Tensor:
            own = k[table.data_ptr()], v[table.data_ptr()]
            out = interface.flash_attn_with_kvcache(
                q, *own, cache_seqlens=data.lengths, softmax_scale=data.scale, causal=True, **more, **ready
            )
            return cast(torch.Tensor, out).view(data.q.shape)

        element = 1 if fp8 else 2
        ways = [Way(f"{self.name}_call", self.precision, attend, element)]
        if hasattr(interface, "get_scheduler_metadata"):
            sizes = (sequences, step.queries, data.tables[0].shape[1] * PAGE, step.heads, step.kv_heads, step.head_dim)
            planned = interface.get_scheduler_metadata(*sizes, data.lengths, qkv_dtype=q.dtype, causal=True)

            def planned_attend(table: torch.Tensor) -> torch.Tensor:
                return attend(table, scheduler_metadata=planned)

            ways.append(Way(self.name, self.precision, planned_attend, element))
        return [*ways, quantised_queries(data)] if fp8 else ways


def quantised_queries(data: DecodeData) -> Way:
    """e4m3 queries by torch's operations, which peers with FP8 queries need in each layer."""

    def error(out: torch.Tensor, table: torch.Tensor) -> float:
        wanted = data.q.float()
        return float((out.float() * Q_DESCALE - wanted).norm() / wanted.norm())

    return Way("quantise_q", "fp8", lambda table: to_fp8(data.q, Q_DESCALE), 0, error=error)
