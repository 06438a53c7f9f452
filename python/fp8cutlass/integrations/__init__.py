"""Adapters for other libraries. None of them is imported by ``import fp8cutlass``.

Every adapter counts its calls (``fp8cutlass.served()``). What it cannot serve runs as it would have without it.

``set_minimum_length`` is for all adapters: calls with fewer query tokens are left alone. A call from bf16 quantises all
its keys, so that few queries do not pay for it. Nor does a small call that the host launches by itself: it costs the
host more than torch's attention does.
"""

from __future__ import annotations

import torch

from ..manifest import INTEGER

FULL, CAUSAL, MASKED, HIDDEN, BIASED = "full", "causal", "masked", "hidden", "biased"
# From how many query tokens a whole call from bf16 is faster than torch's attention, by mask and head_dim. MASKED is a
# window or padding, for which torch's attention would need a mask; HIDDEN is a boolean mask, which a call packs: it
# needs as many keys, too. BIASED is something that is added to scores.
# docs/evidence/results.md says where each number is from.
MEASURED = {
    FULL: {64: 512, 128: 1024, 256: 1536},
    CAUSAL: {64: 384, 128: 1024, 256: 2048},
    MASKED: {64: 256, 128: 384, 256: 256},
    HIDDEN: {64: 512, 128: 1024, 256: 1024},
    BIASED: {64: 4096, 128: 4096, 256: 4096},
}
# The same of 8-bit integers, which take longer to make and to multiply, and have kernels up to head_dim 128. HIDDEN is
# twice that of `fast`, and was not measured.
MEASURED_INTEGERS = {
    FULL: {64: 1024, 128: 2048},
    CAUSAL: {64: 2048, 128: 2048},
    HIDDEN: {64: 1024, 128: 2048},
}
# The same where values are narrower than keys, as in DeepSeek's latent attention: they are padded to the width of keys.
NARROW_VALUES = 8192
# The work from which on a call pays that is launched by itself, outside of a CUDA graph: as `stats.work` counts it.
LAUNCHED_WORK = 20_000_000_000

_minimum: int | None = None


def set_minimum_length(tokens: int | None) -> None:
    """Leave calls with fewer than ``tokens`` query tokens (of the longest sequence) to the library.

    ``None`` is the default: on a card what was measured (``MEASURED``, ``NARROW_VALUES``, ``LAUNCHED_WORK``), on the
    CPU no minimum, as nothing there is about speed. 0 serves every call. Calls on packed keys and values (``PackedKV``)
    have no minimum.
    """
    global _minimum
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise ValueError(f"the minimum length is a number of tokens from 0 up, or None, got {tokens!r}")
    _minimum = tokens


def minimum_length(head_dim: int, value_dim: int, mask: str, on_card: bool, precision: str = "fast") -> int:
    """The least number of query tokens of a call that is served. ``mask`` is FULL, CAUSAL, MASKED, HIDDEN or BIASED."""
    if _minimum is not None:
        return _minimum
    if not on_card:
        return 0
    by_width = MEASURED[mask]
    if precision in INTEGER:
        by_width = MEASURED_INTEGERS.get(mask, by_width)
    least = next((tokens for width, tokens in by_width.items() if head_dim <= width), max(by_width.values()))
    return max(least, NARROW_VALUES) if value_dim < head_dim and mask not in (MASKED, HIDDEN) else least


def short_of(
    rows: int, head_dim: int, value_dim: int, mask: str, work: int, on_card: bool, precision: str = "fast"
) -> str:
    """What a call lacks to be served, or "". ``mask`` as in ``minimum_length``, ``work`` as in ``stats.work``."""
    least = minimum_length(head_dim, value_dim, mask, on_card, precision)
    if rows < least:
        return f"less than {least} rows"
    if _minimum is None and on_card and _launched_singly() and work < LAUNCHED_WORK:  # no guard in a compiled program
        return f"work of {work / 1e9:.3g}e9, less than {LAUNCHED_WORK / 1e9:g}e9, outside of a CUDA graph"
    return ""


def _launched_singly() -> bool:
    """Whether the host launches a call by itself. Compiled programs may become a graph, and cost it less."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
