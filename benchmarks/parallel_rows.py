"""Rows of `parallel`, which reports read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelTime:
    """One contender on one problem. Times are microseconds of the slowest rank, the median of the repetitions."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str  # "full" or "zigzag", which is causal
    contender: str
    status: str
    reason: str = ""
    kernel: str = ""
    us: float | None = None
    spread: float | None = None  # (max - min) / median
    one_card_us: float | None = None  # fp8cutlass.attention of the whole problem on one card
    products_us: float | None = None  # the same call with exchanges that return at once
    exchange_us: float | None = None  # the exchanges alone
    hidden: float | None = None  # share of the exchange that the call does not wait for
    sent_bytes: int | None = None  # of the rank that sends most
    model_us: float | None = None
    error: float | None = None  # relative L2 distance from one card; 0 where the bits are equal

    @property
    def efficiency(self) -> float | None:
        """One card's time over ``ranks`` times this."""
        if self.us is None or self.one_card_us is None:
            return None
        return self.one_card_us / (self.ranks * self.us)
