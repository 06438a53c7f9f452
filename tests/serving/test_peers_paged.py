"""The parameters of FlashInfer's test of paged decode and of vLLM's of reshape_and_cache_flash, on the CPU reduced to
seconds, on a card in full. Free slots are NaN and scales are not 1. The gates are ours.

Regressions these catch: strides of a cache that is a part of a larger tensor, a block size that is taken for another, a
scale of another head, a token that is written beside its slot.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from paged_cases import POISON, attention64, refusals

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.cache.write import E4M3
from fp8cutlass.emulator.decode import queries

on_a_card = pytest.mark.gpu
KV_HEADS = 4  # of FlashInfer's test
MOST = 1 << 23  # sequences x keys x head_dim: of long caches there are fewer sequences than in FlashInfer's test


def decoded(
    batch_size: int, keys: int, page: int, heads: int, dim: int, kind: str, device: str, dtype: torch.dtype
) -> list[str]:
    """What the gates say of one query a sequence over a cache of random bytes; ``kind``: contiguous, a part, a pair."""
    random = torch.Generator().manual_seed(keys + page + heads)
    used = -(-keys // page)
    pages = batch_size * used

    def fp8(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, dim, generator=random) * 60).clamp(-448, 448).to(E4M3).view(torch.uint8)

    kv = fp8(pages, 2, page, KV_HEADS)
    last = torch.arange(batch_size) * used + used - 1  # of each sequence's pages; its end is NaN
    kv[last, :, keys - (used - 1) * page :] = POISON
    if kind == "contiguous":
        given: Any = kv.clone().to(device)
    elif kind == "a part":  # of every page, token and head, as FlashInfer's contiguous_kv=False has it
        room = torch.full((pages, 2, 2, page, 2, KV_HEADS, 2, dim), POISON, dtype=torch.uint8, device=device)
        given = room[:, 1, :, :, 1, :, 0]
        given.copy_(kv)
    else:
        given = tuple(x.contiguous().to(device) for x in kv.unbind(1))
    order = torch.randperm(pages, generator=random)
    table = order.argsort().view(batch_size, used)
    where = given if isinstance(given, torch.Tensor) else torch.stack(given, 1)
    moved = where[order.to(device)].clone()
    if isinstance(given, torch.Tensor):
        given.copy_(moved)
    else:
        for x, y in zip(given, moved.unbind(1), strict=True):
            x.copy_(y)
    k_descale, v_descale = torch.rand(2, KV_HEADS, generator=random) * 0.01 + 0.01
    cache = PagedKVCache.from_tensor(given, k_descale=k_descale.to(device), v_descale=v_descale.to(device))
    q = torch.randn(batch_size, 1, heads, dim, generator=random).to(dtype)
    out, lse = attention_with_kvcache(
        q.to(device), cache, page_table=table.int().to(device), cache_seqlens=keys, causal=False, return_lse=True
    )
    rows = kv.view(batch_size, used, 2, page, KV_HEADS, dim).transpose(1, 2).flatten(2, 3)[:, :, :keys]
    some = range(batch_size) if batch_size * keys * heads < 1 << 20 else range(0, batch_size, max(1, batch_size // 4))
    references = []
    for s in some:
        k, v = (x.view(E4M3).float() for x in rows[s])
        q16, descale = queries(q[s])
        references.append(attention64(q16 * descale, k * k_descale[:, None], v * v_descale[:, None], dim**-0.5))
    at = torch.tensor(list(some))
    return refusals(out.cpu()[at, 0], lse.cpu()[at, :, 0].t(), references, [1] * len(references))


SHAPES = [(4, 128), (32, 128), (4, 256), (32, 256)]  # heads of Q, head_dim


@pytest.mark.parametrize("kind", ["contiguous", "a part", "a pair"])
@pytest.mark.parametrize(("batch_size", "keys", "page"), [(12, 54, 1), (17, 97, 8), (3, 512, 16)])
def test_flashinfer_paged_decode(batch_size: int, keys: int, page: int, kind: str) -> None:
    heads, dim = SHAPES[(batch_size + len(kind)) % len(SHAPES)]
    assert decoded(batch_size, keys, page, heads, dim, kind, "cpu", torch.float16) == []


@on_a_card
@pytest.mark.parametrize("keys", [54, 97, 512, 2048, 16384])
@pytest.mark.parametrize("batch_size", [12, 17, 128])
def test_flashinfer_paged_decode_on_a_card(batch_size: int, keys: int) -> None:
    for number, (page, heads, dim) in enumerate(product((1, 8, 16), (4, 32), (128, 256))):
        fewer = max(1, min(batch_size, MOST // (keys * dim)))
        kind = ("contiguous", "a part", "a pair")[number % 3]
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        assert decoded(fewer, keys, page, heads, dim, kind, "cuda", dtype) == [], (page, heads, dim, kind)


def written(block: int, blocks: int, dim: int, layout: str, scales: str, dtype: torch.dtype, device: str) -> None:
    """42 tokens of 8 heads at random slots of a cache that is one tensor of two: their bytes, and no other byte."""
    tokens, heads = 42, 8
    random = torch.Generator().manual_seed(block + dim)
    k, v = (torch.randn(tokens, heads, dim, generator=random).to(dtype) for _ in range(2))
    # vLLM's test takes amax / 64, so that no value saturates.
    amax = [x.abs().float().amax((0, 2) if scales == "attn_head" else None) / 64 for x in (k, v)]
    shape = (blocks, 2, block, heads, dim) if layout == "NHD" else (blocks, 2, heads, block, dim)
    raw = torch.full(shape, POISON, dtype=torch.uint8, device=device)
    scale = [x.to(device) if x.dim() else float(x) for x in amax]
    cache = PagedKVCache.from_tensor(raw, layout=layout.lower(), k_descale=scale[0], v_descale=scale[1])
    slot = torch.randperm(blocks * block, generator=random)[:tokens]
    cache.append(k.to(device), v.to(device), slot.to(device))
    rows = raw.cpu() if layout == "NHD" else raw.cpu().transpose(2, 3)
    for which, (x, descale) in enumerate(zip((k, v), amax, strict=True)):
        found = rows[slot // block, which, slot % block]
        factor = descale[:, None] if descale.dim() else descale
        assert torch.equal(found, (x.float() * factor.reciprocal()).clamp(-448, 448).to(E4M3).view(torch.uint8))
        assert torch.allclose(found.view(E4M3).float() * factor, x.float(), atol=0.001, rtol=0.1), "vLLM's tolerance"
    rest = torch.ones(blocks, block, dtype=torch.bool)
    rest[slot // block, slot % block] = False
    assert (rows.transpose(1, 2)[rest] == POISON).all()


GRID = list(product((64, 80, 256), ("NHD", "HND"), ("tensor", "attn_head"), (torch.float16, torch.bfloat16)))


@pytest.mark.parametrize("block", [8, 16, 32])
def test_vllm_reshape_and_cache_flash(block: int) -> None:
    for dim, layout, scales, dtype in GRID:
        written(block, 24, dim, layout, scales, dtype, "cpu")


@on_a_card
@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("blocks", [1024, 10_000])
def test_vllm_reshape_and_cache_flash_on_a_card(blocks: int, block: int) -> None:
    for dim, layout, scales, dtype in GRID:
        written(block, blocks, dim, layout, scales, dtype, "cuda")
