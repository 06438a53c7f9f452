"""FlashAttention's functions by their names, for code that is written for them.

Queries, keys and values are (B, S, H, D); a mask or a window is aligned with the last row and the last key. Arguments
after the tensors go by name, as their order differs between versions of FlashAttention. What has no FP8 kernel raises
``UnsupportedError``: there is nothing to fall back to.
"""

from __future__ import annotations

from typing import cast

import torch

from .. import alibi_bias, stats
from ..api.attention import attention
from ..api.kvcache import attention_with_kvcache
from ..api.varlen import attention_varlen
from ..errors import UnsupportedError
from .dense import count_ragged, effort, for_query_heads

DOOR = "flash"
NO_WINDOW = (-1, -1)
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = NO_WINDOW,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    attention_chunk: int = 0,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention of a batch of equal lengths.

    Args:
        q: (B, Sq, H, D), bf16 or fp16; or FP8 with descales, which gives bf16.
        k, v: (B, Sk, Hkv, D). H is a multiple of Hkv.
        softmax_scale: default 1 / sqrt(D).
        causal: row i sees the keys up to ``i + Sk - Sq``.
        window_size: (left, right): row i sees ``left`` keys before and ``right`` keys after key ``i + Sk - Sq``. -1, or
            None for both, is all.
        q_descale, k_descale, v_descale: for FP8 operands, float32 (B, Hkv), also for q; or (B, H) for q.
            ``real = fp8 * descale``.
        return_attn_probs, return_softmax_lse: also return the LSE. Probabilities are never returned.
        softcap: 0, or c > 0: a logit x becomes ``c * tanh(x / c)`` before the mask.
        learnable_sink: (H,): a logit for each head without a value, which joins the denominator once.
        alibi_slopes: (H,) or (B, H) float32, on q's device: the logit of row i and key j loses
            ``slope * |i + Sk - Sq - j|``. Made in each call, as ``alibi_bias`` makes it: a row of keys for each slope
            where no row sees a key after its own and there is no sink, else (H, Sq, Sk) float32.
        dropout_p, qv, attention_chunk: no other values than the defaults are served.
        deterministic, num_splits, pack_gqa, sm_margin: settings of FlashAttention's kernels, which change no result.

    Returns:
        (B, Sq, H, D), then the natural-log LSE (B, H, Sq) float32 if asked for. Rows that see no key are 0.

    Raises:
        UnsupportedError: an argument that is not served, by name; a call without a kernel.
    """
    _refuse("flash_attn_func", dropout_p=dropout_p, qv=qv, attention_chunk=attention_chunk)
    window = NO_WINDOW if window_size is None else window_size
    proper = all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k))  # else `attention` refuses them
    if q_descale is not None and proper:
        q_descale = for_query_heads(q_descale, q.shape[2])
    # Where no row sees a key after its own, and nothing but keys counts, a row may leave out where it stands.
    by_key = (causal or window[1] == 0) and learnable_sink is None
    bias = _distances(alibi_slopes, q, k, by_key) if proper else None
    result = attention(
        q, k, v, bias, 0.0, causal, softmax_scale, proper and q.shape[2] != k.shape[2],
        layout="bshd",
        window_size=window,
        causal_alignment="bottom_right" if causal or window != NO_WINDOW else "top_left",
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softcap=softcap,
        sinks=learnable_sink,
        scaling="block" if q_descale is None else "head",
        return_lse=return_attn_probs or return_softmax_lse,
    )  # fmt: skip
    stats.count_served(DOOR, "flash_attn_func", work=effort(q, k, v, causal, "bshd"), at=q)
    if alibi_slopes is not None and by_key and isinstance(result, tuple):
        out, lse = result[:2]
        after = torch.arange(q.shape[1] - 1, -1, -1, dtype=torch.float32, device=q.device)  # keys after a row's own
        return out, lse + alibi_slopes.reshape(-1, alibi_slopes.shape[-1], 1) * after
    return cast(Result, result)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = NO_WINDOW,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    attention_chunk: int = 0,
    block_table: torch.Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention of sequences of unequal lengths whose tokens lie one after the other.

    Args:
        q: (T, H, D). k, v: (Tk, Hkv, D). See :func:`flash_attn_func` for types and for what is not said here.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: where the tokens of each sequence begin, and the last end.
        max_seqlen_q, max_seqlen_k: at least the largest lengths.
        seqused_q, seqused_k: (sequences,) int32: how many tokens of each sequence count; None for all.
        q_descale, k_descale, v_descale: for FP8 operands, float32 (sequences, Hkv).
        block_table: keys in pages are not served here.

    Returns:
        (T, H, D), then the natural-log LSE (H, T) float32 if asked for.

    Raises:
        UnsupportedError: an argument that is not served, by name; a call without a kernel.
    """
    _refuse("flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes, qv=qv,
            attention_chunk=attention_chunk, block_table=block_table)  # fmt: skip
    result = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale, causal,
        NO_WINDOW if window_size is None else window_size,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=return_attn_probs or return_softmax_lse,
        softcap=softcap,
        sinks=learnable_sink,
    )  # fmt: skip
    count_ragged(DOOR, "flash_attn_varlen_func", q, k, cu_seqlens_q, causal)
    return result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int | None = None,
    page_table: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = NO_WINDOW,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    q_descale: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Attention of new tokens over a cache of FP8, to which ``k`` and ``v`` are appended first.

    Args:
        q: (B, S, H, D), or (T, H, D) with ``cu_seqlens_q``; bf16 or fp16. FlashAttention-3 takes FP8 ones alone here.
        k_cache, v_cache: e4m3, (B, tokens, Hkv, D), or (pages, page_size, Hkv, D) with ``page_table``. Written to where
            ``k`` and ``v`` are given.
        k, v: (B, S', Hkv, D), bf16 or fp16.
        cache_seqlens: (B,) int32 or a number: keys of each sequence before. None: all of the cache, without pages.
        page_table, block_table: (B, most pages) int32, the pages of each sequence; two names for one argument.
        k_descale, v_descale: float32 (B, Hkv).
        rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, softcap, num_splits:
            as in :func:`fp8cutlass.attention_with_kvcache`.
        causal, window_size, softmax_scale: as in :func:`flash_attn_func`.
        q_descale, qv, cache_batch_idx, cache_leftpad, rotary_seqlens, alibi_slopes, attention_chunk: not served.
        scheduler_metadata, pack_gqa, sm_margin: settings of FlashAttention's kernels, which change no result.

    Returns:
        As q, then the natural-log LSE, (B, H, S) or (H, T) float32, if asked for.

    Raises:
        UnsupportedError: an argument that is not served, by name; a call without a kernel.
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, q_descale=q_descale, qv=qv, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            rotary_seqlens=rotary_seqlens, alibi_slopes=alibi_slopes, attention_chunk=attention_chunk)  # fmt: skip
    if page_table is not None and block_table is not None:
        raise UnsupportedError(f"{name}: page_table and block_table are one argument")
    pages = block_table if page_table is None else page_table
    if cache_seqlens is None:
        if pages is not None:
            raise UnsupportedError(f"{name}: a cache in pages needs cache_seqlens")
        cache_seqlens = k_cache.shape[1]
    result = attention_with_kvcache(
        q, (k_cache, v_cache),
        page_table=pages, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        k=k, v=v, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale, causal=causal,
        window_size=NO_WINDOW if window_size is None else window_size,
        softcap=softcap, num_splits=num_splits, return_lse=return_softmax_lse,
    )  # fmt: skip
    # The lengths are on the device: the work is that of the longest sequences that fit.
    keys = k_cache.shape[1] if pages is None else k_cache.shape[1] * pages.shape[1]
    rows = q.numel() // max(1, q.shape[-1])  # of all heads
    stats.count_served(DOOR, name, work=stats.work(1, 1, rows, keys, 2 * q.shape[-1]), at=q)
    return result


def _distances(slopes: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, by_key: bool) -> torch.Tensor | None:
    """The mask that slopes stand for. UnsupportedError for other slopes than FlashAttention takes."""
    if slopes is None:
        return None
    if not isinstance(slopes, torch.Tensor):
        raise UnsupportedError(f"flash_attn_func: alibi_slopes must be a torch.Tensor, got {type(slopes).__name__}")
    batch, rows, heads, _ = q.shape
    if slopes.dtype != torch.float32 or slopes.device != q.device or slopes.shape not in ((heads,), (batch, heads)):
        raise UnsupportedError(
            f"flash_attn_func: alibi_slopes must be float32, ({heads},) or ({batch}, {heads}), on {q.device}; "
            f"got {slopes.dtype}, {tuple(slopes.shape)}, on {slopes.device}"
        )
    return alibi_bias(slopes, rows, k.shape[1], is_causal=by_key, causal_alignment="bottom_right")


def _refuse(function: str, **given: object) -> None:
    """UnsupportedError for what is neither None nor 0."""
    wrong = [
        f"{function}: {name} is not served"
        for name, value in given.items()
        if value is not None and (isinstance(value, torch.Tensor) or value)
    ]
    if wrong:
        raise UnsupportedError(*wrong)
