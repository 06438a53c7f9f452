"""What a ring pays for merging: the LSE that a call returns with its result, and one partial result merged into another
in float32. ``measure`` gives the rows of one problem."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8cutlass import attention, merge_attention, pack_kv
from fp8cutlass.call.merge import weights
from fp8cutlass.timing import Capture, capture

from .grid import Settings
from .results import FAILED, OK, WRONG, Timed, first_line
from .turns import checked, in_turns

# Heads, heads of key, head_dim, tokens of a rank.
PROBLEMS = ((32, 8, 128, 4096), (32, 8, 128, 16384), (24, 24, 64, 16384), (40, 40, 128, 16384))
CALL, EXACT, MERGE = "a call", "with the exact LSE", "with an LSE for merging"
KERNEL, OPERATIONS = "merge", "merge by torch operations"
LSE: Mapping[str, Any] = {CALL: False, EXACT: True, MERGE: "merge"}
NEAR = 1e-5  # of float32 numbers near 1 that are added in another order


@dataclass(frozen=True)
class MergeTime(Timed):
    """What was found of one way. ``moved`` are the bytes that merging has to read and write."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    contender: str
    precision: str
    status: str
    reason: str = ""
    moved: int | None = None


@dataclass(frozen=True)
class Parts:
    """A result in float32 and one in bf16, with their LSEs."""

    out: torch.Tensor  # (1, H, S, D)
    lse: torch.Tensor
    to: torch.Tensor
    to_lse: torch.Tensor

    def copies(self) -> Parts:
        return Parts(self.out.clone(), self.lse.clone(), self.to, self.to_lse)

    @property
    def moved(self) -> int:
        """Bytes: the first result and its LSE read and written, the second read."""
        return self.out.numel() * (4 + 4 + self.to.element_size()) + self.lse.numel() * 12


def make(heads: int, head_dim: int, tokens: int, device: torch.device | str = "cuda") -> Parts:
    generator = torch.Generator(device).manual_seed(tokens)
    out, to = (torch.randn(1, heads, tokens, head_dim, generator=generator, device=device) for _ in range(2))
    lse, to_lse = (torch.randn(1, heads, tokens, generator=generator, device=device) for _ in range(2))
    return Parts(out, lse, to.bfloat16(), to_lse)


def by_kernel(parts: Parts) -> torch.Tensor:
    """RuntimeError where torch operations would do it."""
    from fp8cutlass.native.merge import merges

    if not merges(parts.out, parts.lse, parts.to, parts.to_lse):
        raise RuntimeError("the kernel does not take it")
    return merge_attention(parts.out, parts.lse, parts.to, parts.to_lse, inplace=True)[0]


def by_torch(parts: Parts) -> torch.Tensor:
    total, weight = weights(parts.lse, parts.to_lse)
    parts.out.lerp_(parts.to.float(), weight.unsqueeze(-1))
    parts.lse.copy_(total)
    return parts.out


def different(wanted: torch.Tensor, out: torch.Tensor) -> float:
    """0 where all bits are equal, else infinite."""
    return 0.0 if torch.equal(wanted, out) else float("inf")


def measure(problem: tuple[int, int, int, int], settings: Settings) -> list[MergeTime]:
    """Rows of one problem, taken in turns: calls on packed keys, and merges in place."""
    gc.collect()
    heads, kv_heads, head_dim, tokens = problem
    q, k, v = (
        torch.randn(1, h, tokens, head_dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
    )
    packed = pack_kv(k, v, query_shape=q.shape)
    wanted = attention(q, packed, enable_gqa=True)
    rows: list[MergeTime] = []
    running: list[tuple[MergeTime, None, Capture]] = []
    for name, lse in LSE.items():
        call = partial(attention, q, packed, enable_gqa=True, return_lse=lse)
        launch = call if lse is False else partial(_first, call)
        row, recorded = checked(MergeTime(*problem, name, "fp8", OK), launch, partial(different, wanted), settings)
        if recorded is None:
            rows.append(row)
        else:
            running.append((row, None, recorded))
    parts = make(heads, head_dim, tokens)
    merged = by_torch(parts.copies())
    for name, way in ((KERNEL, by_kernel), (OPERATIONS, by_torch)):
        row = MergeTime(*problem, name, "fp8", OK, moved=parts.moved)
        try:
            off = float((way(parts.copies()) - merged).abs().max())
            if not off <= NEAR:
                rows.append(replace(row, status=WRONG, reason=f"off by {off:.3g}"))
                continue
            # A replay merges into what the one before left: the same work, on numbers that stay finite.
            running.append((row, None, capture(partial(way, parts.copies()), settings.target_us)))
        except Exception as failure:
            rows.append(replace(row, status=FAILED, reason=first_line(failure)))
    return rows + [row for row, _, _ in in_turns(running, settings)]


def _first(call: Callable[[], Any]) -> torch.Tensor:
    out: torch.Tensor = call()[0]
    return out
