"""Adapters for other libraries. None of them is imported by ``import fp8cutlass``.

Every adapter counts its calls (``fp8cutlass.served()``). What it cannot serve runs as it would have without it.

``set_minimum_length`` is for all adapters: calls with fewer query tokens are left alone. A call from bf16 quantises all
its keys, so that few queries do not pay for it.
"""

from __future__ import annotations

# From how many query tokens a whole call from bf16 is faster than the fastest bf16 attention, by head_dim and mask: the
# table "Whole calls" of docs/evidence/results.md (H200), the first column whose speedup is 1.02 or more.
MEASURED = {64: {False: 512, True: 1024}, 128: {False: 1024, True: 1024}, 256: {False: 1024, True: 2048}}

_minimum: int | None = None


def set_minimum_length(tokens: int | None) -> None:
    """Leave calls with fewer than ``tokens`` query tokens (of the longest sequence) to the library.

    ``None`` is the default: on a card what was measured (``MEASURED``), on the CPU no minimum, as nothing there is
    about speed. 0 serves every call. Calls on packed keys and values (``PackedKV``) have no minimum.
    """
    global _minimum
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise ValueError(f"the minimum length is a number of tokens from 0 up, or None, got {tokens!r}")
    _minimum = tokens


def minimum_length(head_dim: int, causal: bool, on_card: bool) -> int:
    """The least number of query tokens of a call that is served."""
    if _minimum is not None:
        return _minimum
    if not on_card:
        return 0
    return next((rows[causal] for width, rows in MEASURED.items() if head_dim <= width), MEASURED[256][causal])
