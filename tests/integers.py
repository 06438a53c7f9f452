"""8-bit integers as operands: the variants that the emulator runs, a problem of each, and kernels that break it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import torch
from reference import Operands, attention64, operands_of, randn

from fp8cutlass.accuracy.ztest import FLOOR, ZTest, byte_deviation, deviation, summarise
from fp8cutlass.choose.stand_in import stand_in
from fp8cutlass.emulator import integer, tile
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant, generated_dir, load_manifest

PRECISIONS = ("int8", "int8_full")
HEADS, HEAD_DIM, KEYS = 2, 64, 512
SCALE = HEAD_DIM**-0.5


def kernel(precision: str, **wanted: object) -> Variant:
    """A variant that computes a precision: the tiles of the first one in float32 of head_dim 64, or of what is said."""
    wanted = {"kind": "fwd", "head_dim": HEAD_DIM, "softmax": "exp2", "dtype": "e4m3", "out": "bf16"} | wanted
    wanted = {"scaling": "block", "causal": False} | wanted
    variants = load_manifest(generated_dir()).variants
    base = next(v for v in variants if all(getattr(v, name) == value for name, value in wanted.items()))
    return stand_in(base, precision)


@dataclass
class Problem:
    """Operands, what the emulator makes of them, and the gate: float64 and its deviation, both (B, H, S, D)."""

    variant: Variant
    operands: Operands
    clean: torch.Tensor
    exact: torch.Tensor
    sigma: torch.Tensor

    def run(self, operands: Operands | None = None) -> torch.Tensor:
        """The emulator's output, for other operands where some are given."""
        x = operands or self.operands
        return emulate(*x.fp8, *x.descales, variant=self.variant, scale=SCALE, return_lse=False).out

    def z(self, out: torch.Tensor) -> ZTest:
        """The z-test of an output."""
        return summarise((out.double() - self.exact) / self.sigma, out)

    def refusals(self, out: torch.Tensor) -> list[str]:
        """Every gate that an output misses."""
        return self.z(out).refusals(floor=FLOOR)


@lru_cache(maxsize=2)
def problem(precision: str) -> Problem:
    """Of N(0, 1), bf16, where one token of V in 16 is four times as large, so that descales differ."""
    variant = kernel(precision)
    q, k, v = (randn(1, HEADS, KEYS, HEAD_DIM, seed=seed) for seed in range(3))
    v[:, :, ::16] *= 4
    x = operands_of(variant, q, k, v)
    reference = attention64(*x.real, SCALE)
    if precision == "int8_full":
        sigma = byte_deviation(reference, x.descales[2], variant.tile_n, torch.bfloat16)
    else:
        sigma = deviation(reference, variant.softmax, torch.bfloat16)
    made = Problem(variant, x, torch.empty(0), reference.out, sigma)
    return replace(made, clean=made.run())


def _with(p: Problem, q: torch.Tensor | None = None, descales: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
    x = p.operands
    bytes_ = x.fp8 if q is None else (q, *x.fp8[1:])
    return p.run(Operands(bytes_, descales or x.descales, x.real))  # type: ignore[arg-type]


def lost_sign(p: Problem) -> torch.Tensor:
    """The lowest s8 of Q, which are read as u8: a sign is lost where |q| is near its largest."""
    q = p.operands.fp8[0]
    return _with(p, torch.where(q < -100, -q, q))


def wrong_group(p: Problem) -> torch.Tensor:
    """A lane reads the descale of the keys of its neighbour."""
    q, k, v = p.operands.descales
    return _with(p, descales=(q, k.unflatten(2, (-1, 4)).roll(1, 3).flatten(2), v))


def next_block(p: Problem) -> torch.Tensor:
    """A tile reads the descales of the block behind."""
    q, k, v = p.operands.descales
    return _with(p, descales=(q, k.roll(-4, 2), v))


def narrow_sum(p: Problem) -> torch.Tensor:
    """Scores are summed in 16 bits, and wrap around."""
    real = tile.scores_of

    def wrapped(*args: object) -> torch.Tensor:
        s = real(*args)  # type: ignore[arg-type]
        return (s + 2.0**15).remainder(2.0**16) - 2.0**15

    return _patched(p, "scores_of", wrapped)


def saturated(p: Problem) -> torch.Tensor:
    """P of u8 is cut off at 127; P of a code one octave too high, and cut off where a row's maximum should be."""
    real_lanes, real_bytes = integer.lanes, integer.by_bytes

    def high(*args: torch.Tensor) -> integer.Lanes:
        row = real_lanes(*args)
        return replace(row, gap=(row.gap + 8.0).clamp(max=0.5))

    def short(*args: torch.Tensor) -> integer.Tile:
        made = real_bytes(*args)
        return replace(made, product=(made.p.float().clamp(max=127.0) @ args[2]) * unit_of(made, args[2]))

    if p.variant.softmax == "bytes":
        return _patched_integer(p, "by_bytes", short)
    return _patched_integer(p, "lanes", high)


def unit_of(made: integer.Tile, v: torch.Tensor) -> torch.Tensor:
    """What one of a row's P in u8 stands for."""
    return made.product.norm(dim=-1, keepdim=True) / (made.p.float() @ v).norm(dim=-1, keepdim=True)


def biased_code(p: Problem) -> torch.Tensor:
    """The offset of a lane forgets how far its largest score lies below the row's."""
    real = integer.lanes
    return _patched_integer(p, "lanes", lambda *args: replace(real(*args), gap=torch.zeros_like(real(*args).gap)))


def unweighed_sum(p: Problem) -> torch.Tensor:
    """What divides O is the sum of P in u8, which has V's descales in it."""
    real = integer.by_bytes

    def wrong(*args: torch.Tensor) -> integer.Tile:
        made = real(*args)
        mean = args[3].mean(-1)[:, None, None]
        return replace(made, total=made.p.float().sum(-1, keepdim=True) * unit_of(made, args[2]) / mean)

    return _patched_integer(p, "by_bytes", wrong)


def wrapped_product(p: Problem) -> torch.Tensor:
    """P V is summed in 16 bits."""
    real = integer.by_bytes

    def wrong(*args: torch.Tensor) -> integer.Tile:
        made = real(*args)
        whole = made.p.float() @ args[2]
        wrapped = (whole + 2.0**15).remainder(2.0**16) - 2.0**15
        return replace(made, product=wrapped * unit_of(made, args[2]))

    return _patched_integer(p, "by_bytes", wrong)


def _patched(p: Problem, name: str, by: Callable[..., object]) -> torch.Tensor:
    return _replaced(importlib.import_module(emulate.__module__), p, name, by)


def _patched_integer(p: Problem, name: str, by: Callable[..., object]) -> torch.Tensor:
    return _replaced(integer, p, name, by)


def _replaced(module: ModuleType, p: Problem, name: str, by: Callable[..., object]) -> torch.Tensor:
    real = getattr(module, name)
    setattr(module, name, by)
    try:
        return p.run()
    finally:
        setattr(module, name, real)


BOTH: tuple[Callable[[Problem], torch.Tensor], ...] = (lost_sign, wrong_group, next_block, narrow_sum, saturated)
MUTANTS = {"int8": (*BOTH, biased_code), "int8_full": (*BOTH, unweighed_sum, wrapped_product)}
