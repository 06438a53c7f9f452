"""Attention over the pages of a serving engine: one call for prefill, decode and batches of both, counted."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from .. import stats
from ..api.kvcache import attention_with_kvcache
from ..api.plan_kvcache import plan_attention
from ..errors import UnsupportedError

HEAD_DIMS = (64, 96, 128, 192, 256)  # of the decode kernels
CARDS = ((8, 9), (9, 0))  # compute capabilities

Pair = tuple[torch.Tensor, torch.Tensor]  # K and V (pages, page_size, Hkv, D)


Descale = torch.Tensor | float


class Plans:
    """How the work of one step is cut: one plan for all layers of a shape and window, which the first of them makes.

    What a CUDA graph captures is made inside of it, so that a replay cuts by its own lengths.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, q: torch.Tensor, cache: Pair, table: torch.Tensor, window: tuple[int, int], **step: Any) -> Any:
        """The plan of ``attention_with_kvcache(q, cache, ...)``, which is of the same step."""
        captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        form = (captured, q.device, q.shape, cache[0].shape[1:], table.shape, window)
        if form not in self._made:
            self._made[form] = plan_attention(
                q.shape, cache, page_table=table, causal=False, window_size=window, **step
            )
        return self._made[form]

    def clear(self) -> None:
        """Forget all, as another step begins in the same tensors."""
        self._made.clear()


def attend(
    door: str,
    where: str,
    q: torch.Tensor,
    cache: Pair,
    descales: tuple[Descale, Descale],
    plans: Plans,
    *,
    out: torch.Tensor | None = None,
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
    """(T, H, D) of tokens that the pages hold already, in ``out`` where it is given. Causality is ``window[1] == 0``.

    ``cache`` is K and V (pages, page_size, Hkv, D), e4m3 or uint8, ``plans`` those of the step. ``longest_q`` and
    ``longest_k`` are upper bounds of the tokens of a sequence. The work that is counted is that of sequences of
    ``longest_k`` keys, as lengths are on the device.

    Raises:
        UnsupportedError: what ``attention_with_kvcache`` refuses. An engine has nothing to fall back to.
    """
    with torch.no_grad():
        step: dict[str, Any] = {"cache_seqlens": lengths, "cu_seqlens_q": ends, "max_seqlen_q": longest_q}
        result = attention_with_kvcache(
            q,
            cache,
            page_table=page_table,
            **step,
            k_descale=descales[0],
            v_descale=descales[1],
            softmax_scale=scale,
            causal=False,
            window_size=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            plan=plans.of(q, cache, page_table, window, **step),
        )
    if not isinstance(result, torch.Tensor):
        raise AssertionError("no LSE was asked for")
    stats.count_served(door, where, work=stats.work(1, q.shape[1], q.shape[0], longest_k, 2 * q.shape[2]), at=q)
    return result


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
