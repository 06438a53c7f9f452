"""What attention_with_kvcache means: masks, caps, sinks, splits, stale slots, NaN, what is refused, torch.compile.

Regressions these catch: a window or a diagonal off by one; a sink that counts in each split, or has a value; a descale
that is dropped; bytes behind a sequence's end that reach a result; a NaN that reaches rows that do not see its key; a
wrong argument that is taken in silence.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import POISON, Batch, attention64, check, make, refusals, slots
from torch._dynamo.testing import CompileCounterWithBackend

import fp8cutlass
from fp8cutlass import PagedKVCache, UnsupportedError, attention_varlen, attention_with_kvcache
from fp8cutlass.cache.write import E4M3
from fp8cutlass.call.kvcache import KVCall, clamped, run
from fp8cutlass.emulator.decode import queries
from fp8cutlass.errors import NoKernelError

KEYS, ROWS = [70, 0, 130, 3, 64, 300], [1, 2, 5, 6, 20, 70]  # row 3 has more rows than keys
FORMATS: list[dict[str, Any]] = [
    {"format": "native"},
    {"format": "native", "v_scale": "pow2", "page_size": 32},
    {"format": "nhd", "page_size": 16},
    {"format": "hnd", "page_size": 128},
]
WINDOWS = [(-1, -1), (0, 0), (16, 0), (63, 64), (64, 0), (1000, 3), (-1, 9)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("arguments", FORMATS)
def test_mixed_batches(arguments: dict[str, Any], window: tuple[int, int], causal: bool) -> None:
    check(make(KEYS, ROWS, (4, 2), 64, **arguments), window_size=window, causal=causal)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_heads_that_share_keys(group: int, head_dim: int) -> None:
    check(make(KEYS, ROWS, (2 * group, 2), head_dim, seed=head_dim))


@pytest.mark.parametrize("options", [{}, {"window_size": (90, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("splits", [2, 3, 7, 64])
def test_splits_change_nothing(splits: int, options: dict[str, Any]) -> None:
    """Not to the bit: P is rounded by another maximum in each. Elements are off by two roundings of all P at most."""
    batch = make(KEYS, ROWS, options=options | {"sinks": torch.tensor([0.5, -1, 2, 4])})
    whole, whole_lse = check(batch, num_splits=1)
    parts, parts_lse = check(batch, num_splits=splits)
    weighed = [(r.probabilities @ r.values.abs())[0].transpose(0, 1) for r in batch.references()]
    bound = 4 * 2.0**-11 * torch.cat(weighed) + 2.0**-10 * whole.abs().double() + 1e-6
    assert ((parts.double() - whole.double()).abs() <= bound).all()
    seen = whole_lse > -math.inf
    assert torch.equal(parts_lse > -math.inf, seen)
    assert (parts_lse - whole_lse)[seen].abs().max() < 1e-3
    again, again_lse = batch.run(num_splits=splits)
    assert torch.equal(again, parts) and torch.equal(again_lse, parts_lse)


@pytest.mark.parametrize("softcap", [0.5, 15.0, 1e4])
def test_softcap(softcap: float) -> None:
    batch = make(KEYS, ROWS, deviation=3.0, options={"softcap": softcap})
    check(batch)
    check(batch, window_size=(30, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks(dtype: torch.dtype) -> None:
    """A sink is one logit in the denominator; -inf is none; far above all it leaves nothing."""
    sinks = torch.tensor([-1.0, 0.5, 3.0, -math.inf], dtype=dtype)
    batch = make(KEYS, ROWS)
    out, lse = check(batch, sinks=sinks)
    plain, plain_lse = check(batch)
    assert torch.equal(out[:, 3], plain[:, 3]) and torch.equal(lse[3], plain_lse[3])
    assert not torch.equal(out[:, :3], plain[:, :3])
    none, _ = batch.run(sinks=torch.full((4,), 80.0, dtype=dtype))
    assert (none.abs() < 1e-6).all()


def test_a_scale_and_a_negative_one() -> None:
    batch = make(KEYS, ROWS, (8, 2))
    check(batch, softmax_scale=0.3)
    check(batch, softmax_scale=-0.2)
    check(batch, softmax_scale=0.0)


@pytest.mark.parametrize("arguments", FORMATS)
def test_stale_bytes_never_reach_a_result(arguments: dict[str, Any]) -> None:
    """The same sequences in a cache of poison and in one of zeros give the same bits; so does other poison."""
    results = []
    for fill in (POISON, 0, 0x7E, 0x80):
        batch = make(KEYS, ROWS, **arguments)
        raw = batch.cache.pages
        assert raw is not None
        kept = raw.clone()
        for s, n in enumerate(batch.keys):
            size = batch.cache.page_size
            views = batch.cache.views()
            last = slots(batch, s, n, -(-n // size) * size) if n else torch.zeros(0, dtype=torch.int64)
            at = (last // size, last % size)
            views.k[at], views.v[at] = fill, fill
            if views.k_descale is not None:
                views.k_descale[at] = torch.tensor([fill] * 4, dtype=torch.uint8).view(torch.float32)
        used = batch.table[batch.table < batch.cache.num_pages].unique().long()
        free = torch.ones(batch.cache.num_pages, dtype=torch.bool)
        free[used] = False
        assert free.any()
        raw[:, free] = fill
        assert fill == POISON or not torch.equal(kept, raw)
        results.append(batch.run(num_splits=2))
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) and out.isfinite().all()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_nan_reaches_the_rows_that_see_its_key(which: str, splits: int) -> None:
    batch = make([200], [150], (4, 2), 64, page_size=16)
    clean, _ = batch.run(num_splits=splits)
    broken = 100
    at = slots(batch, 0, broken, broken + 1)
    view = getattr(batch.cache.views(), which)
    view[at // 16, at % 16, 1, 7] = POISON
    out, _ = batch.run(num_splits=splits, window_size=(20, 0))
    plain, _ = batch.run(num_splits=splits)
    own = torch.arange(150) + 50
    for found, sees in ((plain, own >= broken), (out, (own >= broken) & (own <= broken + 20))):
        of_head = found[:, 2:]  # those that share the second of K and V
        hit = of_head.isnan().any(-1) if which == "k" else of_head[..., 7].isnan()
        assert torch.equal(hit, sees[:, None].expand(-1, 2))
        assert not found[:, :2].isnan().any()
        if which == "v":
            assert int(found.isnan().sum()) == 2 * int(sees.sum())
    assert torch.equal(plain[~(own >= broken)], clean[~(own >= broken)])


def test_rows_without_keys() -> None:
    batch = make([3, 0, 40], [6, 4, 2])
    for sinks in (None, torch.ones(4)):
        out, lse = batch.run(sinks=sinks)
        assert (out[:3] == 0).all() and (lse[:, :3] == -math.inf).all() and (lse[:, 3:6] > -math.inf).all()
        assert (out[6:10] == 0).all() and (lse[:, 6:10] == -math.inf).all()
        assert out[3:6].any(-1).all()


def test_tokens_of_no_sequence_and_empty_batches() -> None:
    batch = make([40, 64], [3, 5])
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)
    out, lse = batch.run(cu_seqlens_q=ends)
    assert not out[0].any() and not out[6:].any() and (lse[:, 6:] == -math.inf).all() and (lse[:, 0] == -math.inf).all()
    assert out[1:6].any(-1).all()
    none = torch.zeros(0, 4, dtype=torch.int32)
    for q, more in (
        (batch.q.new_zeros(0, 1, 4, 64), {}),
        (batch.q[:0], {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}),
        (batch.q[:3], {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}),
    ):
        empty, lse = attention_with_kvcache(
            q, batch.cache, page_table=none, cache_seqlens=none[:, 0], return_lse=True, **more
        )
        assert empty.shape == q.shape and not empty.any() and lse.shape == ((0, 4, 1) if q.dim() == 4 else (4, len(q)))


def test_a_dense_batch_is_a_ragged_one() -> None:
    batch = make([40, 0, 64, 130], [3] * 4)
    out, lse = batch.run()
    options = {"page_table": batch.table, "cache_seqlens": batch.lengths, "return_lse": True}
    dense, dense_lse = attention_with_kvcache(batch.q.view(4, 3, 4, 64), batch.cache, **options)
    assert torch.equal(dense.flatten(0, 1), out) and dense_lse.shape == (4, 4, 3)
    assert torch.equal(dense_lse.transpose(0, 1).flatten(1), lse)
    room = torch.full_like(dense, math.nan)
    again = attention_with_kvcache(batch.q.view(4, 3, 4, 64), batch.cache, out=room, **options | {"return_lse": False})
    assert again is room and torch.equal(room, dense)


def test_against_attention_of_ragged_batches() -> None:
    """The prefill path on the dequantised cache, which quantises again: FP8's error and no more."""
    batch = make([70, 130, 64], [5, 130, 1], dtype=torch.bfloat16)
    k, v = batch.cache.dequantise(batch.table, batch.lengths)
    flat = [torch.cat([x[s, :, :n] for s, n in enumerate(batch.keys)], 1).transpose(0, 1).bfloat16() for x in (k, v)]
    ends = torch.tensor([0, 70, 200, 264], dtype=torch.int32)
    wanted = attention_varlen(batch.q, *flat, batch.ends, ends, 130, 130, causal=True)
    out, _ = batch.run()
    assert float((out.float() - wanted.float()).norm() / wanted.float().norm()) < 0.07


def test_splits_of_a_sequence_add_up_to_it() -> None:
    """A prefix and the rest, by their LSE, as a caller merges them."""
    batch = make([192], [1], options={"causal": False})
    whole, whole_lse = batch.run()
    size = batch.cache.page_size
    first, rest = (
        batch.run(page_table=table, cache_seqlens=torch.tensor([n], dtype=torch.int32))
        for table, n in ((batch.table[:, : 128 // size], 128), (batch.table[:, 128 // size :], 64))
    )
    w = torch.softmax(torch.stack((first[1], rest[1])), 0)[..., None].transpose(1, 2)
    merged = w[0] * first[0].float() + w[1] * rest[0].float()
    assert (merged - whole.float()).abs().max() < 2e-3
    assert (torch.logaddexp(first[1], rest[1]) - whole_lse).abs().max() < 1e-3


@pytest.mark.parametrize("arguments", FORMATS)
def test_append_then_attend_is_attention_over_more_keys(arguments: dict[str, Any]) -> None:
    """Ragged new tokens of ragged sequences: the same bits as a cache that had them before."""
    batch = make([40, 0, 131, 7], [2, 3, 1, 4], dtype=torch.bfloat16, **arguments)
    size, fewer = batch.cache.page_size, [33, 0, 128, 7]
    whole = batch.run(causal=True)
    other = make([40, 0, 131, 7], [2, 3, 1, 4], dtype=torch.bfloat16, **arguments)
    other.cache.pages.fill_(POISON)  # type: ignore[union-attr]
    cut = [(k[:n], v[:n]) for k, v, n in zip(other.k, other.v, fewer, strict=True)]
    at = torch.cat([slots(other, s, 0, n) for s, n in enumerate(fewer)])
    other.cache.append(*(torch.cat(x) for x in zip(*cut, strict=True)), at)
    new = [torch.cat([x[n:] for x, n in zip(xs, fewer, strict=True)]) for xs in (other.k, other.v)]
    more = torch.tensor([0, 7, 7, 10, 10], dtype=torch.int32)
    lengths = torch.tensor(fewer, dtype=torch.int32)
    found = other.run(cache_seqlens=lengths, k=new[0], v=new[1], cu_seqlens_k_new=more)
    assert size and lengths.tolist() == fewer
    if arguments.get("v_scale") == "pow2":  # what was rewritten by a larger descale may have lost a subnormal
        assert float((found[0].float() - whole[0].float()).norm() / whole[0].float().norm()) < 0.002
    else:
        assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


def test_all_queries_stand_at_one_place_without_a_mask() -> None:
    """FlashAttention's rule for the turn: tokens of q at cache_seqlens where there is neither causal nor a window."""
    batch = make([64], [3], (2, 2), 64, dtype=torch.bfloat16)
    angle = torch.rand(128, 32, generator=torch.Generator().manual_seed(3)) * 6
    turn = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    k, v = batch.k[0][:1].clone(), batch.v[0][:1].clone()
    batch.q[1:] = batch.q[:1]
    lengths = torch.tensor([40], dtype=torch.int32)
    full, _ = batch.run(
        cache_seqlens=lengths, k=k, v=v, cu_seqlens_k_new=torch.tensor([0, 1]).int(), causal=False, **turn
    )
    assert torch.equal(full[0], full[1]) and torch.equal(full[0], full[2])
    local, _ = batch.run(
        cache_seqlens=lengths, k=k, v=v, cu_seqlens_k_new=torch.tensor([0, 1]).int(), window_size=(99, 99),
        causal=False, **turn,
    )  # fmt: skip
    assert torch.equal(local[0], full[0]) and not torch.equal(local[0], local[1])


def test_mean_and_rotation_leave_attention_as_it_is() -> None:
    """Keys of a large common offset: better than without, and the LSE is that of the original logits."""
    random = torch.Generator().manual_seed(9)
    mean = 8 * torch.randn(2, 64, generator=random)
    plain = make([300, 64], [3, 1], dtype=torch.bfloat16)
    keys = [(k.float() + mean).bfloat16() for k in plain.k]
    errors = {}
    for name, arguments in {"plain": {}, "mean": {"k_mean": mean, "hadamard": True}}.items():
        batch = make([300, 64], [3, 1], dtype=torch.bfloat16, **arguments)
        batch.cache.append(torch.cat(keys), torch.cat(batch.v), torch.cat([slots(batch, s) for s in range(2)]))
        sinks = torch.tensor([-20.0, 0, 20, 40])
        out, lse = batch.run(sinks=sinks)
        begin, off = 0, []
        for s, rows in enumerate(batch.rows):
            exact = attention64(batch.q[begin : begin + rows], keys[s], batch.v[s], 0.125, right=0, sinks=sinks)
            off.append(float((out[begin : begin + rows].transpose(0, 1)[None] - exact.out).norm() / exact.out.norm()))
            if name == "mean":
                assert (lse[None, :, begin : begin + rows] - exact.lse).abs().max() < 0.2
            begin += rows
        errors[name] = max(off)
    assert errors["mean"] < 0.06 < 0.12 < errors["plain"]


def test_a_page_travels_as_bytes() -> None:
    """Swapped out and into other pages of another cache: the same bits."""
    batch = make(KEYS, ROWS, v_scale="pow2")
    out, lse = batch.run()
    other = PagedKVCache(40, 2, 64, v_scale="pow2")
    used = batch.table[batch.table < batch.cache.num_pages].unique().long()
    place = torch.arange(len(used)) + 20
    other.pages[:, place] = batch.cache.pages[:, used]  # type: ignore[index]
    moved = torch.full_like(batch.table, -5)
    for page, to in zip(used.tolist(), place.tolist(), strict=True):
        moved[batch.table == page] = to
    there = Batch(other, moved, batch.keys, batch.rows, batch.q, batch.k, batch.v).run()
    assert torch.equal(there[0], out) and torch.equal(there[1], lse)


def test_copy_on_write() -> None:
    """Two sequences share a full and a partial page; one of them copies the latter before it goes on."""
    batch = make([100], [1], (2, 2), 64, spare=4)
    cache, table = batch.cache, batch.table.repeat(2, 1)
    free = sorted(set(range(cache.num_pages)) - set(batch.table[0, :2].tolist()))[0]
    before, _ = batch.run()
    cache.copy_pages(batch.table[0, 1:2], torch.tensor([free], dtype=torch.int32))
    table[1, 1] = free
    k = v = torch.randn(2, 1, 2, 64, generator=torch.Generator().manual_seed(5)).half()
    q = torch.cat((batch.q, batch.q))[:, None]
    lengths = torch.tensor([100, 100], dtype=torch.int32)
    out = attention_with_kvcache(q, cache, page_table=table, cache_seqlens=lengths, k=k, v=v)
    assert not torch.equal(out[0], out[1])
    both = attention_with_kvcache(q, cache, page_table=table, cache_seqlens=lengths)
    assert torch.equal(both[0], both[1]) and torch.equal(both[0], before[:1])
    with pytest.raises(UnsupportedError, match="the slots of k and v has a number twice"):
        attention_with_kvcache(q, cache, page_table=batch.table.repeat(2, 1), cache_seqlens=lengths, k=k, v=v)


def test_layers_have_their_own_keys() -> None:
    cache = PagedKVCache(2, 1, 32, 16, layers=2, v_descale=torch.tensor([[0.5], [0.25]]))
    k, v = (torch.randn(10, 1, 32, generator=torch.Generator().manual_seed(s)).half() for s in (1, 2))
    cache.append(k, v, torch.arange(10), layer=1)
    q, table = torch.ones(1, 1, 1, 32).half(), torch.zeros(1, 1, dtype=torch.int32)
    zero, one = (attention_with_kvcache(q, cache, page_table=table, cache_seqlens=10, layer=i) for i in (0, 1))
    assert not zero.any() and one.any()


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    batch = make(KEYS, ROWS, options={"num_splits": 1})
    whole, begin = batch.run()[0], 0
    for s, rows in enumerate(ROWS):
        of = slice(begin, begin + rows)
        begin += rows
        alone = Batch(batch.cache, batch.table[s : s + 1], KEYS[s : s + 1], [rows], batch.q[of], [], [], batch.options)
        assert torch.equal(alone.run()[0], whole[of])


def test_the_example_of_the_documentation() -> None:
    text = (Path(fp8cutlass.__file__).parents[2] / "docs" / "serving.md").read_text()
    step = text.split("```python")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(step, names)  # noqa: S102
    assert names["out"].shape == (2, 1, 32, 128) and names["out"].isfinite().all()


def test_an_int_length_is_the_length_of_all() -> None:
    batch = make([64, 64], [1, 1])
    assert torch.equal(batch.run(cache_seqlens=64)[0], batch.run()[0])


def refused(batch: Batch) -> list[tuple[dict[str, Any], str]]:
    q, cache, table, lengths, ends = batch.q, batch.cache, batch.table, batch.lengths, batch.ends
    far = table.clone()
    far[0, 0] = cache.num_pages
    below = table.clone()
    below[2, 1] = -1
    pair = (torch.zeros(4, 16, 2, 64).to(E4M3),) * 2
    k = torch.zeros(3, 1, 2, 64).half()
    return [
        ({"q": q[0]}, r"q must be \(B, S, H, D\)"),
        ({"q": q.float()}, "q must be bfloat16 or float16, got torch.float32"),
        ({"q": q.to(E4M3)}, "q must be bfloat16 or float16, got torch.float8_e4m3fn"),
        ({"q": q[..., :32]}, "q must have head_dim 64"),
        ({"q": q[:, :3]}, "multiple of 2 heads, got 64 and 3"),
        ({"cache": None}, "cache must be a PagedKVCache or"),
        ({"cache": fp8cutlass.attention}, "cache must be a PagedKVCache or"),
        ({"cache": (pair[0][0], pair[0][0])}, r"k_cache and v_cache must be \(pages"),
        ({"cache": pair, "layer": 1}, "layer is for a PagedKVCache"),
        (
            {"cache": (pair[0].half(), pair[0].half())},
            "must be float8_e4m3fn, or its bytes as uint8, got torch.float16",
        ),
        ({"cache": pair, "page_table": None}, "a row for each of 3 sequences, got 4"),
        ({"cache": pair, "k_descale": torch.ones(3)}, r"k_descale must be .* \(2,\) or \(3, 2\)"),
        ({"page_table": None}, "page_table is missing"),
        ({"page_table": table.long()}, r"page_table must be \(3, pages\) int32"),
        ({"page_table": table[:2]}, r"page_table must be \(3, pages\) int32"),
        ({"page_table": far}, f"page_table of sequence 0 must name pages 0 to {cache.num_pages - 1}, got"),
        ({"page_table": below}, "page_table of sequence 2 must name pages .*got -1"),
        ({"page_table": table[:, :1]}, "sequence 0 has 70 keys, its 1 pages hold 0 to 64"),
        ({"cache_seqlens": lengths.long()}, "cache_seqlens must be a one-dimensional int32"),
        ({"cache_seqlens": lengths[:2]}, "cache_seqlens must have 3 elements, got 2"),
        ({"cache_seqlens": lengths - 50}, "sequence 1 has -10 keys"),
        ({"cache_seqlens": 1.0}, "cache_seqlens must be a one-dimensional int32"),
        ({"cu_seqlens_q": ends.long()}, "cu_seqlens_q must be a one-dimensional int32"),
        ({"cu_seqlens_q": -ends}, "cu_seqlens_q must rise from 0 at least"),
        ({"cu_seqlens_q": ends.flip(0)}, "cu_seqlens_q must rise from 0 at least"),
        ({"cu_seqlens_q": ends + 1}, "to the 8 tokens at most"),
        ({"cu_seqlens_q": ends[:0]}, "cu_seqlens_q needs an element"),
        ({"max_seqlen_q": 2.5}, "max_seqlen_q must be an integer"),
        ({"k": k}, "k and v go together"),
        ({"k": k, "v": k.bfloat16()[:2]}, r"k and v must be \(3, S', 2, 64\)"),
        ({"k": k, "v": k, "cache_seqlens": 128}, "sequence 0 has 128 keys and 1 new ones, its 2 pages hold 0 to 128"),
        (
            {"k": k.to(E4M3), "v": k.to(E4M3)},
            "k must be bfloat16 or float16, got torch.float8_e4m3fn: append quantises",
        ),
        ({"k": k[:, 0], "v": k[:, 0], "cu_seqlens_k_new": ends}, "cu_seqlens_k_new must rise from 0 at least to the 3"),
        ({"cu_seqlens_k_new": ends}, "cu_seqlens_k_new goes with k and v"),
        ({"rotary_cos": torch.ones(9, 8), "rotary_sin": torch.ones(9, 8)}, "k and v are missing"),
        ({"rotary_cos": torch.ones(9, 8)}, "rotary_cos and rotary_sin go together"),
        ({"rotary_interleaved": 1}, "rotary_interleaved must be True or False"),
        ({"k_descale": 1.0}, "k_descale is for .k_cache, v_cache.: a PagedKVCache has its own"),
        ({"layer": 1}, "layer must be 0 to 0, got 1"),
        ({"softmax_scale": math.nan}, "softmax_scale must be finite"),
        ({"causal": 1}, "causal must be True or False"),
        ({"return_lse": None}, "return_lse must be True or False"),
        ({"window_size": (-2, 0)}, "window_size must be"),
        ({"softcap": -1.0}, "softcap must be 0 or a positive number"),
        ({"softcap": math.nan}, "softcap must be 0 or a positive number"),
        ({"softcap": 1e-30}, "softcap must be 0 or at least"),
        ({"sinks": torch.ones(3)}, r"sinks must be \(4,\)"),
        ({"sinks": torch.ones(4).double()}, r"sinks must be \(4,\)"),
        ({"num_splits": -1}, "num_splits must be 0 to 256"),
        ({"num_splits": True}, "num_splits must be 0 to 256"),
        ({"out": q[:1]}, "out must be"),
        ({"out": q[:1].expand(q.shape)}, "out is expanded"),
    ]


def test_refused() -> None:
    """By name, and before a byte of the cache is written."""
    batch = make([70, 40, 128], [2, 1, 5])
    batch.table = batch.table[:, :2]
    before = batch.cache.pages.clone()  # type: ignore[union-attr]
    usual = {
        "q": batch.q, "cache": batch.cache, "page_table": batch.table, "cache_seqlens": batch.lengths,
        "cu_seqlens_q": batch.ends,
    }  # fmt: skip
    for change, text in refused(batch):
        given = usual | change
        with pytest.raises(UnsupportedError, match=text):
            attention_with_kvcache(given.pop("q"), given.pop("cache"), **given)
    assert torch.equal(batch.cache.pages, before)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        attention_with_kvcache(batch.q, batch.cache, cache_leftpad=batch.lengths)  # type: ignore[call-arg]


def test_what_torch_could_do() -> None:
    batch = make([70], [2])
    usual = {"page_table": batch.table, "cache_seqlens": batch.lengths, "cu_seqlens_q": batch.ends}
    with pytest.raises(NoKernelError, match="requires_grad"):
        attention_with_kvcache(batch.q.requires_grad_(), batch.cache, **usual)
    moved = make([70], [2], k_mean=torch.ones(2, 64))
    with pytest.raises(UnsupportedError, match="softcap bends logits"):
        moved.run(softcap=5.0)


def call_of(batch: Batch, **changes: Any) -> KVCall:
    views = batch.cache.views()
    static = [d[0].expand(len(batch.keys), -1) for d in (batch.cache.k_descale, batch.cache.v_descale)]
    descales = static if views.k_descale is None else [views.k_descale, views.v_descale]
    values: dict[str, Any] = {
        "q": batch.q, "k": views.k, "v": views.v, "k_descale": descales[0], "v_descale": descales[1],
        "page_table": batch.table, "used": batch.lengths, "cu_q": batch.ends, "sinks": None, "mean": None,
        "scale": batch.q.shape[2] ** -0.5, "left": -1, "right": 0, "softcap": 0.0, "splits": 0, "hadamard": False,
        "return_lse": True,
    }  # fmt: skip
    return KVCall(**values | changes)


@pytest.mark.parametrize("arguments", FORMATS)
def test_what_only_a_device_knows_is_clamped(arguments: dict[str, Any]) -> None:
    """The operator itself takes wild numbers, stays in its tensors, and is right where the numbers are."""
    batch = make([70, 40, 128], [2, 1, 5], **arguments)
    right, _ = run(call_of(batch))
    wild = batch.table.clone()
    wild[1] = torch.tensor([2**31 - 1, -(2**31)] * 8)[: wild.shape[1]]
    used = torch.tensor([70, 2**31 - 1, 128], dtype=torch.int32)
    found, _ = run(call_of(batch, page_table=wild, used=used))
    assert torch.equal(found[:2], right[:2]) and torch.equal(found[3:], right[3:])
    ends = torch.tensor([-9, 2, 1, 2**31 - 1], dtype=torch.int32)
    assert clamped(call_of(batch, cu_q=ends))[2].tolist() == [0, 2, 2, 8]
    found, lse = run(call_of(batch, cu_q=ends, used=-used))
    assert not found.any() and (lse == -math.inf).all()
    found, _ = run(call_of(batch, cu_q=ends))
    assert torch.equal(found[:2], right[:2]) and torch.equal(found[3:], right[3:])


def test_other_devices_have_no_kernel_yet() -> None:
    """Said before anything is appended: here on tensors without memory."""
    cache = PagedKVCache(4, 2, 64, device="meta")
    q, k = torch.zeros(1, 1, 4, 64, device="meta").half(), torch.zeros(1, 1, 2, 64, device="meta").half()
    table = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    with pytest.raises(NoKernelError, match="no kernel for meta"):
        attention_with_kvcache(q, cache, page_table=table, cache_seqlens=3, k=k, v=k)
    with pytest.raises(NoKernelError, match="no kernel for meta"):
        run(call_of(make([70], [2]), q=q[0]))


@pytest.mark.parametrize("arguments", FORMATS)
def test_torch_compile(arguments: dict[str, Any]) -> None:
    """One graph, with append in it; the same bits; no second compilation for other lengths of the cache."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def step(batch: Batch, cache: PagedKVCache, lengths: torch.Tensor, k: torch.Tensor) -> Any:
        return attention_with_kvcache(
            batch.q.view(4, 1, 4, 64), cache, page_table=batch.table, cache_seqlens=lengths, k=k, v=k,
            window_size=(50, 0), softcap=20.0, return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    results = []
    for function in (step, compiled):
        batch = make([40, 3, 64, 130], [1] * 4, **arguments)
        batch.table = batch.table.where(batch.table < 2**30, 0)
        for cut in (3, 2):
            k = batch.q.view(4, 1, 4, 64)[:, :, :2] * cut
            results.append(function(batch, batch.cache, batch.lengths - cut + 1, k))
        results.append((batch.cache.pages,) * 2)
    assert backend.frame_count == 1
    for (out, lse), (wanted, wanted_lse) in zip(results[3:], results[:3], strict=True):
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("kind", ["side by side", "five axes", "pair"])
def test_torch_compile_of_engines_caches(kind: str) -> None:
    """K and V that are views of one tensor, and that are not; lengths and shapes change."""
    torch._dynamo.reset()

    def step(q: torch.Tensor, cache: PagedKVCache, table: torch.Tensor, lengths: torch.Tensor, k: torch.Tensor) -> Any:
        return attention_with_kvcache(q, cache, page_table=table, cache_seqlens=lengths, k=k, v=k, return_lse=True)

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        for rows in (3, 1):
            raw = torch.zeros(6, 16, 2, 128, dtype=torch.uint8)
            raw = raw if kind == "side by side" else raw.view(6, 2, 16, 2, 64)
            pair = (raw[:, 0].clone(), raw[:, 1].clone())
            cache = PagedKVCache.from_tensor(pair if kind == "pair" else raw, k_descale=0.02, v_descale=0.01)
            random = torch.Generator().manual_seed(rows)
            q, k = (torch.randn(2, rows, heads, 64, generator=random).half() for heads in (4, 2))
            table = torch.arange(6, dtype=torch.int32).view(2, 3)
            for length in (0, 15, 20):
                lengths = torch.tensor([length, length + 1], dtype=torch.int32)
                results.append(function(q, cache, table, lengths, k))
            results.append(tuple(x.clone() for x in (cache.views().k, cache.views().v)))
    for found, wanted in zip(results[8:], results[:8], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_fake_tensors_and_the_operators_rules() -> None:
    batch = make([70], [2])
    call = call_of(batch)
    arguments = [getattr(call, name) for name in KVCall.__dataclass_fields__]
    arguments[5:5] = [1.0, 1.0]  # numbers where descales are none
    torch.library.opcheck(torch.ops.fp8cutlass.attention_with_kvcache.default, arguments)
    q16, _ = queries(batch.q)
    assert q16.shape == batch.q.shape


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_calls(data: st.DataObject) -> None:
    """Lengths, heads, pages, masks and what goes with them, at random."""
    draw = data.draw
    edges = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 128, 129])
    count = draw(st.integers(1, 4))
    keys = [draw(edges | st.integers(0, 400)) for _ in range(count)]
    rows = [draw(st.integers(0, 3) | edges) for _ in range(count)]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    arguments = dict(draw(st.sampled_from(FORMATS)))
    arguments["page_size"] = draw(st.sampled_from([16, 32, 64, 128, 48]))
    options = {
        "window_size": (draw(st.integers(-1, 200)), draw(st.integers(-1, 200))),
        "causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 2.0, 30.0])),
        "num_splits": draw(st.integers(0, 9)),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 4, kv_heads * group)
    batch = make(
        keys, rows, (kv_heads * group, kv_heads), draw(st.sampled_from([16, 48, 64, 128])),
        seed=draw(st.integers(0, 99)), dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])), **arguments,
    )  # fmt: skip
    check(batch, **options)


def test_gates_refuse_another_sequence() -> None:
    """The gates of these tests see an output that is wrong by a little in one row."""
    batch = make(KEYS, ROWS)
    out, lse = batch.run()
    references = batch.references()
    assert refusals(out, lse, references, batch.rows) == []
    moved = out.clone()
    moved[20] = out[21]
    assert refusals(moved, lse, references, batch.rows)
    assert refusals(out * 1.01, lse, references, batch.rows)
    assert refusals(out, lse + 0.01, references, batch.rows)
