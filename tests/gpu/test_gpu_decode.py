"""The decode kernels on a card, against float64: what tests/native/test_decode_host.py shows of their sources on the
host. Besides: long caches, equal bits in many runs, graphs whose lengths change between replays."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from decode_host import FAR, Batch, Result, batch, exact, wrong

from fp8cutlass.choose.target import target
from fp8cutlass.manifest import Decode, load_manifest
from fp8cutlass.native import decode

pytestmark = pytest.mark.gpu

LENGTHS, QUERIES = (300, 0, 17, 2000, 128), [1, 2, 0, 5, 3]


def kernels() -> list[tuple[Decode, int]]:
    at = target(torch.device("cuda"))
    return [(d, n) for n, d in enumerate(load_manifest(at.directory).decodes) if d.arch == at.arch]


def on_card(b: Batch) -> Batch:
    moved = {f.name: x.cuda() for f in fields(b) if isinstance(x := getattr(b, f.name), torch.Tensor)}
    return replace(b, **moved)


def launch(b: Batch, kernel: Decode, number: int, *, share: bool = True, lse: bool = True) -> Result:
    c, at = on_card(b), target(torch.device("cuda"))
    left, right = (-1 if x >= FAR else x for x in (b.left, b.right))
    sizes: dict[str, Any] = {
        "tokens": b.q.shape[0], "most_keys": b.table.shape[1] * b.k.shape[1], "heads": b.q.shape[1],
        "kv_heads": b.k.shape[2], "left": left, "right": right, "share": share,
    }  # fmt: skip
    work = decode.cut(kernel, number, at.sm_count, c.lengths, c.cu_q, **sizes)
    caches = decode.Caches(c.k, c.v, c.k_descale, c.v_descale, c.k_token, c.v_page)
    out, sums = decode.attend(
        work, c.q, caches, c.table, c.lengths, c.cu_q, scale=b.scale, left=left, right=right, softcap=b.softcap,
        sinks=c.sinks, return_lse=lse,
    )  # fmt: skip
    assert not work.arrived.any()
    return Result(out.cpu(), torch.empty(0) if sums is None else sums.cpu(), work.cuts.cpu())


def cases(head_dim: int) -> dict[str, Batch]:
    def of(**rest: Any) -> Batch:
        return batch(LENGTHS, QUERIES, (8, 2), head_dim, 16, **rest)

    plain = of()
    pages, random = plain.k.shape[0], torch.Generator().manual_seed(9)
    hit = of(seed=3)
    page, token = divmod(LENGTHS[3] - 2, 16)
    hit.v[int(hit.table[3, page]), token, 0, 5] = 0x7F
    return {
        "plain": plain,
        "window": of(left=70),
        "two-sided window": of(left=40, right=1),
        "no mask": of(right=FAR),
        "softcap": of(softcap=2.0),
        "sinks": of(sinks=torch.linspace(-1, 9, 8)),
        "fp16": of(dtype=torch.float16),
        "descales of tokens and pages": replace(
            plain,
            k_token=torch.rand(pages, 16, 2, generator=random) + 0.5,
            v_page=2.0 ** torch.randint(-9, 12, (pages, 2), generator=random).float(),
        ),
        "a NaN that two queries see": hit,
        "a NaN in a query": replace(plain, q=plain.q.index_fill(0, torch.tensor(4), torch.nan)),
    }


@pytest.mark.parametrize("name", cases(64))
def test_every_kernel_is_exact_but_for_rounding(name: str) -> None:
    for kernel, number in kernels():
        b = cases(kernel.head_dim)[name]
        assert wrong(b, launch(b, kernel, number)) == "", kernel.id


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_pages_of_any_size(page_size: int) -> None:
    kernel, number = kernels()[0]
    b = batch(LENGTHS, QUERIES, (8, 2), kernel.head_dim, page_size)
    assert wrong(b, launch(b, kernel, number)) == ""


@pytest.mark.parametrize("lengths", [(40_000,), (20_000, 40, 40, 40), (1,) * 300, (700,) * 64], ids=str)
def test_work_is_shared_by_all_ctas(lengths: tuple[int, ...]) -> None:
    kernel, number = kernels()[0]
    b = batch(lengths, [1] * len(lengths), (8, 2), kernel.head_dim, 64)
    assert wrong(b, launch(b, kernel, number)) == ""
    assert wrong(b, launch(b, kernel, number, share=False)) == ""


def test_a_thousand_runs_give_equal_bits() -> None:
    kernel, number = kernels()[0]
    b = on_card(batch((9000, 100, 3000), [1, 1, 1], (8, 2), kernel.head_dim, 16))
    at = target(torch.device("cuda"))
    caches = decode.Caches(b.k, b.v, b.k_descale, b.v_descale, None, None)
    sizes: dict[str, Any] = {"tokens": 3, "most_keys": b.table.shape[1] * 16, "heads": 8, "kv_heads": 2}
    work = decode.cut(kernel, number, at.sm_count, b.lengths, b.cu_q, **sizes, left=-1, right=0, share=True)
    first: torch.Tensor | None = None
    for _ in range(1000):
        out, _ = decode.attend(work, b.q, caches, b.table, b.lengths, b.cu_q, scale=b.scale, left=-1, right=0)
        first = out if first is None else first
        assert torch.equal(out, first)


def test_a_graph_follows_lengths_that_change() -> None:
    kernel, number = kernels()[0]
    host = batch((3000, 500, 64), [1, 1, 1], (8, 2), kernel.head_dim, 16)
    b, at = on_card(host), target(torch.device("cuda"))
    caches = decode.Caches(b.k, b.v, b.k_descale, b.v_descale, None, None)
    sizes: dict[str, Any] = {"tokens": 3, "most_keys": b.table.shape[1] * 16, "heads": 8, "kv_heads": 2}

    def step() -> torch.Tensor:
        work = decode.cut(kernel, number, at.sm_count, b.lengths, b.cu_q, **sizes, left=-1, right=0, share=True)
        return decode.attend(work, b.q, caches, b.table, b.lengths, b.cu_q, scale=b.scale, left=-1, right=0)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((3000, 500, 64), (1, 0, 64), (2999, 17, 3)):
        b.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want, _ = exact(replace(host, lengths=torch.tensor(lengths, dtype=torch.int32)))
        assert (out.cpu().double() - want).abs().max() <= 2**-7 * want.abs().max()
