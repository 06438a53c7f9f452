"""The two attention functions that are registered, as transformers calls them.

``full`` takes the masks of ``sdpa``, ``flash`` those of FlashAttention: (batch, keys) or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import stats
from ...autocast import under_autocast
from ...errors import UnsupportedError
from ...stats import Reason
from ..refusal import Refusal
from . import paged
from .band import CAUSAL, FULL, Band, of_sequences, padded, tag, tagged
from .fallback import fall_back
from .serve import DOOR, Features, refusal, serve, work_of

Result = tuple[torch.Tensor, torch.Tensor | None]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Mask = Callable[[], torch.Tensor | None]  # makes the mask that a call which is not served needs


def full(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **rest: Any,
) -> Result:
    """(B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv) -> (B, Sq, H, Dv), None: with the masks of ``sdpa``.

    No mask means what it means there: causal, aligned with the first key, if the module says so and there is more than
    one row. A mask is the whole truth. What cannot be served runs by transformers, and is counted.
    """
    features = Features(dropout, softcap, position_bias, s_aux, block_table is not None, rest)
    waiting = paged.waiting_of(key)
    run = _run if waiting is None else partial(paged.attend, waiting)
    query, key, value = under_autocast((query, key, value))
    operands = query, key, value
    rows, keys = query.shape[2], key.shape[2] if waiting is None else waiting.keys
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        band, why = _of_mask(attention_mask, query, keys)
        return run(module, operands, band, why, lambda: attention_mask, features, scaling, is_causal)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if waiting is not None:
            raise UnsupportedError("a PagedCache has a row for each sequence: it does not go with cu_seq_lens_q")
        band = _of_lengths(CAUSAL if causal else FULL, operands, cu_seq_lens_q, cu_seq_lens_k, max_length_q)
        return _run(module, operands, band, None, _dense(band, operands), features, scaling, False)
    why = None
    if sliding_window is not None and keys > sliding_window:
        why = Refusal(Reason.WINDOW, "a window without its mask")
    band = CAUSAL if rows > 1 and causal else FULL  # the shape first, for torch.compile
    return run(module, operands, band, why, lambda: None, features, scaling, is_causal)


def flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **rest: Any,
) -> Result:
    """The same with the masks of FlashAttention.

    Rows are aligned with the last key. The window and the lengths of sequences come as keywords. A mask is
    (batch, keys), True for what is no padding; or it is that of ``sdpa``, for a pattern that is no band.
    """
    features = Features(dropout, softcap, position_bias, s_aux, block_table is not None, rest)
    query, key, value = under_autocast((query, key, value))
    if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] < key.shape[2]:
        written = attention_mask.shape[1]  # of a StaticCache
        key, value = key[:, :, :written], value[:, :, :written]
    operands, rows, keys = (query, key, value), query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() != 2:
        band, why = _of_mask(attention_mask, query, keys)
        return _run(module, operands, band, why, lambda: attention_mask, features, scaling, False)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = sliding_window - 1 if sliding_window is not None and keys > sliding_window else -1
    plain = Band(side, 0 if causal else side, keys - rows)
    if attention_mask is not None:
        found = _of_padding(plain, attention_mask, rows) if attention_mask.shape[0] == query.shape[0] else None
        if found is None:
            mask = plain.dense(query.shape[0], rows, keys, query.device) & attention_mask.bool()[:, None, None, :]
            why = Refusal(Reason.MASK, "padding that torch.compile cannot read, or between the tokens of a sequence")
            return _run(module, operands, None, why, lambda: mask, features, scaling, False)
        plain = found
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        plain = _of_lengths(plain, operands, cu_seq_lens_q, cu_seq_lens_k, max_length_q)
    elif position_ids is not None and rows == keys:
        plain = _of_positions(plain, position_ids, query.shape[0], rows)
    return _run(module, operands, plain, None, _dense(plain, operands), features, scaling, False)


def _run(
    module: torch.nn.Module,
    operands: Operands,
    band: Band | None,
    why: Refusal | None,
    mask: Mask,
    features: Features,
    scaling: float | None,
    is_causal: bool | None,
) -> Result:
    """Serve the call or, for the first reason against it, let transformers do it; count either.

    ``band`` is None where ``why`` says why there is none.
    """
    query, key, value = operands
    where = type(module).__name__
    wrong = refusal(query, key, value, features) or why
    if wrong is None and band is not None:
        more = features.softcap, features.sinks, features.position_bias
        out = serve(query, key, value, band, scaling, *more)
        if isinstance(out, torch.Tensor):
            stats.count_served(DOOR, where, "", work_of(query, key, value, band.right == 0), at=query)
            return out, None
        wrong = out
    if wrong is None:
        raise AssertionError("a call without a band has a reason")
    work = work_of(query, key, value, band is not None and band.right == 0)
    stats.count_fallback(DOOR, where, wrong.reason, wrong.text, work, at=query)
    return fall_back(module, *operands, mask(), features=features, scaling=scaling, is_causal=is_causal)


def _dense(band: Band, operands: Operands) -> Mask:
    """The mask of a band for ``sdpa``; none where nothing is hidden."""
    query, key, _ = operands
    if not band.limited and not band.ragged:
        return lambda: None
    return lambda: band.dense(query.shape[0], query.shape[2], key.shape[2], query.device)


def _of_mask(mask: torch.Tensor, query: torch.Tensor, keys: int) -> tuple[Band | None, Refusal | None]:
    """What is noted on a mask, if that is one for these sizes; lengths of sequences are for one batch."""
    band = tagged(mask) if tuple(mask.shape[2:]) == (query.shape[2], keys) else None
    if band is not None and band.ragged and mask.shape[0] != query.shape[0]:
        band = None
    return band, Refusal(Reason.MASK) if band is None else None


def _of_lengths(
    band: Band, operands: Operands, ends_q: torch.Tensor, ends_k: torch.Tensor, longest: int | torch.Tensor | None
) -> Band:
    """Of a batch of one whose tokens are those of several sequences. A bound in a tensor is not waited for."""
    rows, keys = operands[0].shape[2], operands[1].shape[2]
    longest_q = longest if isinstance(longest, int) else rows
    return replace(
        band, shift=0, ends_q=ends_q.to(torch.int32), ends_k=ends_k.to(torch.int32), longest_q=longest_q, longest_k=keys
    )


def _of_padding(band: Band, mask: torch.Tensor, rows: int) -> Band | None:
    """Found once for all layers, as it waits for the device; noted on the mask. None where a sequence has a hole."""
    if torch.compiler.is_compiling():
        return None
    noted = tagged(mask)
    if noted is None or noted.shift != band.shift or noted.limited != band.limited:
        noted = padded(band, mask.bool(), rows, mask.shape[1])
        if noted is None:
            return None
        tag(mask, noted)
    return replace(noted, left=band.left, right=band.right)


def _of_positions(band: Band, position_ids: torch.Tensor, batch: int, rows: int) -> Band:
    """Several sequences in a row, if positions start again. Not seen by torch.compile, which cannot wait for them."""
    if batch != 1 or rows == 1 or position_ids.shape != (1, rows) or torch.compiler.is_compiling():
        return band
    noted = tagged(position_ids)
    if noted is None:
        first = position_ids.min()
        noted = FULL
        if bool((position_ids - first != torch.arange(rows, device=position_ids.device)).any()):
            noted = of_sequences(noted, (position_ids == first).cumsum(1))
        tag(position_ids, noted)
    return replace(noted, left=band.left, right=band.right, shift=band.shift)
