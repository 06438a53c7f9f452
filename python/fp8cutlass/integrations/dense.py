"""A call of another library's attention: served here and counted, or counted with the reason why not.

Only attributes of tensors are read. So nothing waits for a device, and torch.compile traces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

import torch

from .. import stats
from ..api.arguments import Layout, Precision, Scaling, wrong_values
from ..api.ask import widest_masked
from ..api.attention import attention
from ..autocast import is_on, under_autocast
from ..errors import NoKernelError, UnsupportedError
from ..memory import broadcasts
from ..stats import Reason
from . import CAUSAL, FULL, HIDDEN, short_of
from .refusal import refusal_of


class Accuracy(TypedDict, total=False):
    """The arguments of ``attention`` that change rounding alone."""

    scaling: Scaling
    precision: Precision
    smooth_k: bool
    hadamard: bool


ACCURACY = tuple(Accuracy.__annotations__)


def accuracy_of(caller: str, given: Mapping[str, Any]) -> Accuracy:
    """``given`` as it is. TypeError for a name that ``Accuracy`` does not have, UnsupportedError for a value that
    ``attention`` would refuse in every call."""
    if unknown := [name for name in given if name not in ACCURACY]:
        raise TypeError(f"{caller}() got unexpected arguments: {', '.join(unknown)}")
    if wrong := wrong_values(given):
        raise UnsupportedError(*wrong)
    return cast(Accuracy, dict(given))


def refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> Reason | None:
    """Why a call cannot be served whatever kernels there are, or None; a mask is no part of what is."""
    if attn_mask is not None:
        return Reason.MASK
    if dropout_p:
        return Reason.DROPOUT
    found = refusal_of(query, key, value)
    return None if found is None else found.reason


def hides(attn_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, layout: Layout = "bhsd") -> bool:
    """Whether a mask is one that ``attention`` takes and packs: boolean, of a shape that broadcasts to (batch, heads,
    rows, keys), on a device with kernels for it."""
    if attn_mask is None or attn_mask.dtype != torch.bool or query.is_nested or query.dim() != 4 or key.dim() != 4:
        return False
    if attn_mask.device != query.device or attn_mask.layout != torch.strided or attn_mask.dim() < 2:
        return False
    heads, tokens = (1, 2) if layout == "bhsd" else (2, 1)
    whole = (query.shape[0], query.shape[heads], query.shape[tokens], key.shape[tokens])
    return broadcasts(attn_mask.shape, whole) and query.shape[-1] <= widest_masked(query.device)


def attend(
    door: str,
    where: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    reason: Reason | None = None,
    short: bool = False,
    accuracy: Accuracy | None = None,
) -> Any:
    """The arguments of ``attention``, and its result; None if the call is not served, and the library is to run it.

    Args:
        door, where: the names that ``stats`` counts under.
        reason: why the door itself does not want the call served, or None.
        short: whether calls below the minimum length (``set_minimum_length``) are served as well.
        accuracy: what else ``attention`` gets.
    """
    q, k, v = under_autocast((query, key, value), as_torch=True)
    work = effort(q, k, v, is_causal, layout)
    hidden = not is_causal and hides(attn_mask, q, k, layout)
    if reason is None:
        reason = refusal(q, k, v, None if hidden else attn_mask, dropout_p)
    text = ""
    if reason is None and not short:
        rows, keys = (x.shape[-2 if layout == "bhsd" else -3] for x in (q, k))
        mask = CAUSAL if is_causal else HIDDEN if hidden else FULL
        rows, precision = min(rows, keys) if hidden else rows, (accuracy or {}).get("precision", "fast")
        text = short_of(rows, q.shape[-1], v.shape[-1], mask, work, q.is_cuda, precision)
        reason = Reason.SHORT if text else None
    if reason is None:
        given = (q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa)
        options: Any = {"layout": layout, "return_lse": return_lse, **(accuracy or {})}
        try:
            if is_on(q.device.type):
                with torch.autocast(
                    q.device.type, enabled=False
                ):  # the emulator's own products are no part of the model
                    result = attention(*given, **options)
            else:
                result = attention(*given, **options)
        except NoKernelError as error:
            reason, text = Reason.NO_KERNEL, str(error)
        except UnsupportedError as error:
            reason, text = _misfit(q, v), str(error)
        else:
            stats.count_served(door, where, work=work, at=q)
            return result
    stats.count_fallback(door, where, reason, text, work=work, at=q)
    return None


def _misfit(query: torch.Tensor, value: torch.Tensor) -> Reason:
    """Of a call that torch may serve and this package refuses: shapes that broadcast, values of another width."""
    return Reason.HEAD_DIM if value.shape[-1] != query.shape[-1] else Reason.LAYOUT


def effort(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, layout: str = "bhsd"
) -> int:
    """The work of a call as ``stats`` counts it; 0 of tensors that are no dense ones of 3 dimensions at least."""
    if query.is_nested or min(query.dim(), key.dim(), value.dim()) < 3:
        return 0
    tokens = -2 if layout == "bhsd" else -3
    rows, keys, width = query.shape[tokens], key.shape[tokens], query.shape[-1]
    return stats.work(query.numel() // max(1, rows * width), 1, rows, keys, width + value.shape[-1], causal=causal)


def count_ragged(
    door: str, where: str, q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor, causal: bool
) -> None:
    """Count a ragged call that ran in FP8. Its lengths are on the device, so its work is that of equal lengths."""
    rows = q.shape[0] // max(1, cu_seqlens_q.shape[0] - 1)
    work = stats.work(1, q.shape[1], rows, k.shape[0], 2 * q.shape[2], causal=causal)
    stats.count_served(door, where, work=work, at=q)


def for_query_heads(descale: Any, heads: int) -> Any:
    """A descale of query that FlashAttention-3 gives for each KV head, (B, Hkv), as one for each head, (B, heads)."""
    if not isinstance(descale, torch.Tensor) or descale.dim() != 2 or heads % max(1, descale.shape[1]):
        return descale
    return descale.repeat_interleave(heads // descale.shape[1], 1)
