"""One key among many thousands is found, wherever it lies, and what the others weigh together is not lost.

Regressions these catch: a tile, a page or a share of the work that is left out or read twice, an order of pages that is
taken for the order of keys, weights that f16 or e4m3 cannot hold.
"""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import attention64

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.emulator.decode import queries

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 64
NEEDLE = 60.0  # the logit of the needle; those of the others are N(0, 1)


def haystack(keys: int, device: str) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of ``keys`` random keys in pages in a random order, its table, and K and V (keys, KV_HEADS, DIM)."""
    random = torch.Generator().manual_seed(keys)
    pages = -(-keys // PAGE)
    k, v = (torch.randn(keys, KV_HEADS, DIM, generator=random).half() for _ in range(2))
    k[..., 0] = 0  # the direction of the needle
    cache = PagedKVCache(pages, KV_HEADS, DIM, PAGE, v_scale="pow2", device=device)
    table = torch.randperm(pages, generator=random).int()[None]
    cache.append(k.to(device), v.to(device), slots(table, torch.arange(keys)).to(device))
    return cache, table, k, v


def slots(table: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return table[0].long()[key // PAGE] * PAGE + key % PAGE


def found(keys: int, places: list[int], device: str, splits: int) -> None:
    cache, table, k, v = haystack(keys, device)
    q = torch.randn(1, 1, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
    q[..., 0] = 8.0
    given = {"page_table": table.to(device), "cache_seqlens": keys, "num_splits": splits}
    plain = attention_with_kvcache(q.to(device), cache, **given)
    assert plain.abs().max() < 0.5, "without a needle many keys average out"
    for place in places:
        at = slots(table, torch.tensor([place]))
        needle = k[place : place + 1].clone()
        needle[..., 0] = NEEDLE / 8.0 / DIM**-0.5
        cache.append(needle.to(device), v[place : place + 1].to(device), at.to(device))
        out, lse = attention_with_kvcache(q.to(device), cache, return_lse=True, **given)
        page = table[:, place // PAGE : place // PAGE + 1].to(device)
        held = cache.dequantise(page, torch.tensor([PAGE], dtype=torch.int32).to(device))[1][0, :, place % PAGE].cpu()
        wanted = held.repeat_interleave(HEADS // KV_HEADS, 0)
        assert (held - v[place].float()).abs().max() < 2.0**-4 * held.abs().max(), place
        assert (out[0, 0].cpu().float() - wanted).abs().max() <= 2.0**-10 * wanted.abs().max(), place
        assert (lse.cpu() - NEEDLE).abs().max() < 4.0, place  # e4m3 of K: up to 1/16 of the logit
        cache.append(k[place : place + 1].to(device), v[place : place + 1].to(device), at.to(device))
    # The needle of a bit more than all others weigh together: both count, as float64 has them.
    place, together = places[-1], math.log(keys) + 0.5
    needle = torch.zeros_like(k[place : place + 1])  # of no other direction: alike for all heads
    needle[..., 0] = together / 8.0 / DIM**-0.5
    cache.append(needle.to(device), v[place : place + 1].to(device), slots(table, torch.tensor([place])).to(device))
    out, lse = attention_with_kvcache(q.to(device), cache, return_lse=True, **given)
    real = (x[0].transpose(0, 1) for x in cache.dequantise(given["page_table"], torch.tensor([keys]).int().to(device)))
    k64, v64 = (x[:keys].cpu() for x in real)
    q16, descale = queries(q[0])
    reference = attention64(q16 * descale, k64, v64, DIM**-0.5)
    share = reference.probabilities[0, :, 0, place]
    assert 0.1 < float(share.min()) and float(share.max()) < 0.9
    exact = reference.out[0, :, 0]
    assert float((out[0, 0].cpu().double() - exact).norm() / exact.norm()) < 0.002
    assert (lse[0, :, 0].cpu() - reference.lse[0, :, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("splits", [1, 7])
def test_a_needle_among_four_thousand_keys(splits: int) -> None:
    found(4_095, [0, 64, 2_049, 4_094], "cpu", splits)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("keys", [131_072, 131_009])
def test_a_needle_among_128k_keys(keys: int, splits: int) -> None:
    found(keys, [0, 63, 64, 65_535, 65_536, 100_000, keys - 64, keys - 1], "cuda", splits)
