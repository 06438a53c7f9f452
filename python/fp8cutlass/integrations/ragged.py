"""Ragged batches of torch's flash attention: what ``torch.nn.attention.varlen.varlen_attn`` calls.

``provider.py`` puts ``forward`` into the place of torch's operator.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import stats
from ..api.varlen import attention_varlen
from ..errors import NoKernelError, UnsupportedError
from ..stats import Reason
from . import CAUSAL, FULL, short_of
from .dense import Accuracy
from .refusal import refusal_of

DOOR = "provider"
WHERE = "varlen"
OPERATOR = "_flash_attention_forward"


def forward(
    original: Any,
    accuracy: Accuracy,
    keys: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **later: Any,
) -> tuple[Any, ...]:
    """The operator's arguments. ``later`` are those of newer versions of torch: pages and splits.

    Rows are aligned with the last key, as torch has it. Results are (T, H, D), the LSE (H, T), and what dropout needs.
    """
    rest = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, **later}
    sides = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    given = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
    if query.dim() != 3:  # a dense call inside torch's own kernel, which is counted already
        return original.call_boxed(keys, *given, scale=scale, **sides, **rest)
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    reason = _refusal(
        accuracy, (query, key, value), cum_seq_q is None or cum_seq_k is None, dropout_p, return_debug_mask, rest
    )
    work, text = _work(query, key, cum_seq_q, is_causal), ""
    if reason is None:
        kind = CAUSAL if is_causal or right == 0 else FULL
        text = short_of(max_q, query.shape[2], value.shape[2], kind, work, query.is_cuda)
        reason = Reason.SHORT if text else None
    if reason is None and cum_seq_q is not None and cum_seq_k is not None:
        try:
            out, lse = attention_varlen(
                query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k, scale, is_causal, (left, right),
                return_lse=True, precision=accuracy.get("precision", "fast"),
            )  # fmt: skip
        except NoKernelError as error:
            reason, text = Reason.NO_KERNEL, str(error)
        except UnsupportedError as error:
            reason, text = Reason.LAYOUT, str(error)
        else:
            stats.count_served(DOOR, WHERE, work=work, at=query)
            state = torch.empty(2, dtype=torch.uint64, device=query.device)
            unused = torch.empty((), dtype=torch.uint64, device=query.device)
            return out, lse, state, unused, query.new_empty(0)
    stats.count_fallback(DOOR, WHERE, reason or Reason.VARLEN, text, work=work, at=query)
    if original is None:
        raise UnsupportedError(f"torch has no ragged flash attention for {query.device.type} to fall back to")
    return original.call_boxed(keys, *given, scale=scale, **sides, **rest)


def _refusal(
    accuracy: Accuracy,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    without_ends: bool,
    dropout_p: float,
    return_debug_mask: bool,
    rest: dict[str, Any],
) -> Reason | None:
    if rest.get("block_table") is not None:
        return Reason.PAGED
    if without_ends:
        return Reason.VARLEN
    if dropout_p:
        return Reason.DROPOUT
    if rest["alibi_slopes"] is not None:
        return Reason.BIAS
    unknown = [name for name in rest if name not in ("seqused_k", "num_splits")]
    if return_debug_mask or any(rest[name] is not None for name in unknown):
        return Reason.KEYWORD
    if any(accuracy.get(name) not in (None, False, "block") for name in ("scaling", "smooth_k", "hadamard")):
        return Reason.POLICY  # the program wants an accuracy that ragged batches do not have
    # varlen_attn is an operator with a backward of its own, inside of which no gradient is asked for.
    if any(x.requires_grad for x in operands):
        return Reason.GRAD
    found = refusal_of(*operands)
    return None if found is None else found.reason


def _work(query: torch.Tensor, key: torch.Tensor, cum_seq_q: torch.Tensor | None, causal: bool) -> int:
    """As for sequences of equal lengths: theirs are on the device."""
    sequences = 1 if cum_seq_q is None else max(1, cum_seq_q.shape[0] - 1)
    rows, width = query.shape[0] // sequences, 2 * query.shape[2]
    return stats.work(1, query.shape[1], rows, key.shape[0], width, causal=causal)
