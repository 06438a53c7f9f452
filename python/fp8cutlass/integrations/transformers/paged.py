"""Attention of a model whose keys and values a ``PagedCache`` keeps: append to the pages, then attend over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import stats
from ...api.kvcache import attention_with_kvcache
from ...errors import UnsupportedError
from ...stats import Reason
from ..refusal import Refusal
from .band import Band
from .fallback import fall_back
from .pool import Step, Stored, everything
from .serve import DOOR, Features, refusal

WAITING = "_fp8cutlass_waiting"  # the attribute of the keys that a ``PagedCache`` returned


class Waiting:
    """Keys of a layer that go to the pages once the mask is known, which says what is padding."""

    def __init__(self, stored: Stored, rows: int) -> None:
        self.stored, self.keys, self.done = stored, stored.seen + rows, False


def offer(stored: Stored, k: torch.Tensor) -> Waiting:
    """Note on new keys, (batch, kv_heads, rows, head_dim), where they belong."""
    waiting = Waiting(stored, k.shape[2])
    setattr(k, WAITING, waiting)
    return waiting


def waiting_of(k: torch.Tensor) -> Waiting | None:
    """What ``offer`` noted. UnsupportedError for keys that were attended to before."""
    if torch.compiler.is_compiling():
        return None
    found: Waiting | None = getattr(k, WAITING, None)
    if found is not None and found.done:
        raise UnsupportedError("a PagedCache does not serve layers that share keys")
    return found


def attend(
    waiting: Waiting,
    module: torch.nn.Module,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    band: Band | None,
    why: Refusal | None,
    mask: Callable[[], torch.Tensor | None],
    features: Features,
    scaling: float | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Append, and serve the call or let transformers do it on what the pages hold; count either.

    The operands are those of the new tokens. Softcap and sinks are served.
    """
    query, key, value = operands
    waiting.done = True
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise UnsupportedError("a PagedCache has no gradients: run under torch.no_grad() or torch.inference_mode()")
    stored, (batch, _, rows, _) = waiting.stored, query.shape
    tokens = stored.rows_of(band, batch, rows)
    wrong = refusal(query, key, value, features) or why
    if features.position_bias is not None:
        wrong = wrong or Refusal(Reason.BIAS, "pages have no kernel that adds one")
    if tokens is None:
        tokens = everything(batch, rows)
        wrong = wrong or Refusal(Reason.MASK, "it is no band of the tokens that the pages hold")
    device = query.device.type
    with torch.autocast(device, enabled=False):
        step = stored.append(key, value, tokens)
        found: torch.Tensor | Refusal | None = wrong
        if wrong is None and band is not None:
            found = _serve(stored, step, query, band, features, scaling)
    where, causal = type(module).__name__, band is not None and band.right == 0
    width = query.shape[3] + value.shape[3]
    work = stats.work(batch, query.shape[1], rows, waiting.keys, width, causal=causal)
    if isinstance(found, torch.Tensor):
        stats.count_served(DOOR, where, "", work, at=query)
        return found[..., : value.shape[3]].contiguous(), None
    if found is None:
        raise AssertionError("a call without a band has a reason")
    stats.count_fallback(DOOR, where, found.reason, found.text, work, at=query)
    seen = mask()
    _refuse_lost(stored, seen)
    k, v = stored.dense(step, query.dtype, value.shape[3])
    return fall_back(module, query, k, v, seen, features=features, scaling=scaling, is_causal=is_causal)


def _serve(
    stored: Stored, step: Step, query: torch.Tensor, band: Band, features: Features, scaling: float | None
) -> torch.Tensor | Refusal:
    """(B, H, S, D) -> (B, S, H, D); 0 for rows that are padding."""
    cache = stored.pool.cache
    if cache is None:
        raise AssertionError("keys were appended")
    q = query.transpose(1, 2)
    if step.index is not None:
        q = q.reshape(-1, *q.shape[2:])[step.index]
    try:
        out = attention_with_kvcache(
            q,
            cache,
            page_table=step.table,
            cache_seqlens=step.used,
            cu_seqlens_q=None if step.index is None else step.ends,
            max_seqlen_q=step.longest,
            layer=stored.layer,
            softmax_scale=scaling,
            causal=band.right == 0,
            window_size=(band.left, band.right),
            softcap=features.softcap or 0.0,
            sinks=features.sinks,
        )
    except UnsupportedError as error:  # here NoKernelError, too: torch's attention has no pages
        return Refusal(Reason.NO_KERNEL, str(error))
    if not isinstance(out, torch.Tensor):
        raise AssertionError("no LSE was asked for")
    if step.index is None:
        return out
    batch, heads, rows, head_dim = query.shape
    whole = out.new_zeros(batch * rows, heads, head_dim)
    whole[step.index] = out
    return whole.view(batch, rows, heads, head_dim)


def _refuse_lost(stored: Stored, seen: torch.Tensor | None) -> None:
    """Padding has no place in the pages: a later mask must not show it."""
    if bool(stored.tokens.all()):
        return
    lost = ~stored.tokens[:, None, None, :]
    if seen is None or seen.dtype != torch.bool or bool((seen.cpu() & lost).any()):
        raise UnsupportedError(
            "the mask shows tokens that an earlier mask called padding, which are not in the pages: give generate and "
            "each forward pass the attention_mask of all tokens so far"
        )
