"""Softmax of one KV tile as the kernels compute it, in torch: the counterpart of include/fp8cutlass/softmax.cuh.

All take scores (..., rows, keys) with -inf where masked and a slope (..., rows, 1), and return
``(p, p_bytes, weight, exact)`` with ``2^(score * slope) = p * 2^weight`` up to the rounding of P:

* ``p``: the e4m3 probabilities, or the sums of two e4m3 terms, as float32; ``p_bytes``: the bytes (uint8) of the
  probabilities or of the larger terms;
* ``weight``: (..., rows, 1), in octaves; -1e30 for a row that sees no key of the tile;
* ``exact``: sum of the unquantised exponentials at that weight, (..., rows, 1); zeros unless ``want_exact``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dtypes import widened

DEAD_WEIGHT = -1e30
E4M3_MAX = 448.0
EXP2_OFFSET = 8.0  # the row maximum becomes 2^8
TOP_CODE = 122.0  # the row maximum's code in the linear approximation
EXP2_CODE = 120.0  # that of 2^8
BELOW = 11 / 16  # by which `quadratic` keeps a code low before it adds the square: the most that 2^x is below its chord
HALF_MAX = 65504.0
MAX_CODES = 65000.0  # |slope * maximum| beyond this would push the f16 offset out of range
HALF_ULP = 2.0**-11
ROOT, ROOT_OFFSET = 0.025909423828125, 27.375  # f16: sqrt(11) / 128, and 1056.5 times that
# Slopes lie between these, as -inf * 0 and inf - inf would be NaN; the least depends on the accumulator of the scores.
MIN_SLOPE = {"f16": 2.0**-24, "f32": 2.0**-126, "s32": 2.0**-126}
MAX_SLOPE = 2.0**80

Softmax = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """Return float32 a * b + c with one rounding: the product of two float32 is exact in float64."""
    return (a.double() * b.double() + c).float()


def row_max(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum, 0 where no key is visible, and that condition. NaN scores are passed over, as
    max.f32 and max.f16x2 do."""
    top = scores.amax(-1, keepdim=True)
    if bool(top.isnan().any()):
        top = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1, keepdim=True)
    dead = top == -torch.inf
    return top.masked_fill(dead, 0.0), dead


def exponentials(
    scores: torch.Tensor, slope: torch.Tensor, want_exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """2^x for float32 scores, 2^8 in a row's maximum, before any quantisation; their weight and sum."""
    top, dead = row_max(scores)
    offset = fma(-top, slope, EXP2_OFFSET)
    probability = torch.exp2(fma(scores, slope, offset.double()))
    weight = (-offset).masked_fill(dead, DEAD_WEIGHT)
    exact = probability.sum(-1, keepdim=True) if want_exact else torch.zeros_like(weight)
    return probability, weight, exact


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3, saturating upwards; NaN stays NaN."""
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def softmax_exp2(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """P = e4m3(2^x) for float32 scores; ``slope`` in octaves a score unit."""
    probability, weight, exact = exponentials(scores, slope, want_exact)
    p8 = e4m3(probability)
    return widened(p8), p8.view(torch.uint8), weight, exact


def softmax_exp2x2(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """The same with P as the sum of two e4m3 terms: e4m3(h) and e4m3(h - e4m3(h)) of h = f16(2^x).

    The error is at most 2^-9 + 2^-11 of P and 2^-10, which stands beside 2^8 in the row's maximum.
    """
    probability, weight, exact = exponentials(scores, slope, want_exact)
    half = probability.half().float()
    high = e4m3(half)
    large = widened(high)
    low = e4m3(half - large)  # the difference is exact in f16
    return large + widened(low), high.view(torch.uint8), weight, exact


def softmax_linear(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """P by its e4m3 code for float32 scores that hold f16 values; ``slope`` in codes (1/8 octave) a score unit.

    A row that sees no key is anchored on the lowest f16, as its codes are 0 whatever the anchor.
    """
    return _by_code(scores, slope, want_exact, TOP_CODE, 0.0, lambda u: u)


def softmax_quadratic(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """The same with the code bent inside an octave as 2^x is, to within 0.08 of a code."""
    return _by_code(scores, slope, want_exact, EXP2_CODE - BELOW, BELOW, _bent)


def _by_code(
    scores: torch.Tensor,
    slope: torch.Tensor,
    want_exact: bool,
    top_code: float,
    below: float,
    bend: Callable[[torch.Tensor], torch.Tensor],
) -> Softmax:
    """``below``: by how much a code is low before ``bend``."""
    top, dead = row_max(scores)
    top = top.masked_fill(dead, -HALF_MAX)
    a, b, weight_codes = anchor(top, slope, top_code)
    u = bend(half_of_sum(scores * a, b).relu())  # scores * a: two f16 values, exact in float32
    code = u.nan_to_num(nan=255.0).round().to(torch.uint8)
    weight = ((weight_codes - below) * 0.125 + 7.0).masked_fill(dead, DEAD_WEIGHT)  # code c stands for 2^(c / 8 - 7)
    exact = torch.zeros_like(weight)
    if want_exact:
        exact = torch.exp2(fma(scores, slope * 0.125, -weight.double())).sum(-1, keepdim=True)
    return widened(code.view(torch.float8_e4m3fn)), code, weight, exact


def _bent(u: torch.Tensor) -> torch.Tensor:
    """u + 11/256 (f - 4 - 1/16)^2 with f = (u + 3/4) mod 8 in eighths, each step rounded to f16 as the kernel does."""
    f = half_of_sum(u, torch.full_like(u[..., :1], 128.75)).remainder(8.0)  # a multiple of 1/8
    root = ((1024.0 + 8.0 * f) * ROOT - ROOT_OFFSET).half().float()  # exact before it is rounded
    return half_of_sum(root * root, u)


SOFTMAXES = {
    "linear": softmax_linear,
    "quadratic": softmax_quadratic,
    "exp2": softmax_exp2,
    "exp2x2": softmax_exp2x2,
}


def anchor(
    top: torch.Tensor, slope: torch.Tensor, top_code: float = TOP_CODE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slope and offset (f16 values) that send the row maximum to ``top_code`` at most, and the log-weight in codes.

    The offset is lowered by half an f16 ulp before it is rounded, so that rounding never raises the maximum's code.
    """
    capped = slope.clamp(max=HALF_MAX)
    capped = torch.where((top * capped).abs() > MAX_CODES, MAX_CODES / top.abs(), capped)
    a = capped.half().float()
    offset = fma(-top, a, top_code)
    b = fma(-offset.abs(), torch.full_like(offset, HALF_ULP), offset.double()).clamp(max=HALF_MAX).half().float()
    return a, b, top * slope - fma(top, a, b.double())


def half_of_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Round x + y to f16 once, for float32 x and y (broadcast over x); the result is float32.

    Rounding to float32 on the way is harmless unless it lands on a tie of f16, about once in 2^13 elements. There the
    sum moves one step towards its true value. (Below 2^-14 f16 has other ties; a code that small is 0 either way.)
    """
    total = x + y
    ties = ((total.view(torch.int32) & 0x1FFF) == 0x1000).nonzero(as_tuple=True)
    near = total[ties]
    error = x[ties].double() + y.expand_as(x)[ties].double() - near.double()
    side = torch.where(error > 0, torch.inf, -torch.inf).float()
    total[ties] = torch.where(error != 0, torch.nextafter(near, side), near)
    return total.half().float()
