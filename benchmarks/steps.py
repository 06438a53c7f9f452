"""Decode steps: batches of sequences with one to sixteen queries each, and which of them are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PAGE = 64  # tokens of a page


@dataclass(frozen=True)
class Step:
    """A decode step: sequences of these lengths, ``queries`` each, (tokens, heads, head_dim)."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1

    @property
    def label(self) -> str:
        more = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.name}, {self.heads}/{self.kv_heads} heads x {self.head_dim}{more}"

    def bytes_of(self, element: int) -> int:
        """Of K and V, whose elements have so many bytes."""
        return 2 * element * sum(self.lengths) * self.kv_heads * self.head_dim


def even(batch: int, keys: int) -> Step:
    return Step(f"{batch} x {keys}", (keys,) * batch)


_SKEWED = (
    (Step("32 x 128 + 32 x 4096", (128,) * 32 + (4096,) * 32), even(64, 2112)),
    (Step("1 x 65536 + 7 x 4096", (65536,) + (4096,) * 7), even(8, 11776)),
)
SKEWED = {skewed.name: as_even.name for skewed, as_even in _SKEWED}  # and the even step with as many keys

# The first ones are the table of the evidence: a run that is cut off has them.
STEPS = (
    even(8, 32768), even(16, 16384), even(32, 4096), even(64, 4096), even(128, 2048), even(8, 8192),
    *(even(1, n) for n in (131072, 32768, 8192, 1024)),
    *(step for pair in _SKEWED for step in pair),
    replace(even(32, 4096), queries=4),
    even(32, 2048), even(64, 2048), even(128, 4096), even(8, 1024), replace(even(8, 8192), queries=16),
    replace(even(32, 4096), head_dim=64), replace(even(16, 8192), head_dim=256, heads=16, kv_heads=4),
)  # fmt: skip


def wanted(texts: Sequence[str]) -> list[Step]:
    """The steps whose label has one of these texts in it; all without a text."""
    return [step for step in STEPS if not texts or any(text in step.label for text in texts)]
