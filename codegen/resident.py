"""The kernels that keep a head's K and V in shared memory: short sequences from bf16 or fp16 in one launch. Which there
are, and what follows from their shape."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.axes import Mask
from codegen.pack import Source
from codegen.profiles import PROFILES
from codegen.scaling import KEY_BLOCK

TARGET = "sm90a"
ROWS = 64  # of a row tile, a warpgroup's
ONES = 8  # rows of ones in V^T
ALIGNMENT = 1_024  # bytes: where a swizzled tile may begin, and the size that a block of memory is rounded up to
EXACT_BYTES = 16  # a thread: two rows' sums of unquantised exponentials, of the row tile and of the tile of keys
MASKS = (Mask.FULL, Mask.CAUSAL)  # the kernels of a source; the host asks for one by its position

# By head_dim and the most keys: warpgroups of a CTA, CTAs an SM, as measured (docs/lab/short.md).
SHAPES = {
    (64, 64): (1, 5),
    (64, 128): (1, 4),
    (64, 256): (1, 4),
    (64, 512): (2, 2),
    (128, 64): (1, 4),
    (128, 128): (1, 3),
    (128, 256): (1, 2),
    (128, 512): (3, 1),
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
    def warpgroups(self) -> int:
        return SHAPES[self.head_dim, self.keys][0]

    @property
    def ctas_per_sm(self) -> int:
        return SHAPES[self.head_dim, self.keys][1]

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

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
        sums = EXACT_BYTES * self.threads
        keys = self.tiles * self.tile * self.head_dim
        values = self.tiles * _up(self.tile * (self.head_dim + ONES), ALIGNMENT)
        return _up(queries + sums + keys + values + self.tiles * (8 + 2 * 16), ALIGNMENT)

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
