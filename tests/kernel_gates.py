"""The tolerances that a kernel is held to beside the z-test, and where each comes from; shared by the tests of every
compiled kernel and by the fuzzer."""

from __future__ import annotations

import math

import torch
from reference import ZTest

from fp8cutlass.accuracy.standard import HIGH_ERROR
from fp8cutlass.accuracy.ztest import OUT_ERROR
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.manifest import Variant

L2_DEQUANTISED = 3.5e-2  # relative L2 against float64 on the dequantised operands, randn
L2_EMULATOR = 8e-3  # the accumulator of the tensor core is not modelled
L2_STEPS = 4  # up to so many steps of 32 products; every further one may round an f16 score the other way
E4M3_OUT_L2 = 2.0**-4 / 3**0.5  # rounding of an e4m3 output alone: uniform inside a step of at most 2^-3
# A difference d before that rounding moves the share d / step of the elements, each by a whole step: sqrt(d * step).
L2_EMULATOR_E4M3 = (L2_EMULATOR * 2.0**-3.5) ** 0.5
# P in two terms, relative L2 with the tensor core's accumulator simulated (13 fraction bits, fp16 output): 5.8e-4 to
# 7.6e-4 against float64, 4.8e-4 to 8.2e-4 against the emulator, most at head_dim 256. Half as much again, and the
# rounding of the output: 0.74 of its largest, on average over a power of two.
HIGH_L2 = {out: math.hypot(1.25e-3, 0.74 * OUT_ERROR[dtype] / 3**0.5) for out, dtype in OUT_DTYPES.items()}
AMAX = 2e-2  # of the largest |result|, relative to the emulator's
ROW_COSINE = 0.99  # of the worst row of randn


def emulator_limit(variant: Variant) -> float:
    """Relative L2 against the emulator."""
    steps = variant.head_dim // 32
    unmodelled = max(1.0, steps / L2_STEPS) ** 0.5 if variant.score == "f16" else 1.0
    return (L2_EMULATOR_E4M3 if variant.out == "e4m3" else L2_EMULATOR) * unmodelled


def beyond_rounding(out: torch.Tensor, unrounded: torch.Tensor, descale: float) -> float:
    """How far ``unrounded`` is from the numbers that round to the e4m3 output ``out`` (both with ``descale`` applied),
    relative L2: at most that of the two results before rounding, wherever in its step each is."""
    stored = (out / descale).to(torch.float8_e4m3fn)
    code = stored.view(torch.uint8).int()
    sign, size = torch.where(code > 127, -1.0, 1.0), code & 127
    table = torch.arange(127, dtype=torch.uint8, device=out.device).view(torch.float8_e4m3fn).float()
    middles = (table[1:] + table[:-1]) / 2
    upper = torch.cat([middles, middles.new_tensor([torch.inf])])
    lower = torch.cat([-middles[:1], middles])
    x = sign * unrounded / descale
    beyond = (x - upper[size]).relu() + (lower[size] - x).relu()
    return float(beyond.double().norm() / (unrounded.double() / descale).norm())


def dequantised_limit(variant: Variant) -> float:
    """Relative L2 against float64 on the dequantised operands, randn."""
    return L2_DEQUANTISED + (E4M3_OUT_L2 if variant.out == "e4m3" else 0.0)


def high_error_limit(variant: Variant, out: torch.Tensor) -> torch.Tensor:
    """Of the error of each element with P in two terms, on randn. A causal row of few keys is as large as V, 3 and
    more, where the rounding of the output alone exceeds what is asked of rows that average over many keys."""
    rounding = OUT_ERROR[OUT_DTYPES[variant.out]] if variant.causal else 0.0
    return HIGH_ERROR + rounding * out.abs()


def lse_limit(variant: Variant, largest: float, *, emulated: bool) -> float:
    """Of the LSE against float64. Scores are sums of head_dim / 32 steps. In f16 each is rounded; in float32 the tensor
    core truncates each to 13 fraction bits, except where it is emulated (on the CPU too). It cuts the products that it
    adds as well: on randn that is small, and not in this limit (``tensor_core`` has it). ``largest`` is the largest
    logit, or number on the way to one (the reference's ``max_partial``)."""
    steps = variant.head_dim // 32
    if variant.score == "f16":
        roundings = 2.0**-11 * 3 * steps
    else:
        roundings = 2.0**-12 if emulated else 2.0**-13 * max(2, steps)
    return 1e-4 + roundings * largest


def worst_row_is_the_algorithms(z: ZTest, emulated: ZTest) -> bool:
    """The worst row is one of few keys, where one key's interpolation error is the whole row's: the algorithm's, not
    the kernel's, if the emulator's worst row is as bad."""
    return z.row_rms <= 1.02 * emulated.row_rms
