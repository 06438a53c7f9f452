"""``plan_attention``: how the work of ``attention_with_kvcache`` is cut, once a step for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.paged import PagedKVCache
from ..call.kvplan import AttentionPlan, planned
from ..call.options import wrong_longest
from ..checking import looks_at
from ..errors import UnsupportedError
from .kvcache import form_of, settled
from .kvcache_checks import Given


def plan_attention(
    q: torch.Tensor | Sequence[int],
    cache: PagedKVCache | Sequence[torch.Tensor],
    *,
    page_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 0,
) -> AttentionPlan:
    """Cut the work of a step, which ``attention_with_kvcache(..., plan=...)`` then does in each layer.

    Without a plan each call launches two kernels, of which the first reads the lengths and cuts. With one, a call
    launches the second alone. A plan is good for calls of the same lengths and shapes, in any layer. Layers with
    another window have a plan of their own. Results are the same bits.

    Args:
        q: the queries, or their shape: (B, S, H, D), or (T, H, D) with ``cu_seqlens_q``.
        cache: as in the calls, of any layer.
        page_table: as in the calls. Its shape alone decides.
        cache_seqlens: (B,) int32, or a number for all: the keys that the calls see, those that they append included.
        cu_seqlens_q, causal, window_size, num_splits: as in the calls.
        max_seqlen_q: as in ``attention_with_kvcache``; the calls take this one's.

    Returns:
        The plan. It is made on the device, and nobody waits for it. In a CUDA graph that captures it with its calls,
        lengths may change from replay to replay. Outside of one they must stay until the last of the calls: a card
        does not look whether they did, but with ``FP8CUTLASS_CHECK=1``. The CPU does.

    Raises:
        UnsupportedError: with every reason. NoKernelError: no kernel serves such calls on the device.
    """
    if not isinstance(q, torch.Tensor):
        device = cache.device if isinstance(cache, PagedKVCache) else cache[0].device
        if not isinstance(q, (tuple, list)) or any(wrong_longest("q", n) is not None for n in q):
            raise UnsupportedError(f"q must be a tensor of queries or its shape, got {q!r}")
        q = torch.empty((), dtype=torch.bfloat16, device=device).expand(*q)
    at = settled(
        Given(
            q, cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, None, None, None, None, None, True, None,
            None, 0, None, causal, window_size, 0.0, None, num_splits, None, False, None,
        )
    )  # fmt: skip
    form = form_of(at, q, causal, window_size, num_splits)
    kept = at.lengths.clone() if looks_at(at.lengths) else None
    return AttentionPlan(form, max_seqlen_q, planned(form, at.lengths, at.cu_q, max_seqlen_q), kept)
