"""Tiles whose Q K^T is a product of 8-bit integers, in torch: the specification of ``int8`` and ``int8_full``.

Scores are sums of 8-bit products, exact in s32 and in float32. A descale of K is that of a `group`: of the keys of a
block those that lie in one lane of a kernel. So a lane has one slope, and its largest score is an integer; lanes are
compared in float32. docs/design/numerics.md has the steps in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import widened
from ..manifest import GROUP_STEP, GROUPS
from .softmax import DEAD_WEIGHT, TOP_CODE, fma

MAGIC = 12_582_912.0  # 1.5 * 2^23: a float32 of MAGIC + s is the integer bits of MAGIC plus s, for |s| < 2^22
LEAST_SCORE = -(2.0**22)  # stands for the maximum of a lane that sees no key
MAX_INTEGER_SLOPE = 1.0  # codes a score unit, above which one unit is more than the rounding of an offset may lose
CODE_WEIGHT = 7.0 - TOP_CODE / 8  # of a row whose maximum is 0: code c stands for 2^(c / 8 - 7)
U8_MAX = 255.0


@dataclass(frozen=True)
class Tile:
    """Of a tile with R rows: P V (G, R, D), and (G, R, 1) the sums of P, the weight in octaves, and the sum of
    unquantised exponentials at that weight; ``p`` (G, R, N) uint8."""

    product: torch.Tensor
    total: torch.Tensor
    weight: torch.Tensor
    exact: torch.Tensor
    p: torch.Tensor


def lane_of(keys: int, device: torch.device) -> torch.Tensor:
    """The group, 0 to 3, of each of so many keys of a tile."""
    return torch.arange(keys, device=device) % GROUP_STEP // 2


def spread_groups(k_descale: torch.Tensor, keys: torch.Tensor, key_block: int) -> torch.Tensor:
    """The descale of each of ``keys``, positions in their sequence, of (G, 4 blocks): (G, 1, keys)."""
    return k_descale[:, keys // key_block * GROUPS + keys % GROUP_STEP // 2][:, None]


@dataclass(frozen=True)
class Lanes:
    """The largest score of each key's lane in a row (G, R, N), all in float32, and the largest logit of the row."""

    largest: torch.Tensor  # LEAST_SCORE where the lane sees no key
    gap: torch.Tensor  # by how much its logit is below the row's, at most 0; 0 where the lane sees no key
    top: torch.Tensor  # (G, R, 1), in the unit of the slope; -inf where the row sees no key, NaN where a descale is


def lanes(scores: torch.Tensor, slope: torch.Tensor) -> Lanes:
    """``slope`` (G, R, N) is alike in all keys of a lane."""
    lane = lane_of(scores.shape[-1], scores.device)
    largest, logit = torch.empty_like(scores), torch.empty_like(scores)
    for t in range(GROUPS):
        keys = lane == t
        if not bool(keys.any()):
            continue
        m = scores[..., keys].amax(-1, keepdim=True)
        none = m == -torch.inf
        m = m.clamp(min=LEAST_SCORE)
        largest[..., keys] = m
        logit[..., keys] = (m * slope[..., keys][..., :1]).masked_fill(none, -torch.inf)
    top = logit.amax(-1, keepdim=True)
    gap = torch.where(logit == -torch.inf, torch.where(top.isnan(), torch.nan, 0.0), logit - top)
    return Lanes(largest, gap, top)


def exponentials(scores: torch.Tensor, slope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """2^(score * slope - weight); ``slope`` in octaves a score unit."""
    return torch.exp2(fma(scores, slope, -weight.double()))


def by_code(scores: torch.Tensor, slope: torch.Tensor, v: torch.Tensor, want_exact: bool) -> Tile:
    """P by its e4m3 code; ``slope`` (G, R, N) in codes (1/8 octave) a score unit, v (G, N, D) the values of e4m3.

    A code is one multiplication and addition in float32, on MAGIC + score; it is rounded to even, and clamped by a
    conversion to u8.
    """
    row = lanes(scores, slope)
    used = slope.clamp(max=MAX_INTEGER_SLOPE)
    offset = fma(-(MAGIC + row.largest), used, (TOP_CODE + row.gap).double())
    code = fma(MAGIC + scores, used, offset.double()).nan_to_num(nan=0.0).round().clamp(0.0, U8_MAX).to(torch.uint8)
    dead = row.top == -torch.inf
    weight = fma(row.top, torch.full_like(row.top, 0.125), CODE_WEIGHT).masked_fill(dead, DEAD_WEIGHT)
    exact = torch.zeros_like(weight)
    if want_exact:
        exact = exponentials(scores, slope * 0.125, weight).sum(-1, keepdim=True)
    p = widened(code.view(torch.float8_e4m3fn))
    return Tile(p @ v, p.sum(-1, keepdim=True), weight, exact, code)


def by_bytes(scores: torch.Tensor, slope: torch.Tensor, v: torch.Tensor, v_descale: torch.Tensor) -> Tile:
    """P in u8, relative to what its keys add to O; ``slope`` in octaves a score unit, v (G, N, D) integers.

    The descale of each V (G, N) is multiplied into P before P is rounded; the largest such product of a row and tile
    becomes 255. So a key with a small V takes no range from the others, whatever its weight: that is the sink rule. The
    sums that divide O are of unrounded P.
    """
    row = lanes(scores, slope)
    dead = row.top == -torch.inf
    weight = row.top.masked_fill(dead, DEAD_WEIGHT)
    p = exponentials(scores, slope, row.top.masked_fill(dead, 0.0))
    share = torch.where(scores == -torch.inf, 0.0, p * v_descale[:, None])
    largest = share.amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest * (1.0 / U8_MAX), torch.where(largest.isnan(), torch.nan, 1.0))
    whole = (share / unit).nan_to_num(nan=0.0).round().clamp(0.0, U8_MAX)
    total = p.sum(-1, keepdim=True)
    return Tile((whole @ v) * unit, total, weight, total, whole.to(torch.uint8))
