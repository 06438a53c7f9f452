"""Is the algorithm inside its theory? Every element against float64 on the dequantised operands, in units of the
standard deviation that the rounding of P and of the output give it.

A relative L2 of the whole tensor cannot answer this. It passes one wrong fragment, or one dropped tile of many. Where
the tolerance is a few percent of the largest value, it passes an output of zeros. tests/proof/test_mutants.py
has examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .reference import STEP, Reference

# Standard deviation of the relative rounding error of P: 0.0255 for a rounded e4m3; the linear code adds the error of
# interpolating 2^x inside an octave, 19% in all, of which the quadratic one leaves 0.2%. Two terms lose 0.00075; the
# tensor core's accumulator of 13 fraction bits, simulated, brings that to 0.0008 to 0.0010 at head_dim 64 to 256.
# P in f16, as decode has it, has steps of 2^-10 of the power of two below: 0.00028 there, 0.74 of it over an octave.
P_ERROR = {
    "exp2": 0.0255,
    "linear": 0.0255 * 1.19,
    "codes": 0.0255 * 1.19,
    "quadratic": 0.0255,
    "exp2x2": 0.001,
    "f16": 0.00021,
}
# A float32 score is cut to 13 fraction bits of itself or of the largest product in it after each step of 32 products:
# toward zero, by half a unit on average. All keys of a row are so read a little too close to each other. Beside the
# rounding of P in one term that is nothing; two terms are exact enough to show it.
SCORE_CUT = {"exp2": 0.0, "linear": 0.0, "codes": 0.0, "quadratic": 0.0, "exp2x2": 2.0**-14, "f16": 0.0}
# log2 of the P of a row maximum: 2^8, and code 122; in f16 it is 2^15, 2^39 of the smallest step as 2^30 is of e4m3's.
P_OFFSET = {
    "exp2": 8.0,
    "linear": math.log2(320.0),
    "codes": math.log2(320.0),
    "quadratic": 8.0,
    "exp2x2": 8.0,
    "f16": 30.0,
}
# The largest relative rounding error of an output.
OUT_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}
# The largest of a small output, half the step of subnormal numbers. That of FP8 depends on its descale and is left out.
OUT_LEAST = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float8_e4m3fn: 0.0}

LIMITS = {"rms": 1.10, "max": 7.0, "row_rms": 1.8, "mean": 0.03}
FLOOR = 0.2  # rms on normal inputs: what is closer to float64 did not compute in FP8


@dataclass
class ZTest:
    """z = (o - r) / sigma over all elements. Gates: rms <= 1.10, max <= 7, row_rms <= 1.8, |mean| <= 0.03 (S <= 8k).

    They are stated for many rows of 64 columns or more. The mean of few elements scatters by itself, so its gate is
    never below four standard errors; the rms of a shorter row does, by four standard errors more than that of 64.
    """

    elements: int  # in rows that differ: equal rows are one observation
    columns: int
    rms: float
    max: float
    row_rms: float
    mean: float

    def limits(self) -> dict[str, float]:
        """The upper gate of each figure."""
        scatter = max(0.0, 4 / math.sqrt(2 * self.columns) - 4 / math.sqrt(128))
        mean = max(LIMITS["mean"], 4 / math.sqrt(self.elements))
        return LIMITS | {"row_rms": LIMITS["row_rms"] + scatter, "mean": mean}

    def refusals(self, *, floor: float = 0.0) -> list[str]:
        """Every gate that is missed; a NaN misses all of them. ``floor`` is the least rms, FLOOR on normal inputs."""
        limits = self.limits()
        found = {name: abs(getattr(self, name)) for name in limits}
        missed = [f"{n} {found[n]:.3g} > {limit:.3g}" for n, limit in limits.items() if not found[n] <= limit]
        return missed + ([] if self.rms >= floor else [f"rms {self.rms:.3g} < {floor}"])


def deviation(reference: Reference, softmax: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Standard deviation of every element of the output, (B, H, Sq, D) float64: each P rounded by its share, at least
    by the step of the smallest e4m3, its score cut, and the result rounded to ``out_dtype``."""
    a, v, r = reference.probabilities, reference.values, reference.out
    error = P_ERROR[softmax]
    if SCORE_CUT[softmax]:
        error = math.hypot(error, SCORE_CUT[softmax] * v.shape[-1] / STEP * reference.max_partial)
    step = 2.0**-9 * 2.0 ** -P_OFFSET[softmax] * a.amax(-1, keepdim=True) / math.sqrt(12)
    variance = torch.maximum(error * a, step) ** 2 @ v**2
    variance += (OUT_ERROR[out_dtype] * r).abs().clamp_min(OUT_LEAST[out_dtype]) ** 2 / 3
    return variance.clamp_min(1e-300).sqrt()


def byte_deviation(reference: Reference, v_descale: torch.Tensor, tile_n: int, out_dtype: torch.dtype) -> torch.Tensor:
    """That of P in u8: what a key adds to O is rounded to a 255th of the largest in its row and tile, ``tile_n`` keys,
    of each V (B, H, S) in units of its descale, which is 0 of a V of zeros."""
    descale = v_descale.double()
    share = reference.probabilities * descale[:, :, None]
    step = torch.cat([x.amax(-1, keepdim=True).expand_as(x) for x in share.split(tile_n, -1)], -1) / 255
    whole = reference.values / descale.masked_fill(descale == 0, 1.0)[..., None]
    variance = step**2 @ whole**2 / 12 + (OUT_ERROR[out_dtype] * reference.out).abs() ** 2 / 3
    return variance.clamp_min(1e-300).sqrt()


def z_scores(
    out: torch.Tensor, reference: Reference, softmax: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """z of every element of ``out`` (B, H, Sq, D), float64. The arguments are those of ``z_test``."""
    return (out.double() - reference.out) / deviation(reference, softmax, out_dtype or out.dtype)


def summarise(z: torch.Tensor, out: torch.Tensor) -> ZTest:
    """The figures of scores ``z`` for an output of the same shape (B, H, Sq, D)."""
    return ZTest(
        elements=torch.unique(out.float().flatten(0, 2), dim=0).numel(),
        columns=out.shape[3],
        rms=float(z.square().mean().sqrt()),
        max=float(z.abs().max()),
        row_rms=float(z.square().mean(-1).sqrt().max()),
        mean=float(z.mean()),
    )


def z_test(out: torch.Tensor, reference: Reference, softmax: str, out_dtype: torch.dtype | None = None) -> ZTest:
    """Compare ``out`` (B, H, Sq, D), already multiplied by its descale if it has one, with float64 on the dequantised
    operands. ``softmax`` is how P was made, a key of P_ERROR. ``out_dtype`` is the type that was stored,
    when ``out`` is not in it any more."""
    return summarise(z_scores(out, reference, softmax, out_dtype), out)
