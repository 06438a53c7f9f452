"""Attention over the pages of a serving engine: one call for prefill, decode and batches of both, counted."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from .. import stats
from ..api.kvcache import attention_with_kvcache
from ..cache.paged import PagedKVCache
from ..errors import UnsupportedError

HEAD_DIMS = (64, 96, 128, 192, 256)  # of the decode kernels
CARDS = ((8, 9), (9, 0))  # compute capabilities


def attend(
    door: str,
    where: str,
    q: torch.Tensor,
    cache: PagedKVCache,
    *,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(T, H, D) of tokens that the pages hold already. Causality is ``window[1] == 0``.

    ``longest_q`` and ``longest_k`` are upper bounds of the tokens of a sequence. The work that is counted is that of
    sequences of ``longest_k`` keys, as lengths are on the device.

    Raises:
        UnsupportedError: what ``attention_with_kvcache`` refuses. An engine has nothing to fall back to.
    """
    with torch.no_grad():
        out = attention_with_kvcache(
            q,
            cache,
            page_table=page_table,
            cache_seqlens=lengths,
            cu_seqlens_q=ends,
            max_seqlen_q=longest_q,
            softmax_scale=scale,
            causal=False,
            window_size=window,
            softcap=softcap,
            sinks=sinks,
        )
    if not isinstance(out, torch.Tensor):
        raise AssertionError("no LSE was asked for")
    stats.count_served(door, where, work=stats.work(1, q.shape[1], q.shape[0], longest_k, 2 * q.shape[2]), at=q)
    return out


def refuse(door: str, *wrong: str | None) -> None:
    """UnsupportedError with the reasons that are not None, if there is one."""
    if reasons := [f"fp8cutlass in {door}: {reason}" for reason in wrong if reason is not None]:
        raise UnsupportedError(*reasons)


def installed(engine: str) -> bool:
    """Whether a module of this name can be found. It is not imported."""
    try:
        return find_spec(engine) is not None
    except ValueError:  # a module that was put in place without a file
        return False
