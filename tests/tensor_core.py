"""The accumulator of Hopper's FP8 matrix instructions, in torch: what the emulator leaves out of Q K^T, and of P V
where P is in two terms and so exact enough to show it.

A step of 32 products is aligned to the largest of them and of the sum so far. A product counts by the exponents of its
factors, so that one in [2, 4) times their power of two is not shifted. All are cut toward zero, 13 bits below that,
and added; the sum is cut to 13 fraction bits of itself, or rounded to f16. docs/lab/fuzz.md has the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F

from fp8cutlass.emulator import emulate as emulator
from fp8cutlass.emulator import tile

FRACTION = 2.0**-13
STEP = 32
PRODUCTS = 1 << 25  # made at once: 128 MiB of float32


def power(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below |x|, 0 of 0: float32, no subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def scores(q: torch.Tensor, k: torch.Tensor, accumulator: str, emulated_mma: bool) -> torch.Tensor:
    """Q K^T (G, R, N) of (G, R, D) and (G, N, D) FP8 values in float32, in the place of ``emulator.scores_of``.
    ``emulated_mma`` must be False: where the instruction is emulated the accumulator is another."""
    if emulated_mma:
        raise ValueError("the tensor core's accumulator was asked for where the instruction is emulated")
    return _products(q, k, accumulator == "f16")


def values(p: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P V and the sums of P, (G, R, D) and (G, R, 1), of P (G, R, N) in two terms and V (G, N, D), in the place of
    ``tile.values_of``: a step of what e4m3 leaves of 32 P, then one of their e4m3. The sums are products with ones.
    """
    p, v = F.pad(p, (0, -p.shape[2] % STEP)), F.pad(F.pad(v, (0, 1), value=1.0), (0, 0, 0, -v.shape[1] % STEP))
    high = p.to(torch.float8_e4m3fn).float()
    terms = torch.stack([x.unflatten(2, (-1, STEP)) for x in (p - high, high)], 3).flatten(2)
    columns = v.transpose(1, 2).unflatten(2, (-1, 1, STEP)).expand(-1, -1, -1, 2, -1).flatten(2)
    both = _products(terms, columns, half=False)
    return both[..., :-1], both[..., -1:]


def _products(a: torch.Tensor, b: torch.Tensor, half: bool) -> torch.Tensor:
    """A B^T (G, R, N) of (G, R, D) and (G, N, D), some rows at once."""
    rows = max(1, PRODUCTS // (STEP * b.shape[0] * b.shape[1]))
    return torch.cat([_rows(part, b, half) for part in a.split(rows, 1)], 1)


def _rows(q: torch.Tensor, k: torch.Tensor, half: bool) -> torch.Tensor:
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
    for a, b in zip(q[:, :, None].split(STEP, -1), k[:, None].split(STEP, -1), strict=True):
        largest = torch.maximum((power(a.contiguous()) * power(b.contiguous())).amax(-1), power(total))
        unit = (largest * FRACTION).clamp_min(2.0**-100)  # of a step of zeros
        parts = (a * b).div_(unit[..., None]).trunc_().sum(-1)  # 8 bits each, of 14: the sum is exact
        total = (parts + (total / unit).trunc()) * unit
        total = total.half().float() if half else (total.view(torch.int32) & -1024).view(torch.float32)
    return total


@contextmanager
def cut_products(*, two_terms: bool) -> Iterator[None]:
    """Within it the emulator computes its scores as the tensor core does, and P V if P is in two terms."""
    with patch.object(emulator, "scores_of", scores):
        with patch.object(tile, "values_of", values) if two_terms else nullcontext():
            yield


@contextmanager
def emulated_products() -> Iterator[None]:
    """Within it the emulator computes its scores as kernels do whose instructions the compiler emulates."""
    with patch.object(emulator, "scores_of", lambda q, k, accumulator, _: tile.scores_of(q, k, accumulator, True)):
        yield
