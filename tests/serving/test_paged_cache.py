"""PagedKVCache: what append writes, byte by byte, and what it leaves; copies, engines' layouts, refusals.

Regressions these catch: a token in another slot, head or page; a descale that does not follow its token; padding that
is written; a page whose bytes are not all of it; a descale of V that is lost when it grows; strides of an engine's
tensor that are guessed.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from paged_cases import POISON, make, rope64, slots

from fp8cutlass import PagedKVCache, UnsupportedError, quantize
from fp8cutlass.cache import write
from fp8cutlass.cache.held import held
from fp8cutlass.cache.write import E4M3, power_of_two
from fp8cutlass.quant.rope import rope
from fp8cutlass.quant.rotate import rotate

FORMATS: list[dict[str, Any]] = [
    {"format": "native"},
    {"format": "native", "v_scale": "pow2"},
    {"format": "nhd"},
    {"format": "hnd"},
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, given: torch.Tensor) -> float:
    return float((found.double() - given.double()).norm() / given.double().norm())


def test_the_bytes_of_a_native_page() -> None:
    """Parsed here by their description, head by head."""
    batch = make([70], [1], (2, 2), 32, page_size=32)
    raw, size = batch.cache.pages, 32 * 32
    assert raw is not None and batch.cache.page_bytes == raw.shape[2] == 2 * (2 * size + 4 * 32 + 4 + 124)
    for token in (0, 31, 32, 69):
        page = raw[0, int(batch.table[0, token // 32])].view(2, -1)
        for head in range(2):
            row = slice(token % 32 * 32, token % 32 * 32 + 32)
            k8, v8 = (page[head, i * size : (i + 1) * size][row].view(E4M3).float() for i in (0, 1))
            floats = page[head, 2 * size :].view(torch.float32)
            given = batch.k[0][token, head].float()
            assert float(floats[token % 32]) == pytest.approx(float(given.abs().max()) / 448, rel=1e-6)
            assert float(k8.abs().max()) == 448
            assert (k8 * floats[token % 32] - given).abs().max() <= 2**-4 * given.abs().max()
            assert float(floats[32]) == float(batch.cache.v_descale[0, head])
            assert torch.equal(
                v8, quantize(batch.v[0][token, head].view(1, 1, 1, 32), descale=floats[32:33])[0].float()[0, 0, 0]
            )


@pytest.mark.parametrize(("head_dim", "page_size"), [(16, 16), (96, 48), (128, 64), (256, 128)])
def test_records_of_heads_begin_on_lines(head_dim: int, page_size: int) -> None:
    """Of 128 bytes, and the padding is less than one."""
    cache = PagedKVCache(2, 3, head_dim, page_size)
    record, used = cache.views().k.stride(2), 2 * page_size * head_dim + 4 * page_size + 4
    assert record % 128 == 0 and 0 <= record - used < 128 and cache.page_bytes == 3 * record
    assert cache.pages is not None and cache.pages[0].data_ptr() % 64 == 0


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("arguments", FORMATS)
def test_what_was_appended_comes_back(arguments: dict[str, Any], page_size: int) -> None:
    batch = make([100, 0, 1, 64, 257], [1] * 5, (4, 2), 64, page_size=page_size, dtype=torch.bfloat16, **arguments)
    k, v = batch.cache.dequantise(batch.table, batch.lengths)
    for s, n in enumerate(batch.keys):
        if n:
            assert error(k[s, :, :n].transpose(0, 1), batch.k[s]) < 0.03
            assert error(v[s, :, :n].transpose(0, 1), batch.v[s]) < 0.03
        assert not k[s, :, n:].any() and not v[s, :, n:].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reshape_and_cache(layout: str, per_head: bool, dtype: torch.dtype, head_dim: int) -> None:
    """42 tokens at random slots of a poisoned cache of 8 heads, scales that are not 1; the others are not touched."""
    tokens, heads, size, count = 42, 8, 16, 6
    k_descale = torch.rand(heads, generator=torch.Generator().manual_seed(2)) * 0.02 + 0.011 if per_head else 0.0137
    v_descale = torch.rand(heads, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.011 if per_head else 0.0121
    shape = (count, size, heads, head_dim) if layout == "nhd" else (count, heads, size, head_dim)
    caches = [torch.full(shape, POISON, dtype=torch.uint8) for _ in range(2)]
    cache = PagedKVCache.from_tensor(tuple(caches), layout=layout, k_descale=k_descale, v_descale=v_descale)
    k, v = draw(tokens, heads, head_dim, seed=5, dtype=dtype), draw(tokens, heads, head_dim, seed=6, dtype=dtype)
    slot = torch.randperm(count * size, generator=torch.Generator().manual_seed(4))[:tokens]
    cache.append(k, v, slot)
    for x, raw, descale in ((k, caches[0], k_descale), (v, caches[1], v_descale)):
        rows = raw if layout == "nhd" else raw.transpose(1, 2)
        rows = rows.reshape(-1, heads, head_dim)
        factor = torch.as_tensor(descale).expand(heads)[:, None]
        wanted = (x.float() * factor.reciprocal()).clamp(-448, 448).to(E4M3)
        assert torch.equal(rows[slot], wanted.view(torch.uint8))
        assert torch.allclose(rows[slot].view(E4M3).float() * factor, x.float(), rtol=0.1, atol=1e-3)
        rest = torch.ones(count * size, dtype=torch.bool)
        rest[slot] = False
        assert (rows[rest] == POISON).all()


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_e4m3_is_copied_and_float32_is_quantised(layout: str) -> None:
    """E4m3 to pages without descales, where nothing changes keys before."""
    cache, k = PagedKVCache(2, 2, 32, 16, format=layout, k_descale=0.5), draw(3, 2, 32, dtype=torch.float32)
    slot = torch.tensor([5, -1, 20])
    cache.append(k.to(E4M3), k, slot)
    rows = cache.views().k.flatten(0, 1)[[5, 20]]
    assert torch.equal(rows, k.to(E4M3).view(torch.uint8)[[0, 2]])
    assert torch.equal(cache.views().v.flatten(0, 1)[[5, 20]], rows)  # by a descale of 1
    cache.append(k, k.to(E4M3), slot)
    assert torch.equal(cache.views().k.flatten(0, 1)[[5, 20]].view(E4M3).float(), (2 * k)[[0, 2]].to(E4M3).float())
    rotated = PagedKVCache(2, 2, 32, 16, format=layout, hadamard=True)
    with pytest.raises(UnsupportedError, match="append quantises"):
        rotated.append(k.to(E4M3), k, slot)


def engines(kind: str, page: int) -> tuple[Any, dict[str, Any]]:
    """A cache of 5 pages, 2 heads, head_dim 32, as an engine has it, uint8 poison; and how it is named here."""

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=torch.uint8)

    one: dict[str, tuple[Any, dict[str, Any]]] = {
        "flashattention": ((room(5, page, 2, 32), room(5, page, 2, 32)), {}),
        "flashinfer nhd": (room(5, 2, page, 2, 32).view(E4M3), {"layout": "nhd"}),
        "flashinfer hnd": (room(5, 2, 2, page, 32), {"layout": "hnd"}),
        "xqa pair hnd": ((room(5, 2, page, 32), room(5, 2, page, 32)), {"layout": "hnd"}),
        "vllm 0.10": (room(2, 5, page, 2, 32), {"kv_axis": 0}),
        "vllm 0.33 hnd": (room(5, 2, page, 64), {"layout": "hnd"}),
        "vllm 0.33 nhd": (room(5, page, 2, 64).transpose(1, 2), {"layout": "hnd"}),
        "vllm views": (room(5, page, 2, 64).split(32, 3), {}),
        "vllm all layers": (room(5, 4, page, 2, 64)[:, 2], {"layout": "nhd"}),
        "sglang": ((room(5 * page, 2, 32), room(5 * page, 2, 32)), {"page_size": page}),
    }
    return one[kind]


KINDS = ("flashattention", "flashinfer nhd", "flashinfer hnd", "xqa pair hnd", "vllm 0.10", "vllm 0.33 hnd",
         "vllm 0.33 nhd", "vllm views", "vllm all layers", "sglang")  # fmt: skip


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_layouts(kind: str, page: int) -> None:
    """A token is found where the engine would look for it, and nowhere else."""
    raw, named = engines(kind, page)
    cache = PagedKVCache.from_tensor(raw, k_descale=0.013, v_descale=0.02, **named)
    assert (cache.num_pages, cache.page_size, cache.kv_heads, cache.head_dim) == (5, page, 2, 32)
    k, v = draw(2, 2, 32, seed=1), draw(2, 2, 32, seed=2)
    at = [(3, page - 1), (1, page // 2)]
    cache.append(k, v, torch.tensor([p * page + i for p, i in at]))

    def row(which: int, p: int, i: int, head: int) -> torch.Tensor:
        if kind in ("flashattention", "vllm views"):
            return raw[which][p, i, head]
        if kind == "sglang":
            return raw[which][p * page + i, head]
        if kind == "xqa pair hnd":
            return raw[which][p, head, i]
        if kind == "vllm 0.10":
            return raw[which, p, i, head]
        if kind.startswith("vllm"):
            return (raw[p, i, head] if kind == "vllm all layers" else raw[p, head, i])[32 * which : 32 * which + 32]
        return raw[p, which, i, head] if kind == "flashinfer nhd" else raw[p, which, head, i]

    for t, (p, i) in enumerate(at):
        for head in range(2):
            for which, (x, descale) in enumerate(((k, 0.013), (v, 0.02))):
                found = row(which, p, i, head).view(E4M3).float() * descale
                assert error(found, x[t, head]) < 0.06
    everything = torch.cat([x.view(torch.uint8).flatten() for x in (raw if isinstance(raw, tuple) else [raw])])
    assert int((everything != POISON).sum()) <= 2 * 2 * 2 * 32 < everything.numel()


@pytest.mark.parametrize("arguments", FORMATS)
def test_padding_and_what_is_out_of_range_are_not_written(arguments: dict[str, Any]) -> None:
    cache = PagedKVCache(3, 2, 32, 16, **arguments)
    assert cache.pages is not None
    cache.pages.fill_(POISON)
    k, v = draw(6, 2, 32), draw(6, 2, 32, seed=1)
    before = cache.pages.clone()
    cache.append(k, v, torch.full((6,), -1))
    assert torch.equal(cache.pages, before)
    cache.append(k[:0], v[:0], torch.zeros(0, dtype=torch.int64))
    assert torch.equal(cache.pages, before)
    some = torch.tensor([-1, 16, -1, 17, 18, -1])
    cache.append(k, v, some)
    written = cache.pages.clone()
    cache.pages.fill_(POISON)
    kept = some >= 0
    cache.append(k[kept], v[kept], some[kept])
    assert torch.equal(cache.pages, written) and not torch.equal(written, before)
    assert torch.equal(written[:, [0, 2]], before[:, [0, 2]])


@pytest.mark.parametrize("arguments", FORMATS)
def test_on_a_device_nobody_looks_at_slots(arguments: dict[str, Any]) -> None:
    """What cards do with numbers that the CPU refuses: out of range is ignored, of two tokens the last is written."""
    k, v = draw(6, 2, 32), draw(6, 2, 32, seed=1)
    caches = [PagedKVCache(3, 2, 32, 16, **arguments) for _ in range(2)]
    wild = torch.tensor([16, 48, 2**40, 17, 16, -7])
    descales = (caches[0].k_descale[0], caches[0].v_descale[0])
    caches[0].write(k, v, wild, 0, descales)
    caches[1].append(k[[4, 3]], v[[4, 3]], torch.tensor([16, 17]))
    assert torch.equal(caches[0].pages, caches[1].pages)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"slot_mapping must be -1 to 47, got -7.*twice: 16"):
        caches[0].append(k, v, wild)


def test_a_token_by_itself_and_in_a_batch_have_the_same_bytes() -> None:
    one, many = (PagedKVCache(3, 2, 64, 16) for _ in range(2))
    k, v = draw(40, 2, 64), draw(40, 2, 64, seed=1)
    many.append(k, v, torch.arange(40))
    for t in range(40):
        one.append(k[t : t + 1], v[t : t + 1], torch.tensor([t], dtype=torch.int32))
    assert torch.equal(one.pages, many.pages)  # type: ignore[arg-type]


def test_powers_of_two() -> None:
    """The least one whose 448-fold is not below the magnitude, over all octaves."""
    for exponent in range(-126, 119):
        top = torch.tensor([448.0]) * 2.0**exponent
        assert float(power_of_two(top)) == 2.0**exponent
        assert float(power_of_two(torch.nextafter(top, torch.tensor(math.inf)))) == 2.0 ** (exponent + 1)
    assert float(power_of_two(torch.zeros(1))) == 0 and float(power_of_two(torch.tensor([1e-44]))) == 2.0**-126


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_a_growing_descale_moves_what_is_there(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of rising magnitude, some at a time, in several pages: the last descale fits, and older tokens lose what
    the new one cannot hold, no more."""
    monkeypatch.setattr(write, "CHUNK", chunk)
    cache = PagedKVCache(4, 2, 32, 16, v_scale="pow2")
    cache.pages.fill_(POISON)  # type: ignore[union-attr]
    size = torch.exp2(torch.linspace(0, 6, 48))[:, None, None]
    v = draw(48, 2, 32).float() * size
    v = v.bfloat16()
    order = [range(0, 20), range(20, 21), range(21, 40), range(40, 48)]
    for part in order:
        t = torch.tensor([*part])
        cache.append(v[t], v[t], t + 16)
    inside = cache.views().v_descale
    assert inside is not None
    for page in range(3):
        magnitude = v[page * 16 : page * 16 + 16].float().abs().amax((0, 2))
        assert torch.equal(inside[page + 1], power_of_two(magnitude))
    _, found = cache.dequantise(torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([48]))
    step = inside[1:].repeat_interleave(16, 0)[:, :, None] * 2.0**-9
    off = (found[0].transpose(0, 1) - v.float()).abs()
    assert (off <= torch.maximum(v.float().abs() * 2.0**-4, step) * 1.001).all()


def test_a_page_that_begins_anew_forgets_its_descale() -> None:
    cache = PagedKVCache(2, 1, 32, 16, v_scale="pow2")
    big, small = 100 * draw(3, 1, 32), draw(3, 1, 32, seed=1)
    cache.append(big, big, torch.arange(3))
    cache.append(small, small, torch.arange(3))
    fresh = PagedKVCache(2, 1, 32, 16, v_scale="pow2")
    fresh.append(small, small, torch.arange(3))
    assert torch.equal(cache.views().v_descale, fresh.views().v_descale)  # type: ignore[arg-type]
    assert torch.equal(cache.views().v[0, :3], fresh.views().v[0, :3])


@pytest.mark.parametrize("arguments", FORMATS)
def test_copies_of_pages(arguments: dict[str, Any]) -> None:
    """All layers, all bytes; the source of one pair may be the target of another."""
    cache = PagedKVCache(6, 2, 32, 16, layers=2, **arguments)
    cache.pages.copy_(torch.randint(0, 256, cache.pages.shape, dtype=torch.uint8))  # type: ignore[union-attr]
    before = cache.pages.clone()  # type: ignore[union-attr]
    cache.copy_pages(torch.tensor([0, 3, 5]), torch.tensor([3, 1, 0]))
    wanted = before.clone()
    wanted[:, [3, 1, 0]] = before[:, [0, 3, 5]]
    assert torch.equal(cache.pages, wanted)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="dst must be 0 to 5, got 6"):
        cache.copy_pages(torch.tensor([0]), torch.tensor([6]))
    with pytest.raises(UnsupportedError, match="dst has a number twice: 1"):
        cache.copy_pages(torch.tensor([0, 2]), torch.tensor([1, 1]))
    with pytest.raises(UnsupportedError, match="src must be pages 0 to 5"):
        cache.copy_pages(torch.tensor([-1]), torch.tensor([1]))
    cache.copy_pages(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(cache.pages, wanted)  # type: ignore[arg-type]


def test_reset() -> None:
    cache = PagedKVCache(4, 1, 32, 16)
    cache.pages.fill_(POISON)  # type: ignore[union-attr]
    cache.reset(torch.tensor([1, 3]))
    assert not cache.pages[:, [1, 3]].any() and (cache.pages[:, [0, 2]] == POISON).all()  # type: ignore[index]
    cache.reset()
    assert not cache.pages.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("columns", [16, 64])
def test_rope_against_complex_numbers(columns: int, interleaved: bool) -> None:
    x, at = draw(9, 3, 64), torch.tensor([0, 5, 3, 3, 31, 7, 8, 9, 1])
    angle = torch.rand(32, columns // 2, generator=torch.Generator().manual_seed(1)) * 7
    cos, sin = angle.cos(), angle.sin()
    found, wanted = rope(x, cos, sin, at, interleaved), rope64(x, cos, sin, at, interleaved)
    assert found.dtype == x.dtype and torch.equal(found[..., columns:], x[..., columns:])
    assert (found.float() - wanted.float()).abs().max() <= 2**-7 and (found == wanted).float().mean() > 0.99


def test_append_turns_and_centres_and_rotates() -> None:
    """The same as doing each beforehand."""
    mean = draw(2, 64, seed=3).float()
    cos, sin = torch.rand(64, 16), torch.rand(64, 16)
    at, slot = torch.tensor([4, 9, 60]), torch.tensor([1, 17, 2])
    k, v = draw(3, 2, 64), draw(3, 2, 64, seed=1)
    whole = PagedKVCache(2, 2, 64, 16, k_mean=mean, hadamard=True)
    whole.append(k, v, slot, positions=at, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    steps = PagedKVCache(2, 2, 64, 16)
    turned = rope64(k, cos, sin, at, False).float() - mean
    steps.append(rotate(turned[None], 64)[0].bfloat16(), v, slot)
    k1, k2 = (c.views().k[slot // 16, slot % 16].view(E4M3).float() for c in (whole, steps))
    assert error(k1, k2) < 0.01
    assert torch.equal(whole.views().v, steps.views().v)


def test_nan_and_infinity_stay_in_their_elements() -> None:
    cache = PagedKVCache(1, 1, 32, 16, v_scale="pow2")
    k, v = draw(3, 1, 32), draw(3, 1, 32, seed=1)
    k[1, 0, 4], v[1, 0, 5], v[2, 0, 6] = math.nan, math.inf, math.nan
    cache.append(k, v, torch.arange(3))
    found = cache.dequantise(torch.tensor([[0]], dtype=torch.int32), torch.tensor([3]))
    for x, given in zip(found, (k, v), strict=True):
        broken = ~given.isfinite()
        assert torch.equal(x[0, :, :3].transpose(0, 1).isnan(), broken)
        assert error(x[0, :, :3].transpose(0, 1)[~broken], given[~broken]) < 0.04


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_pages": 0}, "num_pages must be an integer, at least 1, got 0"),
    ({"layers": True}, "layers must be an integer"),
    ({"head_dim": 40}, "head_dim must be a multiple of 16, got 40"),
    ({"page_size": 8}, "page_size must be a multiple of 16 in format native, got 8"),
    ({"format": "nhdc"}, "format must be one of native, nhd, hnd"),
    ({"v_scale": "page"}, "v_scale must be one of static, pow2"),
    ({"k_descale": 1.0}, "k_descale is for formats nhd and hnd"),
    ({"v_scale": "pow2", "v_descale": 1.0}, "it goes with no v_descale"),
    ({"v_scale": "pow2", "format": "hnd"}, "finds V's descales in format native"),
    ({"v_descale": 0.0}, "v_descale must be finite"),
    ({"v_descale": torch.ones(3)}, r"v_descale must be .* \(2,\)"),
    ({"k_mean": torch.ones(2, 64).half()}, "k_mean must be a float32"),
    ({"hadamard": True, "head_dim": 80}, "hadamard needs a head_dim"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_refused(arguments: dict[str, Any], text: str) -> None:
    sizes = {"num_pages": 2, "kv_heads": 2, "head_dim": 64, "page_size": 16}
    with pytest.raises(UnsupportedError, match=text):
        PagedKVCache(**{**sizes, **arguments})


def test_engines_tensors_that_are_refused() -> None:
    def room(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    refused: list[tuple[Any, dict[str, Any], str]] = [
        ((room(4, 16, 2, 32), room(4, 16, 2, 64)), {}, "differ in shape"),
        ((room(4, 16, 2, 32).float(), room(4, 16, 2, 32).float()), {}, "must be float8_e4m3fn"),
        ((room(4, 16, 2, 24), room(4, 16, 2, 24)), {}, "head_dim of the cache of K must be a multiple of 16, got 24"),
        ((room(4, 16, 32, 2).transpose(2, 3),) * 2, {}, "last axis of the cache of K must be contiguous"),
        ((room(4, 16, 2, 40)[..., :32],) * 2, {}, "head stride of the cache of K must be a multiple of 16"),
        ((room(4, 16, 1, 32).expand(4, 16, 2, 32),) * 2, {}, "head stride .* got 0"),
        ((room(33, 2, 32),) * 2, {"page_size": 16}, "whole pages of page_size=16, got 33"),
        ((room(32, 2, 32),) * 2, {}, "page_size=None; accepted are"),
        (room(4, 3, 16, 2, 32), {}, "accepted are"),
        ((room(4, 16, 2, 32),) * 2, {"layout": "bhsd"}, "layout must be nhd or hnd"),
        ((room(4, 16, 2, 32),) * 2, {"page_size": 32}, "the pages of the cache have 16 tokens"),
        ("cache", {}, "must be a tensor or a pair of tensors, got str"),
    ]
    for cache, named, text in refused:
        with pytest.raises(UnsupportedError, match=text):
            PagedKVCache.from_tensor(cache, **named)


def test_tokens_that_are_refused() -> None:
    cache = PagedKVCache(2, 2, 32, 16)
    k, slot = draw(3, 2, 32), torch.arange(3)
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((k[:, :1], k, slot), {}, r"k must be \(tokens, 2, 32\), got \(3, 1, 32\)"),
        ((k.double(), k, slot), {}, "k must be bfloat16, float16 or float32, got torch.float64: append quantises"),
        ((k.to(E4M3), k, slot), {}, "k must be bfloat16, float16 or float32, got torch.float8_e4m3fn: append quan"),
        ((k, k[:2], slot), {}, "k and v differ in tokens: 3 and 2"),
        ((k, k, slot[:2]), {}, "slot_mapping must have 3 elements, got 2"),
        ((k, k, slot.float()), {}, "slot_mapping must be a one-dimensional int32 or int64"),
        ((k, k, torch.tensor([0, 1, 32])), {}, "slot_mapping must be -1 to 31, got 32"),
        ((k, k, torch.tensor([0, 1, 0])), {}, "slot_mapping has a number twice: 0"),
        ((k, k, slot), {"layer": 1}, "layer must be 0 to 0, got 1"),
        ((k, k, slot), {"positions": slot}, "positions goes with rotary_cos"),
        ((k, k, slot), {"rotary_cos": torch.ones(4, 8)}, "rotary_cos and rotary_sin go together"),
        ((k, k, slot), {"positions": slot, "rotary_cos": k[0, :, :5], "rotary_sin": k[0, :, :5]}, "multiple of 16"),
    ]  # fmt: skip
    for arguments, named, text in refused:
        with pytest.raises(UnsupportedError, match=text):
            cache.append(*arguments, **named)
    assert not cache.pages.any()  # type: ignore[union-attr]


def test_slots_of_the_helper_are_the_tables() -> None:
    batch = make([40], [1], page_size=16)
    assert slots(batch, 0, 16, 18).tolist() == [int(batch.table[0, 1]) * 16, int(batch.table[0, 1]) * 16 + 1]


@pytest.mark.parametrize(
    ("size", "one", "found"),
    [(1.0, 0.028, 0.028), (0.002, 0.2, 0.028), (1000.0, 0.3, 0.028)],
    ids=["1", "0.002", "1000"],
)
def test_what_scales_of_v_cost(size: float, one: float, found: float) -> None:
    """docs/serving.md has the table: powers of two are as exact as a calibrated descale, and 1 is only near 1."""
    v = (size * draw(256, 2, 64).float()).bfloat16()
    calibrated = v.float().abs().amax((0, 2)) / 448
    off = {}
    for name, arguments in {"pow2": {"v_scale": "pow2"}, "own": {"v_descale": calibrated}, "one": {}}.items():
        cache = PagedKVCache(4, 2, 64, **arguments)
        cache.append(v, v, torch.arange(256))
        real = cache.dequantise(torch.arange(4).int()[None], torch.tensor([256]))[1][0].transpose(0, 1)
        off[name] = error(real, v)
    assert off["own"] < found and off["pow2"] < 1.03 * off["own"]
    assert (off["one"] < one) if size == 1 else (off["one"] > one)


@pytest.mark.parametrize("made", [{}, {"v_scale": "pow2"}, {"format": "nhd"}], ids=str)
def test_a_cache_that_was_appended_to_is_saved_and_read(made: dict[str, Any]) -> None:
    """As small as before, and what is appended to the copy goes to the copy's pages."""
    cache, tokens = PagedKVCache(8, 2, 64, 16, **made), torch.randn(3, 2, 64).bfloat16()
    empty = len(pickle.dumps(cache))
    cache.append(tokens, tokens, torch.arange(3))
    assert len(pickle.dumps(cache)) <= empty + 64
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    for copied in (pickle.loads(pickle.dumps(cache)), torch.load(buffer, weights_only=False), copy.copy(cache)):
        assert held(copied, 0) is not held(cache, 0)
        assert torch.equal(copied.pages, cache.pages)
        copied.append(tokens, tokens, torch.arange(3, 6))
        assert held(copied, 0).k.untyped_storage().data_ptr() == copied.pages.untyped_storage().data_ptr()
