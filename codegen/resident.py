"""The kernels that keep a head's K and V in shared memory: short sequences from bf16 or fp16 in one launch. Which there
are, and what follows from their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from codegen.axes import Mask
from codegen.pack import Source
from codegen.profiles import PROFILES
from codegen.scaling import KEY_BLOCK

TARGET = "sm90a"
ROWS = 64  # of a row tile, a warpgroup's
ONES = 8  # rows of ones in V^T
ALIGNMENT = 1_024  # bytes: where a swizzled tile may begin, and the size that a block of memory is rounded up to
EXACT_BYTES = 16  # a thread: two rows' sums of unquantised exponentials, of the row tile and of the tile of keys
BARRIER_BYTES = 8
TOLD = 16  # sequences of a ragged batch that a CTA knows of
TOLD_BYTES = 32 + 2 * BARRIER_BYTES  # of each


class Form(NamedTuple):
    """A kernel of a source."""

    mask: Mask
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"ragged_{self.mask}" if self.ragged else str(self.mask)

    @property
    def walk(self) -> str:
        """The class that says what its sequences are."""
        return "OfLengths" if self.ragged else "Alike"


FORMS = tuple(Form(m, ragged) for ragged in (False, True) for m in (Mask.FULL, Mask.CAUSAL))  # csrc/kernels.h has them


class Shape(NamedTuple):
    """Of a CTA: warpgroups that multiply, tiles of K and V in e4m3 that there is room for, blocks of K or V in 16 bits
    that are on their way or wait to be converted. And CTAs an SM."""

    warpgroups: int
    slots: int
    stages: int
    ctas_per_sm: int = 1


# By head_dim and the most keys, as measured (docs/lab/short.md).
SHAPES = {
    (64, 64): Shape(2, 4, 4, ctas_per_sm=2),
    (64, 128): Shape(3, 6, 4),
    (64, 256): Shape(3, 6, 4),
    (64, 512): Shape(3, 6, 4),
    (64, 1024): Shape(3, 8, 2),
    (128, 64): Shape(2, 6, 4),
    (128, 128): Shape(2, 3, 2),
    (128, 256): Shape(2, 3, 2),
    (128, 512): Shape(2, 4, 1),
}
# Those of profile ci: each head_dim, each type, each number of warpgroups, one tile and several.
CI = {(64, 64, Source.FP16), (64, 512, Source.BF16), (128, 256, Source.BF16), (128, 512, Source.FP16)}


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, kw_only=True)
class Resident:
    """One source, for calls of one head_dim and type with at most ``keys`` keys."""

    head_dim: int
    keys: int
    source: Source

    @property
    def id(self) -> str:
        return f"resident_d{self.head_dim}_k{self.keys}_{self.source}"

    @property
    def path(self) -> str:
        return f"resident/{self.id}.cu"

    @property
    def shape(self) -> Shape:
        return SHAPES[self.head_dim, self.keys]

    @property
    def warpgroups(self) -> int:
        return self.shape.warpgroups

    @property
    def ctas_per_sm(self) -> int:
        return self.shape.ctas_per_sm

    @property
    def threads(self) -> int:
        """Of the warpgroups that multiply, and of the one that converts."""
        return 128 * (self.warpgroups + 1)

    @property
    def tile(self) -> int:
        """Keys of a tile, and of a block descale where there are so many."""
        return min(KEY_BLOCK, self.keys)

    @property
    def tiles(self) -> int:
        return self.keys // self.tile

    @property
    def parts(self) -> int:
        """Column parts of P V: of several tiles O, P V and P do not fit the registers at head_dim 128."""
        return 2 if self.tiles > 1 and self.head_dim == 128 else 1

    @property
    def products(self) -> int:
        """Warpgroup instructions for a tile of keys."""
        return self.head_dim // 32 + self.parts * self.tile // 32

    @property
    def smem_bytes(self) -> int:
        queries = self.warpgroups * ROWS * (3 * self.head_dim + 4)  # in 8 and in 16 bits, and slopes
        sums = EXACT_BYTES * 128 * self.warpgroups
        keys = self.shape.slots * self.tile * self.head_dim
        values = self.shape.slots * _up(self.tile * (self.head_dim + ONES), ALIGNMENT)
        sources = self.shape.stages * 2 * self.tile * self.head_dim
        barriers = BARRIER_BYTES * (self.warpgroups + self.shape.stages + 2 * self.shape.slots)
        told = TOLD * TOLD_BYTES + 8 * self.warpgroups  # and where each of these finds its next row tile
        rest = 8 * self.shape.slots + 4 * 16 + told  # descales, maxima, sequences
        return _up(queries + sums + keys + values + sources + barriers + rest, ALIGNMENT)

    @property
    def profile(self) -> str:
        """The smallest that has it."""
        return "ci" if (self.head_dim, self.keys, self.source) in CI else "release"


ALL = tuple(
    Resident(head_dim=d, keys=n, source=s) for d, n in SHAPES for s in (Source.BF16, Source.FP16)
)  # in the order of the registry: of a head_dim and type, the fewest keys first


def residents_of(profile: str, archs: tuple[str, ...]) -> tuple[Resident, ...]:
    """Of a build, in the order of the manifest and the registry."""
    rank = PROFILES.index(profile)
    return tuple(r for r in ALL if TARGET in archs and PROFILES.index(r.profile) <= rank)
