"""``supports_kvcache`` and ``explain_kvcache``: what ``attention_with_kvcache`` would do."""

from __future__ import annotations

import inspect
from typing import Any

from ..call.kvexplain import KVProblem, answer, describe
from ..dtypes import OUT_NAMES
from ..errors import UnsupportedError
from .kvcache import attention_with_kvcache, bound_of, settled
from .kvcache_checks import Given, Settled

_SIGNATURE = inspect.signature(attention_with_kvcache)


def supports_kvcache(*args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Say whether ``attention_with_kvcache(*args, **kwargs)`` would run, and by which kernel or why not.

    Nothing is launched, and nothing is appended. On the CPU page numbers, lengths and ends are looked at, as the call
    does. An argument that ``attention_with_kvcache`` does not have is a TypeError here too.

    Returns:
        Whether it would run; then the kernel and what decided, or every reason against the call.
    """
    given = _given(args, kwargs)
    try:
        return True, answer(_problem(given, settled(given)), given.q.device)
    except UnsupportedError as error:
        return False, str(error)


def explain_kvcache(*args: Any, **kwargs: Any) -> str:
    """Describe what ``attention_with_kvcache(*args, **kwargs)`` would run, as text of a few lines.

    These are the kernel of decode, the kernel that takes sequences with many queries, the rows of units and why, stages
    and CTAs, how the work is shared, and whether it is built for the device. Or there is every reason why there is
    none. Nothing is launched.
    """
    given = _given(args, kwargs)
    try:
        at = settled(given, ask_device=False)
    except UnsupportedError as error:
        return "no kernel: " + "\n           ".join(error.reasons)
    return describe(_problem(given, at), given.q.device)[1]


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return Given(**bound.arguments)


def _problem(given: Given, at: Settled) -> KVProblem:
    left, right = given.window_size
    heads, head_dim = given.q.shape[-2:]
    most_q = bound_of(given.q, given.max_seqlen_q if given.plan is None else given.plan.max_seqlen_q)
    return KVProblem(
        at.lengths.shape[0], at.tokens, heads, at.cache.kv_heads, head_dim, at.cache.page_size, most_q, left,
        0 if given.causal else right, given.num_splits, at.cache.format == "native", given.plan is not None,
        at.columns * at.cache.page_size, OUT_NAMES[given.q.dtype], given.softcap > 0, given.sinks is not None,
    )  # fmt: skip
