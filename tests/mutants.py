"""Broken kernels: what each of them would return, made from the emulator.

A mutant changes one thing: an operand, a descale, the scale, a stage between the tiles (``promote`` runs the emulator's
last stage on its own diagnostics, bit for bit), or a few elements of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from reference import Operands, attention64, operands_of, randn

from fp8cutlass.accuracy.ztest import FLOOR, ZTest, deviation, summarise
from fp8cutlass.emulator.emulate import MAX_RISE, Diagnostics, emulate
from fp8cutlass.emulator.softmax import E4M3_MAX
from fp8cutlass.emulator.visible import LOG2E
from fp8cutlass.manifest import Variant, generated_dir, load_manifest

HEADS, HEAD_DIM = 2, 64
SCALE = HEAD_DIM**-0.5
STEP = 128  # keys
LAZY_RISE = 8.0  # octaves by which a lazy kernel lets the row maximum outgrow the one that P is anchored on
TOP_CODE = 126  # of the largest finite e4m3


@dataclass
class Problem:
    """Operands of one kernel, what the emulator makes of them, and the gate that holds it: float64 and its deviation,
    both (B, H, S, D)."""

    variant: Variant
    operands: Operands
    clean: torch.Tensor
    stages: Diagnostics
    exact: torch.Tensor
    sigma: torch.Tensor
    normal: bool  # randn, where the gate has a floor

    def z(self, out: torch.Tensor) -> ZTest:
        """The z-test of another output."""
        return summarise((out.double() - self.exact) / self.sigma, out)

    def refusals(self, out: torch.Tensor) -> list[str]:
        """Every gate that an output misses."""
        return self.z(out).refusals(floor=FLOOR if self.normal else 0.0)

    def run(self, operands: Operands | None = None, scale: float = SCALE) -> torch.Tensor:
        """The emulator's output for other operands or another scale."""
        x = operands or self.operands
        return emulate(*x.fp8, *x.descales, variant=self.variant, scale=scale, return_lse=False).out


def kernel(softmax: str, scaling: str = "block") -> Variant:
    """The first bf16 forward kernel of head_dim 64 that serves a mode of scaling, without a mask."""
    family = "sm90a" if softmax == "quadratic" else "sm89"
    wanted = {"family": family, "kind": "fwd", "head_dim": HEAD_DIM, "softmax": softmax}
    wanted |= {"dtype": "e4m3", "out": "bf16", "causal": False}
    serving = (v for v in load_manifest(generated_dir()).variants if scaling in v.scalings)
    return next(v for v in serving if all(getattr(v, name) == value for name, value in wanted.items()))


def normal_inputs(seqlen: int) -> list[torch.Tensor]:
    """N(0, 1), bf16."""
    return [randn(1, HEADS, seqlen, HEAD_DIM, seed=seed) for seed in range(3)]


def sorted_keys(seqlen: int) -> list[torch.Tensor]:
    """Logits that rise by 40 nats over the keys, in steps of 128, under N(0, 1/4): every tile outweighs the ones
    before, and the reference of the running sums moves. The last step alone has weight. Under N(0, 1) some rows of
    thousands would be the mean of so few keys that the interpolation error of the linear code is not averaged out (row
    rms 1.9).
    """
    q, k, v = normal_inputs(seqlen)
    q *= 0.5
    step = torch.arange(seqlen) // STEP
    q[..., 0] = 16.0
    k[..., 0] = 40.0 / (16.0 * SCALE) * step / step[-1]
    return [q, k, v]


@lru_cache(maxsize=2)  # one takes up to half a gigabyte
def problem(softmax: str, seqlen: int, rising: bool = False, scaling: str = "block") -> Problem:
    """The emulator and the gate on random operands of ``seqlen`` queries and keys."""
    variant = kernel(softmax, scaling)
    x = operands_of(variant, *(sorted_keys if rising else normal_inputs)(seqlen), scaling)
    got = emulate(
        *x.fp8, *x.descales, variant=variant, scale=SCALE, scaling=scaling, return_lse=False, diagnostics=True
    )
    if got.diagnostics is None:
        raise LookupError("the emulator kept no diagnostics")
    reference = attention64(*x.real, SCALE)
    sigma = deviation(reference, softmax, got.out.dtype)
    return Problem(variant, x, got.out, got.diagnostics, reference.out, sigma, not rising)


def tiles_of(p: Problem) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Every tile's sum of P (B, H, S, 1), weight (B, H, S, 1) and P V (B, H, S, D)."""
    probabilities = p.stages.p.view(torch.float8_e4m3fn).float().split(p.variant.tile_n, 3)
    return [
        (probabilities[t].sum(-1, keepdim=True), p.stages.weight[..., t, None], p.stages.tile_o[:, :, t])
        for t in range(p.stages.weight.shape[3])
    ]


def promote(
    p: Problem,
    tiles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    skip: int | None = None,
    shrink_o: bool = True,
    shrink_l: bool = True,
) -> torch.Tensor:
    """The sum over tiles of a kernel of scaling ``block``: promotion by weight, moves of the reference, division."""
    v_descale = p.operands.descales[2]
    o, row_sum, ref = torch.zeros(()), torch.zeros(()), None
    for t, (tile_sum, weight, tile_o) in enumerate(tiles):
        if t == skip:
            continue
        ref = weight if ref is None else ref
        rise = weight - ref
        shrink = torch.where(rise > MAX_RISE, torch.exp2(-rise), 1.0)
        ref = torch.where(rise > MAX_RISE, weight, ref)
        beta = torch.exp2(weight - ref)
        block = t * p.variant.tile_n // p.variant.key_block
        o = o * (shrink if shrink_o else 1.0) + beta * v_descale[:, :, block, None, None] * tile_o
        row_sum = row_sum * (shrink if shrink_l else 1.0) + beta * tile_sum
    return (o * (1.0 / row_sum)).bfloat16()


def lazy_tiles(p: Problem, patience: float = LAZY_RISE) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The tiles of a kernel that anchors P on the maximum it has, until that is outgrown by ``patience`` octaves: P
    beyond 448 saturates. With a patience of -inf every tile is anchored on its own."""
    q_descale, k_descale, _ = p.operands.descales
    tile_n, stale, tiles = p.variant.tile_n, None, []
    for t, s in enumerate(p.stages.scores.split(tile_n, 3)):
        of_tile = k_descale[:, :, t * tile_n // p.variant.key_block, None, None]
        octaves = s * (q_descale[..., None] * (SCALE * LOG2E) * of_tile)
        weight = p.stages.weight[..., t, None]
        stale = weight if stale is None else torch.where(weight - stale > patience, weight, stale)
        x = octaves - stale
        if p.variant.softmax == "linear":
            code = (8 * (x + 7)).round().clamp(0, TOP_CODE).to(torch.uint8)
            probability = code.view(torch.float8_e4m3fn).float()
        else:
            probability = torch.exp2(x).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
        v = p.operands.fp8[2][:, :, t * tile_n : (t + 1) * tile_n].float()
        probability = probability[..., : v.shape[2]]
        tiles.append((probability.sum(-1, keepdim=True), stale, probability @ v))
    return tiles


def _with(x: Operands, *, fp8: tuple[torch.Tensor, ...] = (), descales: tuple[torch.Tensor, ...] = ()) -> Operands:
    return Operands(fp8 or x.fp8, descales or x.descales, x.real)  # type: ignore[arg-type]


def wrong_head(p: Problem) -> torch.Tensor:
    """Every query head reads the K and V of the other."""
    (q, k, v), (qd, kd, vd) = p.operands.fp8, p.operands.descales
    swapped = [x.view(torch.uint8).flip(1).view(x.dtype) for x in (k, v)]
    return p.run(_with(p.operands, fp8=(q, *swapped), descales=(qd, kd.flip(1), vd.flip(1))))


def descale_off(p: Problem) -> torch.Tensor:
    qd, kd, vd = p.operands.descales
    return p.run(_with(p.operands, descales=(qd, kd, vd * 1.05)))


def edited(p: Problem, edit: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The clean output with a change made in place."""
    out = p.clean.clone()
    edit(out)
    return out


def swap_fragments(out: torch.Tensor) -> None:
    """Two neighbouring 16 x 8 accumulators of one warp are stored in each other's place."""
    out[0, 1, 16:32, :16] = out[0, 1, 16:32, :16].roll(8, -1)


def swap_rows(out: torch.Tensor) -> None:
    """A thread's two rows of one accumulator, 8 apart, are exchanged."""
    out[0, 1, 32:48] = out[0, 1, 32:48].roll(8, 0)


def wrong_fragment(out: torch.Tensor) -> None:
    """One 16 x 8 accumulator is that of the rows below."""
    out[0, 0, 48:64, 8:16] = out[0, 0, 64:80, 8:16].clone()


def wrong_element(out: torch.Tensor) -> None:
    """One element is off by one standard deviation of the output."""
    out[0, 1, 77, 9] += out.float().std().to(out.dtype)


@dataclass(frozen=True)
class Mutant:
    """A broken kernel; ``rising`` where only sorted keys reach what it breaks."""

    name: str
    output: Callable[[Problem], torch.Tensor]
    rising: bool = False


MUTANTS = (
    Mutant("zeros", lambda p: torch.zeros_like(p.clean)),
    Mutant("mean of V", lambda p: p.operands.real[2].mean(2, keepdim=True).expand_as(p.clean).bfloat16()),
    Mutant("first tile dropped", lambda p: promote(p, tiles_of(p), skip=0)),
    Mutant("last tile dropped", lambda p: promote(p, tiles_of(p), skip=len(tiles_of(p)) - 1)),
    Mutant("wrong head", wrong_head),
    Mutant("no 1/sqrt(d)", lambda p: p.run(scale=SCALE * math.sqrt(HEAD_DIM))),
    Mutant("fragments swapped", lambda p: edited(p, swap_fragments)),
    Mutant("rows swapped", lambda p: edited(p, swap_rows)),
    Mutant("descale off by 5%", descale_off),
    Mutant("l not rescaled", lambda p: promote(p, tiles_of(p), shrink_l=False), rising=True),
    Mutant("O not rescaled", lambda p: promote(p, tiles_of(p), shrink_o=False), rising=True),
    Mutant("saturating P", lambda p: promote(p, lazy_tiles(p))),
    Mutant("one fragment wrong", lambda p: edited(p, wrong_fragment)),
    Mutant("one element wrong", lambda p: edited(p, wrong_element)),
)
