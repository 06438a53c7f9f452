"""attention_with_kvcache on a card, by the gates of the CPU, and append bit for bit.

Regressions these catch: what the host's stand-ins for instructions cannot show; a byte that append writes elsewhere on
a card; a number of the device that somebody waits for; a result that depends on when it is computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import Batch, make, refusals, slots

from fp8cutlass import PagedKVCache

pytestmark = pytest.mark.gpu

KEYS, ROWS = [700, 0, 130, 3, 64, 5000], [1, 2, 5, 6, 20, 3]
FORMATS: list[dict[str, Any]] = [
    {},
    {"v_scale": "pow2", "page_size": 16},
    {"format": "nhd", "page_size": 16},
    {"format": "hnd", "page_size": 128},
]


def on_card(batch: Batch, arguments: dict[str, Any]) -> Batch:
    """The same batch, its cache's bytes and tables on the card."""
    cache, old = batch.cache, {k: v for k, v in arguments.items() if k not in ("format", "v_scale", "page_size")}
    descales = {"v_descale": cache.v_descale[0].cuda()} if cache.v_scale == "static" else {}
    if cache.format != "native":
        descales["k_descale"] = cache.k_descale[0].cuda()
    there = PagedKVCache(
        cache.num_pages, cache.kv_heads, cache.head_dim, cache.page_size, format=cache.format, v_scale=cache.v_scale,
        device="cuda", **descales, **old,
    )  # fmt: skip
    there.pages.copy_(cache.pages)  # type: ignore[union-attr, arg-type]
    return Batch(there, batch.table.cuda(), batch.keys, batch.rows, batch.q.cuda(), batch.k, batch.v, batch.options)


def run(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"cache_seqlens": batch.lengths.cuda(), "cu_seqlens_q": batch.ends.cuda()} | options
    return batch.run(**given)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("arguments", FORMATS, ids=str)
def test_gates(arguments: dict[str, Any], head_dim: int) -> None:
    batch = make(KEYS, ROWS, (8, 2), head_dim, **arguments)
    there = on_card(batch, arguments)
    sinks = torch.linspace(-2, 4, 8)
    cases: list[dict[str, Any]] = [
        {}, {"causal": False}, {"window_size": (100, 3), "causal": False}, {"softcap": 5.0}, {"num_splits": 1},
    ]  # fmt: skip
    for options in cases:
        out, lse = run(there, **options)
        assert refusals(out.cpu(), lse.cpu(), batch.references(**options), ROWS) == []
    out, lse = run(there, sinks=sinks.cuda())
    assert refusals(out.cpu(), lse.cpu(), batch.references(sinks=sinks), ROWS) == []


@pytest.mark.parametrize("arguments", FORMATS, ids=str)
def test_append_writes_the_bytes_of_the_cpu(arguments: dict[str, Any]) -> None:
    batch = make(KEYS, ROWS, (8, 2), 128, **arguments)
    there = on_card(batch, arguments)
    there.cache.pages.fill_(0xFF)  # type: ignore[union-attr]
    at = torch.cat([slots(batch, s) for s in range(len(KEYS))])
    there.cache.append(torch.cat(batch.k).cuda(), torch.cat(batch.v).cuda(), at.cuda())
    assert torch.equal(there.cache.pages.cpu(), batch.cache.pages)  # type: ignore[union-attr, arg-type]


def test_numbers_out_of_range_are_clamped_and_slots_ignored() -> None:
    batch = make([700, 40, 130], [1, 1, 1], (8, 2), 128)
    there = on_card(batch, {})
    right, _ = run(there, num_splits=1)
    wild = there.table.clone()
    wild[1] = 2**31 - 1
    lengths = torch.tensor([700, 2**30, 130], dtype=torch.int32).cuda()
    found, _ = run(there, page_table=wild, cache_seqlens=lengths, num_splits=1)
    assert torch.equal(found[0], right[0]) and torch.equal(found[2], right[2])
    before = there.cache.pages.clone()  # type: ignore[union-attr]
    k = torch.randn(3, 2, 128).half().cuda()
    there.cache.append(k, k, torch.tensor([-1, 2**40, -9]).cuda())
    assert torch.equal(there.cache.pages, before)  # type: ignore[arg-type]


def test_a_captured_step_follows_lengths_and_pages() -> None:
    """Append and attention in a CUDA graph; replays see new numbers, and equal ones give equal bits."""
    batch = make([700, 40, 130], [1, 1, 1], (8, 2), 128, spare=8)
    there = on_card(batch, {})
    table = there.table.where(there.table < 2**30, 0)
    lengths = torch.tensor([600, 30, 100], dtype=torch.int32).cuda()
    k = v = torch.randn(3, 1, 2, 128).half().cuda()

    ends = there.ends.cuda()

    def step() -> torch.Tensor:
        return there.run(page_table=table, cache_seqlens=lengths, cu_seqlens_q=ends, k=k, v=v)[0]

    eager = step().clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(50):
        graph.replay()
        assert torch.equal(out, eager)
    lengths += 1
    graph.replay()
    assert torch.equal(out, step()) and not torch.equal(out, eager)
