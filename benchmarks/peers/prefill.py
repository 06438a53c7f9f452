"""Contenders of prefill over pages: our whole call on pages of our own and of an engine, and the dense kernel for FP8
operands of the same softmax, whose operands are ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.call.kvprefill import Chunks, prefill_for
from fp8cutlass.choose.target import target
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import load_manifest
from fp8cutlass.native import extension

from ..walk import RaggedData, Way
from .own import OUT_DTYPE, Own, launcher, make_operands
from .ragged import DENSE, _as_tokens, _dense_data, cells

PAGED = {"native": "fp8cutlass_pages", "nhd": "fp8cutlass_pages_nhd"}
PAGE = 64  # tokens


def pages_of(data: RaggedData, format: str) -> tuple[PagedKVCache, torch.Tensor]:
    """A cache that holds K and V of all sequences, in pages of a random order, and its page table."""
    mix, device = data.mix, data.k.device
    columns, count = -(-max(mix.lengths) // PAGE), len(mix.lengths)
    cache = PagedKVCache(count * columns, mix.kv_heads, mix.head_dim, PAGE, format=format, device=device)
    order = torch.randperm(count * columns, generator=torch.Generator().manual_seed(0))
    table = order.view(count, columns).to(device, torch.int32)
    slots = [
        (table[s].long()[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:n]
        for s, n in enumerate(mix.lengths)
    ]
    cache.append(data.k, data.v, torch.cat(slots))
    return cache, table


def paged(data: RaggedData) -> list[Way]:
    """The call, keys in pages. It routes, copies keys, quantises Q and attends."""
    mix, at, found = data.mix, target(data.q.device), []
    used, longest = data.cu.diff(), max(mix.lengths)
    for format, name in PAGED.items():
        cache, table = pages_of(data, format)
        chunks = Chunks(
            mix.tokens, len(mix.lengths), longest, table.shape[1] * PAGE, mix.kv_heads, mix.head_dim, "bf16", mix.left,
            0 if mix.causal else -1, False, False, 0,
        )  # fmt: skip
        part, why = prefill_for(at, chunks)
        if part is None:
            raise UnsupportedError(why)

        def launch(cache: PagedKVCache = cache, table: torch.Tensor = table) -> torch.Tensor:
            out = attention_with_kvcache(
                data.q, cache, page_table=table, cache_seqlens=used, cu_seqlens_q=data.cu, max_seqlen_q=longest,
                causal=mix.causal,
            )  # fmt: skip
            return cast(torch.Tensor, out)

        visited = cells(mix, part.kernel.tile_m, part.kernel.tile_n)
        found.append(Way(name, "fp8", mix, launch, kernel=part.kernel.id, cells=visited))
    return found


def dense(softmax: str) -> Callable[[RaggedData], list[Way]]:
    """Of sequences of one length: the table's dense kernel of a softmax for FP8 operands, with descales of blocks."""

    def source(data: RaggedData) -> list[Way]:
        as_dense, at = _dense_data(data), target(data.q.device)
        mask, mix = "causal" if data.mix.causal else "full", data.mix
        wanted = (at.arch, mix.head_dim, mask, "bf16", softmax, "block", "e4m3")
        built = [
            v
            for v in load_manifest(at.directory).variants
            if (v.family, v.head_dim, v.mask, v.out, v.softmax, v.scaling, v.dtype) == wanted and v.kind == "fwd"
        ]
        if not built:
            raise UnsupportedError(f"no dense kernel of softmax {softmax} is built")
        found: list[Way] = []
        for v in built:
            variant, number = Own().choose(as_dense, at, v.id)
            extension.load()
            out = torch.empty(as_dense.q.shape, dtype=OUT_DTYPE, device=as_dense.q.device)
            launch = launcher(number, make_operands(as_dense, variant, at, "block"), out, data.scale)
            visited = cells(mix, variant.tile_m, variant.tile_n)
            name = DENSE if len(found) == 0 else f"{DENSE}_{len(found)}"
            found.append(Way(name, "fp8", mix, launch, _as_tokens, variant.id, visited))
        return found

    return source
