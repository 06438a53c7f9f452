"""The tensors of a random call of ``attention_with_kvcache``: a cache as we or an engine lay it out, and its bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_cases import SOURCES, values_of
from fuzz_paged import GIVEN, OWN, WILD, PagedCase
from paged_cases import POISON

from fp8cutlass import PagedKVCache
from fp8cutlass.cache.write import E4M3

Raw = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PagedInputs:
    """On the CPU. ``raw`` are the cache's bytes as they are before the call, all of them NaN but the old keys'. ``k``
    and ``v`` are all keys of each sequence, (keys, Hkv, D)."""

    q: torch.Tensor  # (tokens, H, D); NaN where no sequence is
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    raw: Raw
    table: torch.Tensor
    descales: tuple[Any, Any]  # of K and V, as they are given
    sinks: torch.Tensor | None


def pages_of(case: PagedCase) -> int:
    """Of the cache: what sequences need, and some that nobody owns."""
    return len(case.keys) if case.cache == "rows" else sum(-(-n // case.page_size) for n in case.keys) + 3


def raw_of(case: PagedCase, fill: int = POISON) -> Raw:
    """The cache's memory, all ``fill``: NaN."""
    count, size, heads, dim = pages_of(case), case.page_size, case.kv_heads, case.head_dim

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.uint8)

    if case.cache in OWN:
        inside = 4 * size + 16 if case.cache.startswith("native") else 0
        return (room(1, count, heads * (2 * size * dim + inside)),)
    if case.cache in ("flashattention", *GIVEN):
        return room(count, size, heads, dim), room(count, size, heads, dim)
    if case.cache == "xqa pair":
        return room(count, heads, size, dim), room(count, heads, size, dim)
    if case.cache == "sglang slots":
        return room(count * size, heads, dim), room(count * size, heads, dim)
    shapes = {
        "flashinfer nhd": (count, 2, size, heads, dim), "flashinfer hnd": (count, 2, heads, size, dim),
        "vllm two first": (2, count, size, heads, dim), "vllm side by side": (count, heads, size, 2 * dim),
        "vllm all layers": (count, 4, size, heads, dim),
    }  # fmt: skip
    return (room(*shapes[case.cache]),)


NAMED: dict[str, dict[str, Any]] = {
    "flashinfer nhd": {"layout": "nhd"}, "flashinfer hnd": {"layout": "hnd"}, "xqa pair": {"layout": "hnd"},
    "vllm two first": {"kv_axis": 0}, "vllm side by side": {"layout": "hnd"}, "vllm all layers": {"layout": "nhd"},
}  # fmt: skip


def cache_of(case: PagedCase, raw: Raw, descales: tuple[Any, Any]) -> PagedKVCache:
    """The cache over this memory, which is where it is."""
    device = raw[0].device
    if case.cache in GIVEN:  # the call has their descales
        return PagedKVCache.from_tensor(raw)
    on_device = {
        name: d.to(device) if isinstance(d, torch.Tensor) else d
        for name, d in zip(("k_descale", "v_descale"), descales, strict=True)
    }
    if case.cache in OWN:
        word = case.cache.split()
        more: dict[str, Any] = {"format": word[0], "v_scale": "pow2" if len(word) > 1 else "static"}
        if word[0] == "native":
            on_device.pop("k_descale", None)
        if len(word) > 1:
            on_device.pop("v_descale", None)
        cache = PagedKVCache(
            pages_of(case), case.kv_heads, case.head_dim, case.page_size, device=device, **more, **on_device
        )
        cache.pages = raw[0]
        return cache
    given: Any = raw if len(raw) == 2 else raw[0]
    if case.cache == "vllm all layers":
        given = raw[0][:, 1:3]
    named = {"page_size": case.page_size} if case.cache == "sglang slots" else NAMED.get(case.cache, {})
    return PagedKVCache.from_tensor(given, **named, **on_device)


def paged_inputs(case: PagedCase, fill: int = POISON, wild: tuple[int, ...] = WILD) -> PagedInputs:
    """The tensors of a case, with the old keys in the cache. Slots of no key are ``fill``, pages past an end some of
    ``wild``."""
    r = random.Random(f"pages of {case.seed}/{case.number}")
    made = [values_of(case.sequence(s)) for s in range(len(case.rows))]
    dtype = SOURCES[case.source]
    k, v = ([x[axis][0].transpose(0, 1).to(dtype) for x in made] for axis in (1, 2))
    q = torch.full((case.begins[-1] + case.behind, case.heads, case.head_dim), torch.nan, dtype=dtype)
    for s, begin in enumerate(case.begins[:-1]):
        q[begin : begin + case.rows[s]] = made[s][0][0].transpose(0, 1).to(dtype)
    table = table_of(case, r, wild)
    descales = (_descale(case, r), _descale(case, r))
    raw = raw_of(case, fill)
    write(case, cache_of(case, raw, descales), (k, v), table, descales, [(0, n) for n in case.old])
    sinks = torch.tensor([r.uniform(-3, 6) for _ in range(case.heads)]) if case.sinks else None
    return PagedInputs(q, k, v, raw, table, descales, sinks)


def table_of(case: PagedCase, r: random.Random, wild: tuple[int, ...]) -> torch.Tensor:
    """Pages in a random order, and garbage past the end of each sequence."""
    if case.cache == "rows":
        return torch.arange(len(case.keys), dtype=torch.int32)[:, None]
    free = list(range(pages_of(case)))
    r.shuffle(free)
    rows = []
    for n in case.keys:
        used = -(-n // case.page_size)
        rows.append([*(free.pop() for _ in range(used)), *(r.choice(wild) for _ in range(case.columns - used))])
    return torch.tensor(rows, dtype=torch.int32)


def _descale(case: PagedCase, r: random.Random) -> Any:
    """In one of the shapes that the cache takes; 2^-8 to 2^-5, so that large values saturate."""
    form = case.descales
    if form == "(B, H)" and case.cache not in GIVEN:
        form = "(H,)"
    shapes = {"none": (), "(1,)": (1,), "(H,)": (case.kv_heads,), "(B, H)": (len(case.keys), case.kv_heads)}
    if form == "none":
        return None
    if form == "float":
        return 2.0 ** r.uniform(-8, -5)
    shape = shapes[form]
    generator = torch.Generator().manual_seed(r.getrandbits(40))
    return 2.0 ** (torch.rand(shape, generator=generator) * 3 - 8)


def spread(case: PagedCase, descale: Any) -> torch.Tensor:
    """A given descale as (sequences, Hkv)."""
    one = torch.as_tensor(1.0 if descale is None else descale, dtype=torch.float32)
    return one.expand(len(case.keys), case.kv_heads)


def slots_of(case: PagedCase, table: torch.Tensor, s: int, first: int, last: int) -> torch.Tensor:
    """Of keys ``first`` to ``last`` of sequence s."""
    key = torch.arange(first, last)
    return table[s].long()[key // case.page_size] * case.page_size + key % case.page_size


def write(
    case: PagedCase,
    cache: PagedKVCache,
    kv: tuple[list[torch.Tensor], list[torch.Tensor]],
    table: torch.Tensor,
    descales: tuple[Any, Any],
    ranges: list[tuple[int, int]],
) -> None:
    """Append keys ``ranges`` of each sequence by their slots."""
    at = torch.cat([slots_of(case, table, s, *of) for s, of in enumerate(ranges)])
    k, v = (torch.cat([x[slice(*of)] for x, of in zip(xs, ranges, strict=True)]) for xs in kv)
    counts = torch.tensor([last - first for first, last in ranges])
    if case.cache in GIVEN:
        of_token = [spread(case, d).repeat_interleave(counts, 0) for d in descales]
        cache.write(k, v, at, 0, (of_token[0], of_token[1]))
    else:
        cache.append(k, v, at)


def fp8(raw: Raw) -> Raw:
    """The same memory as e4m3."""
    return tuple(x.view(E4M3) for x in raw)
