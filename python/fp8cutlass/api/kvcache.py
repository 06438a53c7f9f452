"""``attention_with_kvcache``: attention over a paged cache, with FlashAttention-3's names and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cache.paged import PagedKVCache
from ..call import kvmemo
from ..call.kept import refused
from ..call.kvappend import append, turned
from ..call.kvcache import KVCall, refuse_device, run
from ..call.kvplan import AttentionPlan, Form, differs
from ..call.kvprefill import may_be_kept
from ..call.operators import register
from ..call.ragged import default_scale
from ..call.reasons import no_derivatives
from ..checking import looks_at
from ..errors import NoKernelError, UnsupportedError
from .kvcache_checks import Given, Settled, check, check_lengths


def attention_with_kvcache(
    q: torch.Tensor,
    cache: PagedKVCache | Sequence[torch.Tensor],
    *,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    layer: int = 0,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or many query tokens a sequence over keys and values in pages of FP8.

    Args:
        q: (B, S, H, D), or (T, H, D) with ``cu_seqlens_q``, bf16 or fp16. H is a multiple of Hkv. Sequences may have
            one token or many: decode and prefill in one call.
        cache: a :class:`~fp8cutlass.PagedKVCache`; or (k_cache, v_cache), e4m3, (pages, page_size, Hkv, D) each.
            Without ``page_table`` these are (B, tokens, Hkv, D).
        page_table: (B, most pages) int32: the pages of each sequence. Entries past its length are not read.
        cache_seqlens: (B,) int32, or a number for all: keys of each sequence before ``k`` is appended.
        cu_seqlens_q: (B + 1,) int32: where the tokens of each sequence begin, and the last one's end.
        max_seqlen_q: an upper bound of the tokens of a sequence. It helps to choose a kernel. Below 128 no kernel looks
            for long chunks, which on a card are computed in FP8 (docs/serving.md).
        k, v: tokens to be appended first, at ``cache_seqlens``: (B, S', Hkv, D), or (T', Hkv, D) with
            ``cu_seqlens_k_new``. Attention then sees them. Their pages must be in the table.
        cu_seqlens_k_new: (B + 1,) int32; default ``cu_seqlens_q``.
        rotary_cos, rotary_sin: (positions, R / 2): the first R columns of ``k``, which is needed, and of q are turned.
            Token i stands at ``cache_seqlens + i``, but all tokens of q at ``cache_seqlens`` where there is neither
            causal nor a window.
        rotary_interleaved: pairs are neighbouring columns, else columns i and i + R / 2.
        k_descale, v_descale: with (k_cache, v_cache): a float, or float32 (1,), (Hkv,) or (B, Hkv). Default 1. A
            PagedKVCache has its own.
        layer: of a PagedKVCache.
        softmax_scale: finite; default 1 / sqrt(D).
        causal: row i of S sees no key past ``i + keys - S``, its own. The same as window_size=(left, 0).
        window_size: (left, right): a row sees that many keys before and after its own; -1 for all.
        softcap: 0, or c > 0: a logit x becomes ``c * tanh(x / c)`` before the mask.
        sinks: (H,) bf16, fp16 or float32: a logit for each head without a value, which joins the denominator once.
        num_splits: 0: a card cuts the keys of sequences so that all its multiprocessors have work; the CPU does not
            cut them. 1: no sequence is cut, and its bits do not depend on the batch. Above, as 0 on a card, so many
            parts on the CPU.
        out: takes the result; of the shape and dtype of q.
        return_lse: also return the natural-log sum of exponentials, sinks included.
        plan: what :func:`plan_attention` made of such a call. Its ``max_seqlen_q`` counts. Without one the call makes
            its own.

    Returns:
        As q, then the LSE, (B, H, S) or (H, T) float32, where asked for. Rows that see no key, and tokens that belong
        to no sequence, are 0, their LSE -inf, with and without sinks.

    On a card nobody waits for a number. There page numbers, lengths and ends that are out of range are clamped. On the
    CPU they are refused, and on a card where ``FP8CUTLASS_CHECK=1``.

    Raises:
        UnsupportedError: with every reason, before anything is written or launched. NoKernelError: on a card, where no
            kernel serves it yet.
    """
    signed = None
    new = (k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved)
    if not torch.compiler.is_compiling():
        tensors = (q, cache, layer, page_table, cache_seqlens, cu_seqlens_q, k_descale, v_descale, sinks, plan, out)
        options = (softmax_scale, causal, softcap, num_splits, return_lse, max_seqlen_q, window_size)
        signed = kvmemo.signature(*tensors, new, options)
        known = None if signed is None else kvmemo.look_up(signed)
        if known is not None:
            try:
                return known(*tensors, *new)
            except RuntimeError as error:
                if not refused(error):
                    raise
    given = Given(
        q, cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, k, v, cu_seqlens_k_new, rotary_cos, rotary_sin,
        rotary_interleaved, k_descale, v_descale, layer, softmax_scale, causal, window_size, softcap, sinks, num_splits,
        out, return_lse, plan,
    )  # fmt: skip
    at = settled(given)
    pages, tokens = at.cache.views(layer), q.reshape(at.tokens, *q.shape[-2:])
    used = at.lengths
    left, right = window_size[0], 0 if causal else window_size[1]
    if k is not None and v is not None:
        turn = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin, rotary_interleaved)
        if turn is not None:
            tokens = turned(tokens, at.cu_q, at.lengths, (left, right), turn)
        rows = k.reshape(at.new, *k.shape[-2:]), v.reshape(at.new, *v.shape[-2:])
        used = append(at.cache, rows, at.ends(at.cu_new, at.new), used, at.table(), at.spread(), layer, turn)
    inside = pages.k_descale is not None and pages.v_descale is not None
    descales = (pages.k_descale, pages.v_descale) if inside else at.descales
    tensors_of = [x if isinstance(x, torch.Tensor) else None for x in descales]
    numbers = [1.0 if x is None or isinstance(x, torch.Tensor) else x for x in descales]
    scale = default_scale(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    most_q = bound_of(q, max_seqlen_q if plan is None else plan.max_seqlen_q)
    result, lse = _operator(
        tokens, pages.k, pages.v, *tensors_of, *numbers, at.page_table, used, at.cu_q, sinks, at.cache.mean(layer),
        scale, left, right, float(softcap), num_splits, at.cache.hadamard, return_lse, most_q,
        None if plan is None else plan.work,
    )  # fmt: skip
    if signed is not None and at.tokens and at.batch and at.columns and may_be_kept(most_q, at.tokens):
        kvmemo.remember(
            signed, q, cache, at.cache.kv_heads, at.batch, (k_descale, v_descale), new, scale=scale, left=left,
            right=right, softcap=float(softcap), splits=num_splits, return_lse=return_lse, most_q=most_q,
        )  # fmt: skip
    result = result.view(q.shape)
    if q.dim() == 4 and return_lse:
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)  # (B, H, S)
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


def bound_of(q: torch.Tensor, max_seqlen_q: int | None) -> int | None:
    """What is known of the tokens of a sequence: those of a batch are as many."""
    return q.shape[1] if max_seqlen_q is None and q.dim() == 4 else max_seqlen_q


def settled(given: Given, *, ask_device: bool = True) -> Settled:
    """The arguments in one form. UnsupportedError with what is wrong; NoKernelError where torch could and no kernel
    does. Without ``ask_device`` any device will do."""
    at = check(given)
    if wrong := no_derivatives([(name, getattr(given, name)) for name in ("q", "k", "v", "sinks", "out")]):
        raise NoKernelError(*wrong)
    if ask_device:
        refuse_device(given.q.device, given.q.shape[-1])
    if looks_at(given.q):
        check_lengths(at)
    if given.plan is not None:
        form = form_of(at, given.q, given.causal, given.window_size, given.num_splits)
        used = at.lengths if at.new == 0 else at.lengths + at.ends(at.cu_new, at.new).diff()
        if wrong := differs(given.plan, form, used if looks_at(given.q) else None):
            raise UnsupportedError(*wrong)
    return at


def form_of(at: Settled, q: torch.Tensor, causal: bool, window_size: tuple[int, int], num_splits: int) -> Form:
    """What of a call its plan depends on."""
    left, right = window_size[0], 0 if causal else window_size[1]
    return Form(
        q.device, at.batch, at.tokens, q.shape[-2], at.cache.kv_heads, q.shape[-1], at.columns * at.cache.page_size,
        left, right, num_splits == 1,
    )  # fmt: skip


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_descales: torch.Tensor | None,
    v_descales: torch.Tensor | None,
    k_descale: float,
    v_descale: float,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Descales are tensors, or numbers where there are none."""
    k_any, v_any = k_descale if k_descales is None else k_descales, v_descale if v_descales is None else v_descales
    return run(KVCall(q, k, v, k_any, v_any, *rest))


def _fake(q: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    lse = q.new_empty((heads, tokens) if rest[-3] else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse


_operator = register(
    "attention_with_kvcache(Tensor q, Tensor k, Tensor v, Tensor? k_descales, Tensor? v_descales, float k_descale, "
    "float v_descale, Tensor? page_table, Tensor used, Tensor? cu_seqlens_q, Tensor? sinks, Tensor? k_mean, "
    "float scale, int left, int right, float softcap, int num_splits, bool hadamard, bool return_lse, "
    "SymInt? max_seqlen_q, Tensor? work) -> (Tensor out, Tensor lse)",
    _run,
    _fake,
)
