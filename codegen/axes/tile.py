"""The tile of a CTA."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Tile:
    """Query rows and keys of a CTA's tile, and the warps that share its rows (without those that only load)."""

    m: int
    n: int
    warps: int

    PATTERN = r"m\d+n\d+w\d+"

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}w{self.warps}"

    @staticmethod
    def parse(text: str) -> Tile:
        m, n, warps = map(int, re.findall(r"\d+", text))
        return Tile(m=m, n=n, warps=warps)
