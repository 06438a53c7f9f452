"""What a cost model is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model needs to know of a problem."""

    batch_heads: int
    seqlen_q: int
    seqlen_k: int
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of a launch and the terms behind them: cycles of one SM's units for one KV tile of one CTA."""

    us: float
    terms: tuple[tuple[str, float], ...]
    resident: int  # CTAs an SM
    waves: int

    @property
    def bound(self) -> str:
        return max(self.terms, key=lambda term: term[1])[0]
