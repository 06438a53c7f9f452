"""The products and the softmax of one tile of keys."""

from __future__ import annotations

from typing import cast

import torch

from ..manifest import Variant
from . import integer
from .softmax import MAX_SLOPE, MIN_SLOPE, SOFTMAXES

MMA_K = 32  # products of one FP8 matrix instruction
OCTAVES = ("exp2", "exp2x2", "bytes")  # softmaxes whose slope is in octaves; of others it is in codes


def scores_of(q: torch.Tensor, k: torch.Tensor, accumulator: str, emulated_mma: bool) -> torch.Tensor:
    """Q K^T as float32; an f16 accumulator is rounded after every matrix instruction, which takes 32 products.

    Where FP8 ``mma.sync`` is emulated, an instruction is two f16 ones of 16 products from zero, then an f16 addition:
    the first takes bytes 0 and 1 of every register, which holds 4 neighbours, the second bytes 2 and 3.
    """
    if accumulator != "f16":  # s32 is exact, and so is float32 of such numbers
        return q @ k.transpose(1, 2)
    total = torch.zeros((), device=q.device)
    for d in range(0, q.shape[-1], MMA_K):
        q_step, k_step = q[..., d : d + MMA_K], k[..., d : d + MMA_K].transpose(1, 2)
        if emulated_mma:
            first = torch.arange(MMA_K, device=q.device) % 4 < 2
            product = (q_step[..., first] @ k_step[:, first]).half().float()
            product = (product + q_step[..., ~first] @ k_step[:, ~first]).half().float()
        else:
            product = q_step @ k_step
        total = (total + product).half().float()
    return total


def values_of(p: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P V of a tile, (G, R, D) of (G, R, N) and (G, N, D), and the sums of P, (G, R, 1)."""
    return p @ v, p.sum(-1, keepdim=True)


def slope_of(
    s: torch.Tensor, q_slope: torch.Tensor, k_descale: torch.Tensor, k_shared_by: str, variant: Variant, tile: int
) -> torch.Tensor:
    """What makes octaves or codes of scores (G, R, N) of tile number ``tile``: (G, R, 1), or (G, R, N) where a group of
    keys has a descale.

    ``q_slope`` (G, R, 1), ``k_descale`` by what shares one: those of all tiles.
    """
    if k_shared_by == "token":
        of_keys = torch.ones((), device=s.device)  # the scores are multiplied by it already
    elif k_shared_by == "group":
        start = tile * variant.tile_n
        keys = torch.arange(start, start + s.shape[2], device=s.device)
        of_keys = integer.spread_groups(k_descale, keys, variant.key_block)
    else:
        of_keys = k_descale[:, tile, None, None]
    unit = q_slope if variant.softmax in OCTAVES else q_slope * 8.0
    return (unit * of_keys).clamp(MIN_SLOPE[variant.score], MAX_SLOPE)


def tile_of(
    s: torch.Tensor, slope: torch.Tensor, v: torch.Tensor, v_token: torch.Tensor | None, softmax: str, want_exact: bool
) -> integer.Tile:
    """What masked scores (G, R, N) add to O and to the sums of their rows; V (G, N, D), the descales of its tokens
    (G, N)."""
    if softmax == "codes":
        return integer.by_code(s, slope, v, want_exact)
    if softmax == "bytes":
        return integer.by_bytes(s, slope, v, cast(torch.Tensor, v_token))
    p, p_bytes, weight, exact = SOFTMAXES[softmax](s, slope, want_exact)
    return integer.Tile(*values_of(p, v), weight, exact, p_bytes)
