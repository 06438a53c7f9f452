"""Softmax of one KV tile as the kernels compute it, in torch: the counterpart of include/fp8cutlass/softmax.cuh.

Both functions take scores (..., rows, keys) with -inf where masked and a slope (..., rows, 1), and return
``(p, p_bytes, weight, exact)`` with ``2^(score * slope) = p * 2^weight`` up to the rounding of P:

* ``p``: the e4m3 probabilities as float32, and their bytes (uint8);
* ``weight``: (..., rows, 1), in octaves; -1e30 for a row that sees no key of the tile;
* ``exact``: sum of the unquantised exponentials at that weight, (..., rows, 1); zeros unless ``want_exact``.
"""

from __future__ import annotations

import torch

DEAD_WEIGHT = -1e30
E4M3_MAX = 448.0
EXP2_OFFSET = 8.0  # the row maximum becomes 2^8
TOP_CODE = 122.0  # the row maximum's code in the linear approximation
HALF_MAX = 65504.0
MAX_CODES = 65000.0  # |slope * maximum| beyond this would push the f16 offset out of range
MAX_WEIGHT_CODES = 1e29  # keeps inf - inf out of the weight

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


def softmax_exp2(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """P = e4m3(2^x) for float32 scores; ``slope`` in octaves a score unit."""
    top, dead = row_max(scores)
    offset = fma(-top, slope, EXP2_OFFSET)
    probability = torch.exp2(fma(scores, slope, offset.double()))
    p8 = probability.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    weight = (-offset).masked_fill(dead, DEAD_WEIGHT)
    exact = probability.sum(-1, keepdim=True) if want_exact else torch.zeros_like(weight)
    return p8.float(), p8.view(torch.uint8), weight, exact


def softmax_linear(scores: torch.Tensor, slope: torch.Tensor, want_exact: bool = True) -> Softmax:
    """P by its e4m3 code for float32 scores that hold f16 values; ``slope`` in codes (1/8 octave) a score unit."""
    top, dead = row_max(scores)
    a, b, weight_codes = anchor(top, slope)
    u = half_of_sum(scores * a, b).relu()  # scores * a: two f16 values, exact in float32
    code = u.nan_to_num(nan=255.0).round().to(torch.uint8)
    # Code c stands for 2^(c / 8 - 7).
    weight = (weight_codes * 0.125 + 7.0).masked_fill(dead, DEAD_WEIGHT)
    exact = torch.zeros_like(weight)
    if want_exact:
        shift = (-weight).masked_fill(dead, 0.0)
        exact = torch.exp2(fma(scores, slope * 0.125, shift.double())).sum(-1, keepdim=True)
    return code.view(torch.float8_e4m3fn).float(), code, weight, exact


def anchor(top: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slope and offset (f16 values) that send the row maximum to code 122 at most, and the log-weight in codes."""
    codes = (top * slope).clamp(-MAX_WEIGHT_CODES, MAX_WEIGHT_CODES)
    capped = slope.clamp(max=HALF_MAX)
    capped = torch.where((top * capped).abs() > MAX_CODES, MAX_CODES / top.abs(), capped)
    a = capped.half().float()
    b = half_round_down(fma(-top, a, TOP_CODE).clamp(max=HALF_MAX))
    return a, b, codes - fma(top, a, b.double())


def half_round_down(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to an f16 value toward -inf; the result is float32."""
    half = x.half()
    bits = half.view(torch.int16)
    # Sign and magnitude: one step down is -1 above zero, +1 below it, and the smallest negative number at zero.
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, torch.full_like(bits, -32767)))
    return torch.where(half.float() > x, below.view(torch.float16), half).float()


def half_of_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Round x + y to f16 once, for float32 x and y (broadcast over x); the result is float32.

    Rounding to float32 on the way is harmless unless it lands on a tie of f16, about once in 2^13 elements. There the
    sum moves one step towards its true value. (Below 2^-14 f16 has other ties; a code that small is 0 either way.)
    """
    total = x + y
    tie = (total.view(torch.int32) & 0x1FFF) == 0x1000
    near = total[tie]
    error = x[tie].double() + y.expand_as(x)[tie].double() - near.double()
    side = torch.where(error > 0, torch.inf, -torch.inf).float()
    total[tie] = torch.where(error != 0, torch.nextafter(near, side), near)
    return total.half().float()
