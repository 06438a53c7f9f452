"""What ``attention_with_kvcache`` refuses, and the canonical form of what it accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache.checks import known_descale, static_descale, wrong_numbers, wrong_pages, wrong_rotary, wrong_tokens
from ..cache.engines import source_of
from ..cache.paged import PagedKVCache
from ..call.options import wrong_longest, wrong_scale, wrong_sinks, wrong_softcap, wrong_window
from ..dtypes import HALF_DTYPES
from ..errors import UnsupportedError
from .varlen_checks import wrong_ends

MOST_SPLITS = 256
INT32 = (torch.int32,)
DESCALES = ("k_descale", "v_descale")


@dataclass(frozen=True)
class Given:
    """The arguments as they came."""

    q: Any
    cache: Any
    page_table: Any
    cache_seqlens: Any
    cu_seqlens_q: Any
    max_seqlen_q: Any
    k: Any
    v: Any
    cu_seqlens_k_new: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: Any
    k_descale: Any
    v_descale: Any
    layer: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    sinks: Any
    num_splits: Any
    out: Any
    return_lse: Any
    plan: Any


@dataclass(frozen=True)
class Settled:
    """Cache, tables and lengths in one form."""

    cache: PagedKVCache
    page_table: torch.Tensor | None  # (B, most pages) int32; None: page s is sequence s
    lengths: torch.Tensor  # (B,) int32, before anything is appended
    tokens: int  # of q
    cu_q: torch.Tensor | None  # (B + 1,) int32; None: all sequences have as many of the tokens
    new: int  # tokens to be appended
    cu_new: torch.Tensor | None  # None where nothing is appended, or all have as many
    # Static ones of K and V: numbers, or (), (1,), (Hkv,) or (B, Hkv), which are yet to be limited.
    descales: tuple[torch.Tensor | float, torch.Tensor | float]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def columns(self) -> int:
        """Pages of a row of the table."""
        return 1 if self.page_table is None else self.page_table.shape[1]

    def table(self) -> torch.Tensor:
        """The page table, made where there is none."""
        if self.page_table is not None:
            return self.page_table
        return torch.arange(self.batch, dtype=torch.int32, device=self.lengths.device)[:, None]

    def ends(self, cu: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """(B + 1,) int32: ``cu``, or the ends of equal parts of ``tokens``."""
        return cu if cu is not None else equal_ends(self.batch, tokens, self.lengths.device)

    def spread(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The descales as tokens are appended by them, (B, Hkv)."""
        shape = (self.batch, self.cache.kv_heads)
        k, v = (static_descale(n, d, shape, self.cache.device) for n, d in zip(DESCALES, self.descales, strict=True))
        return k, v


def check(given: Given) -> Settled:
    """Everything that needs no value of a tensor on a device."""
    q = given.q
    if not isinstance(q, torch.Tensor) or q.dim() != (4 if given.cu_seqlens_q is None else 3):
        shape = tuple(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise UnsupportedError(f"q must be (B, S, H, D), or (T, H, D) with cu_seqlens_q, got {shape}")
    cache = _cache(given)
    wrong = _wrong_values(given)
    heads, head_dim = q.shape[-2:]
    if q.dtype not in HALF_DTYPES:
        wrong.append(f"q must be bfloat16 or float16, got {q.dtype}: it is not quantised, nor may it be")
    if q.device != cache.device:
        wrong.append(f"q is on {q.device}, the cache is on {cache.device}")
    if head_dim != cache.head_dim or not heads or heads % cache.kv_heads:
        wrong.append(
            f"q must have head_dim {cache.head_dim} and a multiple of {cache.kv_heads} heads, "
            f"got {head_dim} and {heads}"
        )
    if wrong:
        raise UnsupportedError(*wrong)
    batch = q.shape[0] if given.cu_seqlens_q is None else None
    for name in ("cu_seqlens_q", "cu_seqlens_k_new"):
        cu = getattr(given, name)
        if cu is not None:
            wrong += wrong_numbers(name, cu, q.device, None if batch is None else batch + 1, INT32)
            batch = cu.shape[0] - 1 if not wrong and batch is None else batch
    if batch is not None and batch < 0:
        wrong.append("cu_seqlens_q needs an element")
    if wrong or batch is None:
        raise UnsupportedError(*wrong)
    table = _table(given, cache, batch)
    lengths = given.cache_seqlens
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    wrong += wrong_numbers("cache_seqlens", lengths, q.device, batch, INT32)
    wrong += _wrong_table(table, batch, q.device) + _wrong_new(given, cache, batch)
    wrong += _wrong_out(given)
    if wrong:
        raise UnsupportedError(*wrong)
    descales: list[torch.Tensor | float]
    if isinstance(given.cache, PagedKVCache):
        descales = [cache.k_descale[given.layer], cache.v_descale[given.layer]]
    else:
        shape = (batch, cache.kv_heads)
        descales = [known_descale(name, getattr(given, name), shape, q.device) for name in DESCALES]
    cu_new, new = None, 0
    if given.k is not None:
        new = given.k.shape[0] * (given.k.shape[1] if given.k.dim() == 4 else 1)
        ragged = given.cu_seqlens_q if given.cu_seqlens_k_new is None else given.cu_seqlens_k_new
        cu_new = None if given.k.dim() == 4 else ragged
    tokens = q.shape[0] * (q.shape[1] if q.dim() == 4 else 1)
    return Settled(cache, table, lengths, tokens, given.cu_seqlens_q, new, cu_new, (descales[0], descales[1]))


def check_lengths(at: Settled) -> None:
    """Of values that can be looked at."""
    wrong = []
    cu_new = at.ends(at.cu_new, at.new) if at.new else at.cu_new
    for name, cu, tokens in (("cu_seqlens_q", at.cu_q, at.tokens), ("cu_seqlens_k_new", cu_new, at.new)):
        wrong += [] if cu is None else wrong_ends(name, cu, tokens)
    if wrong:
        raise UnsupportedError(*wrong)
    size, columns, table = at.cache.page_size, at.columns, at.table()
    more = torch.zeros_like(at.lengths) if cu_new is None else cu_new[1:] - cu_new[:-1]
    for s, (length, new) in enumerate(zip(at.lengths.tolist(), more.tolist(), strict=True)):
        if length < 0 or length + new > columns * size:
            end = f" and {new} new ones" if new else ""
            wrong.append(f"sequence {s} has {length} keys{end}, its {columns} pages hold 0 to {columns * size}")
            continue
        wrong += wrong_pages(s, table[s, : -(-(length + new) // size)].tolist(), at.cache.num_pages)
    if wrong:
        raise UnsupportedError(*wrong)


def equal_ends(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """(batch + 1,) int32: where the tokens of each sequence begin, and those of the last end."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * (tokens // max(batch, 1))


def _cache(given: Given) -> PagedKVCache:
    cache = given.cache
    if isinstance(cache, PagedKVCache):
        wrong = [
            f"{name} is for (k_cache, v_cache): a PagedKVCache has its own"
            for name in ("k_descale", "v_descale")
            if getattr(given, name) is not None
        ]
        if given.page_table is None:
            wrong.append("page_table is missing")
        if isinstance(given.layer, bool) or not isinstance(given.layer, int) or not 0 <= given.layer < cache.layers:
            wrong.append(f"layer must be 0 to {cache.layers - 1}, got {given.layer!r}")
        if wrong:
            raise UnsupportedError(*wrong)
        return cache
    if not isinstance(cache, (tuple, list)):
        raise UnsupportedError(f"cache must be a PagedKVCache or (k_cache, v_cache), got {type(cache).__name__}")
    if any(not isinstance(x, torch.Tensor) or x.dim() != 4 for x in cache):
        raise UnsupportedError(
            "k_cache and v_cache must be (pages, page_size, kv_heads, head_dim); PagedKVCache.from_tensor takes others"
        )
    if given.layer != 0:
        raise UnsupportedError(f"layer is for a PagedKVCache, got {given.layer!r}")
    return PagedKVCache.bare(source_of(cache, "nhd"))


def _wrong_values(given: Given) -> list[str]:
    """Arguments that are no tensors, and sinks."""
    wrong = [
        f"{name} must be True or False, got {getattr(given, name)!r}"
        for name in ("causal", "return_lse")
        if not isinstance(getattr(given, name), bool)
    ]
    softcap, q = given.softcap, given.q
    reasons = (
        wrong_scale("softmax_scale", given.softmax_scale),
        wrong_window("window_size", given.window_size),
        wrong_softcap("softcap", softcap),
        wrong_sinks("sinks", given.sinks, q.shape[-2], q.device),
    )
    wrong += [reason for reason in reasons if reason is not None]
    if isinstance(softcap, (int, float)) and softcap and getattr(given.cache, "k_mean", None) is not None:
        wrong.append("softcap bends logits, and the cache's k_mean moves them: the two do not go together")
    splits = given.num_splits
    if isinstance(splits, bool) or not isinstance(splits, int) or not 0 <= splits <= MOST_SPLITS:
        wrong.append(f"num_splits must be 0 to {MOST_SPLITS}, got {splits!r}")
    longest = None if given.max_seqlen_q is None else wrong_longest("max_seqlen_q", given.max_seqlen_q)
    wrong += [] if longest is None else [longest]
    wrong += wrong_rotary(given.rotary_cos, given.rotary_sin, given.rotary_interleaved, q.shape[-1], q.device)
    if given.rotary_cos is not None and given.k is None:
        wrong.append("rotary_cos turns q and the keys that are appended: k and v are missing")
    return wrong


def _table(given: Given, cache: PagedKVCache, batch: int) -> Any:
    if given.page_table is not None:
        return given.page_table
    if cache.num_pages != batch:
        raise UnsupportedError(
            f"without page_table the cache has a row for each of {batch} sequences, got {cache.num_pages}"
        )
    return None


def _wrong_table(table: Any, batch: int, device: torch.device) -> list[str]:
    if table is None:
        return []
    if isinstance(table, torch.Tensor) and table.dim() == 2 and table.dtype == torch.int32:
        if table.shape[0] == batch and table.device == device:
            return []
    return [f"page_table must be ({batch}, pages) int32 on {device}"]


def _wrong_new(given: Given, cache: PagedKVCache, batch: int) -> list[str]:
    """Of tokens to be appended."""
    k, v = given.k, given.v
    if k is None and v is None:
        return [] if given.cu_seqlens_k_new is None else ["cu_seqlens_k_new goes with k and v"]
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
        return ["k and v go together, two tensors"]
    if k.dim() == 4 and k.shape[0] == batch and given.cu_seqlens_k_new is None and k.shape == v.shape:
        return wrong_tokens(k.flatten(0, 1), v.flatten(0, 1), cache.kv_heads, cache.head_dim, cache.device)
    if k.dim() == 3 and (given.cu_seqlens_q is not None or given.cu_seqlens_k_new is not None):
        return wrong_tokens(k, v, cache.kv_heads, cache.head_dim, cache.device)
    return [
        f"k and v must be ({batch}, S', {cache.kv_heads}, {cache.head_dim}), or (T', ...) with cu_seqlens_k_new or "
        f"cu_seqlens_q, got {tuple(k.shape)} and {tuple(v.shape)}"
    ]


def _wrong_out(given: Given) -> list[str]:
    out, q = given.out, given.q
    if out is None:
        return []
    if not isinstance(out, torch.Tensor) or out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        return [f"out must be {tuple(q.shape)}, {q.dtype} on {q.device}"]
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        return [f"out is expanded: shape {tuple(out.shape)}, strides {out.stride()}"]
    return []
