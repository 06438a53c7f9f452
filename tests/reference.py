"""float64 references and the accuracy gates, shared by the CPU and the GPU tests.

Three questions, three references: the emulator (is the code right?), float64 on the dequantised operands (is the
algorithm inside its theory? the z-test), float64 on the original operands (what does the user lose?).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8cutlass.manifest import KEY_BLOCK, Variant
from fp8cutlass.quantize import FP8_MAX, SCORE_AMAX, V_AMAX, dequantize, quantize
from fp8cutlass.target import granularities

# Standard deviation of the relative rounding error of P: 0.0255 for a rounded e4m3; the linear code adds the error of
# interpolating 2^x inside an octave, 19% in all.
P_ERROR = {"exp2": 0.0255, "linear": 0.0255 * 1.19}
P_OFFSET = {"exp2": 8.0, "linear": math.log2(320.0)}  # log2 of the P of a row maximum: 2^8, and code 122
OUT_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float8_e4m3fn: 2.0**-4}


def visible(
    seqlen_q: int, seqlen_k: int, causal_offset: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(Sq, Sk) bool: which keys a row sees; None means no mask."""
    if causal_offset is None:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    row = torch.arange(seqlen_q, device=device)[:, None]
    return torch.arange(seqlen_k, device=device)[None] <= row + causal_offset


@dataclass
class Reference:
    """``out`` (B, H, Sq, D), ``lse`` (B, H, Sq) and the probabilities (B, H, Sq, Sk), all float64."""

    out: torch.Tensor
    lse: torch.Tensor
    probabilities: torch.Tensor
    values: torch.Tensor  # (B, H, Sk, D), heads repeated
    max_score: float  # largest |visible logit|


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal_offset: int | None = None
) -> Reference:
    """Attention of (B, H, Sq, D) and (B, Hkv, Sk, D) operands in float64; rows without keys are 0 and -inf."""
    repeat = q.shape[1] // k.shape[1]
    k64, v64 = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    logits = scale * (q.double() @ k64.transpose(-1, -2))
    seen = visible(q.shape[2], k.shape[2], causal_offset, q.device)
    largest = float(logits[..., seen].abs().max()) if bool(seen.any()) else 0.0
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    probabilities = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return Reference(probabilities @ v64, lse, probabilities, v64, largest)


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

    def refusals(self) -> list[str]:
        """Every gate that is missed; a NaN misses all of them."""
        limits = {
            "rms": 1.10,
            "max": 7.0,
            "row_rms": 1.8 + max(0.0, 4 / math.sqrt(2 * self.columns) - 4 / math.sqrt(128)),
            "mean": max(0.03, 4 / math.sqrt(self.elements)),
        }
        found = {name: abs(getattr(self, name)) for name in limits}
        return [f"{name} {found[name]:.3g} > {limit}" for name, limit in limits.items() if not found[name] <= limit]


def z_test(out: torch.Tensor, reference: Reference, softmax: str, out_dtype: torch.dtype | None = None) -> ZTest:
    """Compare ``out`` (B, H, Sq, D), already multiplied by its descale if it has one, with float64 on the dequantised
    operands. ``out_dtype`` is the type that was stored, when ``out`` is not in it any more."""
    a, v, r = reference.probabilities, reference.values, reference.out
    step = 2.0**-9 * 2.0 ** -P_OFFSET[softmax] * a.amax(-1, keepdim=True) / math.sqrt(12)
    variance = torch.maximum(P_ERROR[softmax] * a, step) ** 2 @ v**2
    variance += (OUT_ULP[out_dtype or out.dtype] * r) ** 2 / 3
    z = (out.double() - r) / variance.clamp_min(1e-300).sqrt()
    return ZTest(
        elements=torch.unique(out.float().flatten(0, 2), dim=0).numel(),
        columns=out.shape[3],
        rms=float(z.square().mean().sqrt()),
        max=float(z.abs().max()),
        row_rms=float(z.square().mean(-1).sqrt().max()),
        mean=float(z.mean()),
    )


def relative_l2(out: torch.Tensor, reference: torch.Tensor) -> float:
    """|o - r| / |r| in float64."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def min_row_cosine(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The worst row: one bad row hides in a mean."""
    return float(torch.cosine_similarity(out.double(), reference.double(), dim=-1).min())


@dataclass
class Operands:
    """FP8 operands with canonical descales, and what they stand for."""

    fp8: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    real: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # float64


def make_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    granularity: tuple[str, str, str],
    *,
    score_amax: float = SCORE_AMAX,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: int = KEY_BLOCK,
) -> Operands:
    """Quantise (B, H, S, D) operands the way ``attention`` does."""
    pairs = [
        quantize(x, granularity=shared_by, amax=amax, dtype=dtype, block=block)
        for x, shared_by, amax in zip((q, k, v), granularity, (score_amax, score_amax, V_AMAX), strict=True)
    ]
    real = [dequantize(x, d, g, block).double() for (x, d), g in zip(pairs, granularity, strict=True)]
    return Operands(tuple(x for x, _ in pairs), tuple(d for _, d in pairs), tuple(real))


def operands_of(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: str | None = None
) -> Operands:
    """Quantise for one kernel: its FP8 type, the range of its scores, its blocks; in one of the modes that it serves,
    by default its own."""
    dtype = torch.float8_e4m3fn if variant.dtype == "e4m3" else torch.float8_e5m2
    amax = SCORE_AMAX if variant.softmax == "linear" else FP8_MAX[dtype]
    granularity = granularities(scaling or variant.scaling)
    return make_operands(q, k, v, granularity, score_amax=amax, dtype=dtype, block=variant.key_block)


def randn(*shape: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bf16 normal numbers that are the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def unseen_tile(head_dim: int, device: torch.device | str = "cpu") -> tuple[tuple[torch.Tensor, ...], int]:
    """Q, K and V, and a causal offset: rows see keys with logits near -100, and nothing of a tile of their KV block
    whose keys, and with them its descale, are 20 times smaller. Weighed by that descale it would outweigh all they saw.
    """
    q = randn(1, 1, 200, head_dim, seed=1, device=device).abs()
    k = -randn(1, 1, 256, head_dim, seed=2, device=device).abs() * (100 / (0.64 * head_dim**0.5))
    k[:, :, 128:] *= 0.05
    return (q, k, randn(1, 1, 256, head_dim, seed=3, device=device)), 56
