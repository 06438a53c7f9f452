"""attention_with_kvcache over the parameters of the peers' own tests, reduced to seconds, against float64.

The cases follow FlashAttention-3's test of its kvcache function, vLLM's of varlen with a paged cache and FlashInfer's
of paged decode. Free slots are NaN and scales are not 1 in each. The gates are ours.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_cases import POISON, attention64, check, make, refusals, rope64, slots

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.cache.write import E4M3
from fp8cutlass.emulator.decode import queries

# (queries, keys) of FlashAttention's pairs, keys of the longest cut
PAIRS = [(1, 128), (1, 339), (3, 799), (3, 1024), (64, 800), (16, 2000), (128, 128), (256, 512), (200, 457)]
HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "local": {"causal": False, "window_size": (100, 31)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_flashattention_lengths(number: int, mask: str) -> None:
    """Five sequences of up to ``keys`` keys; kinds of heads, pages and splits in turn."""
    (rows, keys), heads = PAIRS[number], [*HEADS][(number + [*MASKS].index(mask)) % 3]
    lengths = [keys, max(rows, keys // 2), keys - keys // 5, max(1, keys // 3), min(keys, rows + 7)]
    page = {"mha": 64, "gqa": 128, "mqa": 16}[heads]
    batch = make(lengths, [rows] * 5, HEADS[heads], 64, page_size=page, seed=rows + keys, options=MASKS[mask])
    splits = {"full": 1, "causal": 3, "local": 0}[mask]
    check(batch, num_splits=splits)


@pytest.mark.parametrize(
    ("fraction", "interleaved"), [(0.0, True), (0.5, True), (0.5, False), (1.0, True), (1.0, False)]
)
@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 64, 128])
def test_flashattention_kvcache(page_size: int | None, fraction: float, interleaved: bool) -> None:
    """Append, turn and attend in one call, of an engine's cache: the cache gets the tokens' bytes, the outputs are
    those of the whole sequence. Without pages the cache has a row for each sequence."""
    rows, new = [(1, 1), (3, 3), (5, 1), (2, 7)][((page_size or 0) % 7 + int(4 * fraction) + interleaved) % 4]
    dim, before = 64, [0, 61, 130, 7, 64]
    size = page_size or 160
    most = -(-max(n + new for n in before) // size)
    random = torch.Generator().manual_seed(rows + new + size)
    order = (
        torch.randperm(5 * most, generator=random).view(5, most).int() if page_size else torch.arange(5).int()[:, None]
    )
    draw = lambda *shape: torch.randn(*shape, dim, generator=random).half()  # noqa: E731
    caches = [torch.full((5 * most, size, 2, dim), POISON, dtype=torch.uint8) for _ in range(2)]
    k_descale, v_descale = torch.rand(2, 5, 2, generator=random) * 0.01 + 0.011
    old = [(draw(n, 2), draw(n, 2)) for n in before]
    key = torch.arange(most * size)
    slot = [order[s].long()[key // size] * size + key % size for s in range(5)]

    def fp8(x: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
        return (x.float() * descale.reciprocal()[:, None]).clamp(-448, 448).to(E4M3)

    for s, n in enumerate(before):
        for raw, x, descale in zip(caches, old[s], (k_descale[s], v_descale[s]), strict=True):
            raw.view(-1, 2, dim)[slot[s][:n]] = fp8(x, descale).view(torch.uint8)
    q, k, v = draw(5, rows, 6), draw(5, new, 2), draw(5, new, 2)
    turn: dict[str, Any] = {}
    if fraction:
        angle = torch.rand(256, int(fraction * dim) // 2, generator=random) * 6.28
        turn = {"rotary_cos": angle.cos().half(), "rotary_sin": angle.sin().half(), "rotary_interleaved": interleaved}
    untouched = [x.clone() for x in caches]
    out, lse = attention_with_kvcache(
        q, (caches[0].view(E4M3), caches[1].view(E4M3)), page_table=order if page_size else None,
        cache_seqlens=torch.tensor(before, dtype=torch.int32), k=k, v=v, k_descale=k_descale, v_descale=v_descale,
        return_lse=True, **turn,
    )  # fmt: skip
    references = []
    for s, n in enumerate(before):
        at, one, many = torch.arange(n, n + new), q[s], k[s]
        if fraction:
            tables = turn["rotary_cos"], turn["rotary_sin"]
            many = rope64(many, *tables, at, interleaved)
            one = rope64(one, *tables, torch.arange(n, n + rows), interleaved)
        real = []
        for raw, before_it, x, descale in zip(caches, old[s], (many, v[s]), (k_descale[s], v_descale[s]), strict=True):
            found = raw.view(-1, 2, dim)[slot[s][: n + new]].view(E4M3).float()
            wanted = torch.cat((fp8(before_it, descale), fp8(x, descale))).float()
            # A turn rounds to f16: an ulp of difference there may be a step of e4m3.
            assert torch.allclose(found, wanted, rtol=0.13 if fraction else 0, atol=1e-3)
            assert (found == wanted).float().mean() > 0.99
            real.append(found * descale[:, None])
        q16, descale = queries(one)
        references.append(attention64(q16 * descale, *real, dim**-0.5, right=0))
    seen = refusals(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), references, [rows] * 5)
    assert [text for text in seen if not (fraction and text.startswith("z max"))] == []
    written = torch.cat([slot[s][: n + new] for s, n in enumerate(before)])
    rest = torch.ones(5 * most * size, dtype=torch.bool)
    rest[written] = False
    for raw, first in zip(caches, untouched, strict=True):
        assert torch.equal(raw.view(-1, 2, dim)[rest], first.view(-1, 2, dim)[rest])


SEQUENCES = {
    "prefill and decode": [(1, 1328), (5, 18), (129, 463)],
    "decode": [(1, 523), (1, 37), (1, 2011)],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(
    ("head_dim", "heads"), [(64, (4, 4)), (80, (8, 2)), (128, (8, 2)), (128, (4, 4)), (256, (4, 2))]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (256, 50.0)])
def test_vllm_varlen_with_paged_kv(
    name: str, heads: tuple[int, int], head_dim: int, window: int | None, softcap: float
) -> None:
    """Pages of 16 in NHD among 2,048, scales of a checkpoint."""
    rows, keys = (list(x) for x in zip(*SEQUENCES[name], strict=True))
    dtype = torch.bfloat16 if head_dim == 128 else torch.float16
    batch = make(
        keys, rows, heads, head_dim, dtype=dtype, page_size=16, format="nhd" if head_dim < 128 else "hnd",
        seed=head_dim, spare=64,
    )  # fmt: skip
    check(batch, window_size=(-1, -1) if window is None else (window - 1, 0), softcap=softcap)


def test_a_page_number_beyond_32_bit_offsets(tmp_path: Path) -> None:
    """A page whose bytes begin past 2^31: the caches are sparse files."""
    shape = (40000, 64, 8, 128)
    caches = [
        torch.from_file(str(tmp_path / name), shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)
        for name in "kv"
    ]
    cache = PagedKVCache.from_tensor(caches, k_descale=0.0137, v_descale=0.02)
    assert 39998 * cache.page_bytes // 2 > 2**31
    k, v, q = torch.randn(3, 50, 8, 128, generator=torch.Generator().manual_seed(1)).half()
    found = []
    for page in (0, 39998):
        cache.append(k, v, torch.arange(50) + 64 * page)
        table = torch.tensor([[page]], dtype=torch.int32)
        found.append(attention_with_kvcache(q[None], cache, page_table=table, cache_seqlens=50))
    assert torch.equal(*found) and found[0].any() and not caches[0][39999].any()


@pytest.mark.parametrize(("batch_size", "keys"), [(12, 54), (17, 97), (17, 512), (12, 1200)])
@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_flashinfer_batch_decode(batch_size: int, keys: int, page_size: int, layout: str) -> None:
    """One query a sequence, all of one length, 8 heads that share one of 2 of K and V."""
    batch = make(
        [keys] * batch_size, [1] * batch_size, (16, 2), 64, page_size=page_size, format=layout, seed=keys
    )  # fmt: skip
    check(batch, causal=False)


def test_flashinfer_extreme_negative_logits() -> None:
    """Scores of -1000 and below: the LSE and the outputs stay finite and right."""
    batch = make([77, 130], [1, 1], (4, 2), 64, dtype=torch.bfloat16)
    batch.q = -batch.q.abs()
    batch.cache.reset()
    batch.k = [40 * k.abs() for k in batch.k]
    batch.cache.append(torch.cat(batch.k), torch.cat(batch.v), torch.cat([slots(batch, s) for s in range(2)]))
    out, lse = batch.run()
    assert lse.max() < -100 and out.isfinite().all()
    for s, reference in enumerate(batch.references()):
        assert float((out[s].double() - reference.out[0, :, 0]).norm() / reference.out.norm()) < 0.004
        assert (lse[:, s] - reference.lse[0, :, 0]).abs().max() < 1e-3 * lse.abs().max()


def test_small_probabilities_survive() -> None:
    """One key far above, 2,000 at e^-9 of it: together these weigh 20%, and P in f16 has them."""
    batch = make([2001], [1], (1, 1), 64)
    batch.q[:] = 0
    batch.q[..., 0] = 8.0
    batch.k[0][:] = 0
    batch.k[0][77, :, 0] = 9.0
    batch.cache.append(batch.k[0], batch.v[0], slots(batch, 0))
    _, lse = check(batch)
    assert 1.1 < float(lse.exp()) / float(torch.tensor(9.0).exp()) < 1.4
