"""The accumulator of Hopper's FP8 matrix instructions, in torch: what the emulator leaves out of Q K^T.

A step of 32 products is aligned to the largest of them and of the sum so far. A product counts by the exponents of its
factors, so that one in [2, 4) times their power of two is not shifted. All are cut toward zero, 13 bits below that,
and added; the sum is cut to 13 fraction bits of itself, or rounded to f16. docs/lab/fuzz.md has the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8cutlass import emulator

FRACTION = 2.0**-13
STEP = 32
PRODUCTS = 1 << 25  # made at once: 128 MiB of float32


def power(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below |x|, 0 of 0: float32, no subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def scores(q: torch.Tensor, k: torch.Tensor, accumulator: str, emulated_mma: bool) -> torch.Tensor:
    """Q K^T (G, R, N) of (G, R, D) and (G, N, D) FP8 values in float32, in the place of ``emulator._scores``.
    ``emulated_mma`` must be False: where the instruction is emulated the accumulator is another."""
    if emulated_mma:
        raise ValueError("the tensor core's accumulator was asked for where the instruction is emulated")
    rows = max(1, PRODUCTS // (STEP * k.shape[0] * k.shape[1]))
    return torch.cat([_rows(part, k, accumulator == "f16") for part in q.split(rows, 1)], 1)


def _rows(q: torch.Tensor, k: torch.Tensor, half: bool) -> torch.Tensor:
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
    for a, b in zip(q[:, :, None].split(STEP, -1), k[:, None].split(STEP, -1), strict=True):
        largest = torch.maximum((power(a) * power(b)).amax(-1), power(total))
        unit = (largest * FRACTION).clamp_min(2.0**-100)  # of a step of zeros
        parts = (a * b).div_(unit[..., None]).trunc_().sum(-1)  # 8 bits each, of 14: the sum is exact
        total = (parts + (total / unit).trunc()) * unit
        total = total.half().float() if half else (total.view(torch.int32) & -1024).view(torch.float32)
    return total


@contextmanager
def cut_scores() -> Iterator[None]:
    """Within it the emulator computes its scores as the tensor core does."""
    kept = emulator._scores
    emulator._scores = scores
    try:
        yield
    finally:
        emulator._scores = kept
