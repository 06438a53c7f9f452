"""Our decode kernels: alone, with the kernel that cuts their work, as calls, and over other layouts of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.call.kvlaunch import kernel_of
from fp8cutlass.choose.target import target
from fp8cutlass.manifest import Decode, load_manifest
from fp8cutlass.native import decode, extension

from ..decode import DESCALE, SMALL_PAGE, DecodeData, Way
from ..steps import PAGE

OURS, CUT, CALL, STEP = "ours", "ours_cut", "ours_call", "ours_step"
SMALL, HND, NATIVE, NATIVE_CALL = "ours_p16", "ours_hnd", "ours_native", "ours_native_call"
APPENDS = {"nhd": "append_nhd", "native": "append_native"}
CHUNK = 1 << 15  # tokens that are appended at a time


def ours(data: DecodeData) -> list[Way]:
    """The kernel over pages whose tokens have all heads side by side, with and without the kernel that cuts; the call,
    and the call that appends first."""
    caches = _caches(data.k8, data.v8, data.descale)
    chosen = _chosen(data)
    return [*_ways(data, *chosen, caches, OURS, with_cut=CUT), *_calls(data)]


def layouts(data: DecodeData) -> list[Way]:
    """The kernel on pages of 16 tokens, on pages with a head's tokens together, and on native pages; native calls."""
    chosen = _chosen(data)
    small_k, small_v = (x.view(-1, SMALL_PAGE, *x.shape[2:]) for x in (data.k8, data.v8))
    head_k, head_v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (data.k8, data.v8))
    native = native_cache(data)
    pages, one = native.views(), torch.ones(1, device=data.q.device)
    inside = decode.Caches(pages.k, pages.v, one, one, pages.k_descale, pages.v_descale)
    return [
        *_ways(data, *chosen, _caches(small_k, small_v, data.descale), SMALL, page=SMALL_PAGE),
        *_ways(data, *chosen, _caches(head_k, head_v, data.descale), HND),
        *_ways(data, *chosen, inside, NATIVE),
        _call(data, NATIVE_CALL, native, cache_seqlens=data.lengths),
    ]


def appends(data: DecodeData) -> list[Way]:
    """``PagedKVCache.append`` of a step's tokens alone."""
    return [_append(data, name, layout) for layout, name in APPENDS.items()]


def candidates(data: DecodeData) -> list[Way]:
    """Built kernels of other shapes, with as many rows."""
    step, at = data.step, target(data.q.device)
    chosen, _ = _chosen(data)
    caches = _caches(data.k8, data.v8, data.descale)
    return [
        _ways(data, kernel, number, caches, kernel.id)[0]
        for number, kernel in enumerate(load_manifest(at.directory).decodes)
        if kernel.candidate and (kernel.arch, kernel.head_dim, kernel.rows) == (at.arch, step.head_dim, chosen.rows)
    ]


def native_cache(data: DecodeData) -> PagedKVCache:
    """The bf16 cache in native pages of the same numbers."""
    cache = PagedKVCache(
        data.k.shape[0], data.step.kv_heads, data.step.head_dim, PAGE, v_descale=DESCALE, device=data.k.device
    )
    k, v = data.k.flatten(0, 1), data.v.flatten(0, 1)
    for slots in torch.arange(len(k), device=k.device).split(CHUNK):
        cache.append(k[slots], v[slots], slots)
    return cache


def _chosen(data: DecodeData) -> tuple[Decode, int]:
    step, at = data.step, target(data.q.device)
    sequences = len(step.lengths)
    return kernel_of(at, step.head_dim, step.heads, step.kv_heads, sequences * step.queries, sequences, step.queries)


def _caches(k: torch.Tensor, v: torch.Tensor, descale: torch.Tensor) -> decode.Caches:
    return decode.Caches(k.view(torch.uint8), v.view(torch.uint8), descale, descale, None, None)


def _ways(
    data: DecodeData,
    kernel: Decode,
    number: int,
    caches: decode.Caches,
    name: str,
    *,
    with_cut: str = "",
    page: int = PAGE,
) -> list[Way]:
    """The kernel alone, and under the name ``with_cut`` with the one that cuts its work."""
    step, at = data.step, target(data.q.device)
    extension.load()
    sizes: dict[str, Any] = {
        "tokens": data.q.shape[0], "most_keys": data.tables_of(page)[0].shape[1] * page, "heads": step.heads,
        "kv_heads": step.kv_heads,
    }  # fmt: skip

    def cut() -> decode.Work:
        return decode.cut(kernel, number, at.sm_count, data.lengths, data.cu_q, **sizes, left=-1, right=0, share=True)

    def attend(work: decode.Work, table: torch.Tensor) -> torch.Tensor:
        out, _ = decode.attend(work, data.q, caches, table, data.lengths, data.cu_q, scale=data.scale, left=-1, right=0)
        return out

    work = cut()
    alone = Way(name, "fp8", lambda table: attend(work, table), 1, page)
    return [alone, Way(with_cut, "fp8", lambda table: attend(cut(), table), 1, page)] if with_cut else [alone]


def _call(data: DecodeData, name: str, cache: PagedKVCache | Sequence[torch.Tensor], **arguments: Any) -> Way:
    q = data.q.view(len(data.step.lengths), data.step.queries, *data.q.shape[1:])

    def launch(table: torch.Tensor) -> torch.Tensor:
        out = attention_with_kvcache(q, cache, page_table=table, **arguments)
        return cast(torch.Tensor, out).view(data.q.shape)

    return Way(name, "fp8", launch, 1)


def _calls(data: DecodeData) -> list[Way]:
    """``attention_with_kvcache``, and with the tokens that it appends first, which are in the cache already."""
    pair, descales = (data.k8, data.v8), {"k_descale": data.descale, "v_descale": data.descale}
    before = data.lengths - data.step.queries
    steps = {
        table.data_ptr(): _call(data, STEP, pair, cache_seqlens=before, **descales, **_last_tokens(data, table))
        for table in data.tables
    }
    call = _call(data, CALL, pair, cache_seqlens=data.lengths, **descales)
    return [call, Way(STEP, "fp8", lambda table: steps[table.data_ptr()].launch(table), 1)]


def _last_tokens(data: DecodeData, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """K and V of the queries' own tokens, (sequences, queries, Hkv, D) bf16."""
    at = data.lengths.long()[:, None] - data.step.queries + torch.arange(data.step.queries, device=table.device)
    page = table.long().gather(1, at // PAGE)
    return {"k": data.k[page, at % PAGE], "v": data.v[page, at % PAGE]}


def _append(data: DecodeData, name: str, layout: str) -> Way:
    """Into a page for each sequence, from its first token on."""
    step, new = data.step, _last_tokens(data, data.tables[0])
    sequences, device = len(step.lengths), data.q.device
    k_descale = None if layout == "native" else DESCALE
    cache = PagedKVCache(
        sequences, step.kv_heads, step.head_dim, PAGE, format=layout, k_descale=k_descale, v_descale=DESCALE,
        device=device,
    )  # fmt: skip
    tokens = torch.arange(step.queries, device=device)
    slots = (torch.arange(sequences, device=device)[:, None] * PAGE + tokens).flatten()
    k, v = (x.flatten(0, 1) for x in new.values())
    table = torch.arange(sequences, dtype=torch.int32, device=device)[:, None]
    lengths = torch.full((sequences,), step.queries, dtype=torch.int32, device=device)

    def launch(_: torch.Tensor) -> torch.Tensor:
        cache.append(k, v, slots)
        return cast(torch.Tensor, cache.pages)

    def error(out: torch.Tensor, _: torch.Tensor) -> float:
        found = [x[:, :, : step.queries].transpose(1, 2).flatten(0, 1) for x in cache.dequantise(table, lengths)]
        return max(float((x - y.float()).norm() / y.float().norm()) for x, y in zip(found, (k, v), strict=True))

    return Way(name, "fp8", launch, 0, error=error)
