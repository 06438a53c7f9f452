"""What a choice depends on, and what it is."""

from __future__ import annotations

from dataclasses import dataclass

CPU_ARCH = "sm89"  # what the emulator stands for
CPU_SM_COUNT = 58  # of an L4, the card that the sm89 table is made for


@dataclass(frozen=True)
class Problem:
    """What the choice of a kernel depends on. ``heads`` counts query heads; lengths are in tokens.

    ``head_dim`` is the caller's, the kernel's may be wider. ``quantised`` operands come with descales per KEY_BLOCK
    keys, or ``lowered`` of heads, which any blocks can share. Others are quantised for the kernel that is chosen.
    """

    arch: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    dtype: str
    out: str
    scaling: str
    causal: bool
    precision: str
    quantised: bool = False
    lowered: bool = False
    sm_count: int = CPU_SM_COUNT
    kv_heads: int = 0  # this and the name of the card matter only to what `tune` measured; "" asks the table alone
    card: str = ""
    window: bool = False  # of keys: a kernel of its own, which the table has no cell for
    capped: bool = False  # of scores: the same
    biased: bool = False  # something is added to scores: the same
    listed: bool = False  # a mask in lists of tiles: the same
    whole: bool = False  # of these: every tile is seen whole

    def __str__(self) -> str:
        """One line: (B, H, S, D), S as queries x keys where they differ, then the other axes."""
        length = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        operands = f"{self.dtype} with descales" if self.quantised else self.dtype
        return (
            f"({self.batch}, {self.heads}, {length}, {self.head_dim}) {self.mask}, {operands} to {self.out}, "
            f"scaling {self.scaling}, {self.precision}{', capped' if self.capped else ''}, "
            f"{self.arch} with {self.sm_count} SMs"
        )

    @property
    def mask(self) -> str:
        """The kernels' word for it."""
        if self.biased:
            return "bias"
        return "blocks" if self.listed else "window" if self.window else "causal" if self.causal else "full"

    @property
    def special(self) -> bool:
        """Whether the table has no cell for it."""
        return self.window or self.capped or self.biased or self.listed


@dataclass(frozen=True)
class Decision:
    """Which kernel, and why. Costs are microseconds of the model or card named by ``evidence``; without a kernel
    ``variant`` is None and ``reason`` holds the rule that refuses."""

    variant: str | None
    reason: str = ""
    criterion: str = ""
    evidence: str = ""
    cost_us: float | None = None
    runner_up: str | None = None
    runner_up_cost_us: float | None = None
