"""The declared matrix. Change a number here and everything follows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from codegen.axes import Change, Cluster, Kind, Mask, Operand, Out, Scaling, Schedule, Softmax, Tile, Walk
from codegen.families import family_of
from codegen.variant import AXES, Variant, axis_text

SM89_HEAD_DIMS = (32, 64, 96, 128, 256)
SM90A_HEAD_DIMS = (64, 96, 128, 192, 256)
HEAD_DIMS = tuple(sorted({*SM89_HEAD_DIMS, *SM90A_HEAD_DIMS}))  # the axis of the dispatch table

SM89_TILES = (
    Tile(m=64, n=32, warps=4),
    Tile(m=64, n=64, warps=4),
    Tile(m=64, n=128, warps=4),
    Tile(m=128, n=32, warps=4),
    Tile(m=128, n=64, warps=4),
    Tile(m=128, n=128, warps=4),
    Tile(m=128, n=64, warps=8),
    Tile(m=128, n=128, warps=8),
)

SM90A_TILES = (
    Tile(m=64, n=64, warps=4),
    Tile(m=64, n=128, warps=4),
    Tile(m=64, n=192, warps=4),
    Tile(m=64, n=256, warps=4),
    Tile(m=128, n=64, warps=8),
    Tile(m=128, n=128, warps=8),
    Tile(m=128, n=192, warps=8),
    Tile(m=128, n=256, warps=8),
    Tile(m=192, n=64, warps=12),
    Tile(m=192, n=128, warps=12),
    Tile(m=192, n=192, warps=12),
    Tile(m=192, n=256, warps=12),
)

# Those of the lists of a mask: one of their tiles, or two neighbours.
SM90A_LISTED_TILES = (Tile(m=128, n=128, warps=8), Tile(m=128, n=256, warps=8))

# Of classes that get one kernel: 192 rows leave the loader too few registers for an item of a ragged batch.
SM90A_FEW_TILES = (
    Tile(m=128, n=64, warps=8),
    Tile(m=128, n=128, warps=8),
    Tile(m=128, n=192, warps=8),
    Tile(m=128, n=256, warps=8),
)


BANDS = tuple(mask for mask in Mask if not mask.listed)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A product of axes of one family."""

    name: str
    family: str
    kind: Kind
    head_dim: tuple[int, ...]
    tile: tuple[Tile, ...]
    stages: tuple[int, ...]
    scaling: tuple[Scaling, ...]
    mask: tuple[Mask, ...]
    dtype: tuple[Operand, ...]
    out: tuple[Out, ...]
    softmax: tuple[Softmax, ...]
    schedule: tuple[Schedule, ...]
    cluster: tuple[Cluster, ...]
    walk: tuple[Walk, ...]
    change: tuple[Change, ...] = (Change.NONE,)

    AXES = tuple(axis for axis in AXES if axis not in ("family", "kind"))

    @cached_property
    def points(self) -> tuple[Variant, ...]:
        """The variants of the product, made once: with them their ids are kept."""
        products = itertools.product(*(getattr(self, axis) for axis in self.AXES))
        return tuple(
            Variant(family=self.family, kind=self.kind, **dict(zip(self.AXES, values, strict=True)))
            for values in products
        )

    def is_of(self, v: Variant) -> bool:
        """Whether this is the matrix for a variant of that family, kind, mask, walk, change and kind of numbers."""
        same = (v.family, v.kind) == (self.family, self.kind) and v.dtype.qk.integer == self.dtype[0].qk.integer
        return same and v.mask in self.mask and v.walk in self.walk and v.change in self.change

    @property
    def size(self) -> int:
        size = 1
        for axis in self.AXES:
            size *= len(getattr(self, axis))
        return size


MATRICES = (
    Matrix(
        name="sm89 forward",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK, Scaling.TOKEN),
        mask=(Mask.FULL, Mask.CAUSAL),
        dtype=(Operand.E4M3, Operand.E5M2),
        out=(Out.BF16, Out.FP16, Out.E4M3),
        softmax=(Softmax.EXP2, Softmax.LINEAR, Softmax.EXP2X2),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    # 8-bit integers in Q K^T, and in P V.
    Matrix(
        name="sm89 integers",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.FULL, Mask.CAUSAL),
        dtype=(Operand.S8, Operand.S8U8),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.CODES, Softmax.BYTES),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    # What few kernels serve: those of 16-bit output, as results of windows and ragged batches are.
    Matrix(
        name="sm89 windows",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm89 blocks",
        family="sm89",
        kind=Kind.FWD,
        head_dim=(64, 128),  # others are padded
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.BLOCKS,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm89 ragged",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=BANDS,
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.RAGGED,),
    ),
    # Capped scores: of few models, so that what few kernels serve is enough.
    Matrix(
        name="sm89 capped",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=BANDS,
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2,),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
        change=(Change.TANH,),
    ),
    Matrix(
        name="sm89 capped ragged",
        family="sm89",
        kind=Kind.FWD,
        head_dim=SM89_HEAD_DIMS,
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),  # whose ends may be as far as they like
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2,),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.RAGGED,),
        change=(Change.TANH,),
    ),
    # Biases: of few models, too. Wider heads spill.
    Matrix(
        name="sm89 biased",
        family="sm89",
        kind=Kind.FWD,
        head_dim=(64, 96, 128),
        tile=SM89_TILES,
        stages=(1, 2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),  # whose ends may be as far as they like
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.EXP2X2),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
        change=(Change.BIAS,),
    ),
    # One kernel for each head_dim, softmax and the two ways of scaling K: enough to test every stage of every code path
    # alone.
    Matrix(
        name="sm89 diagnostic",
        family="sm89",
        kind=Kind.DIAG,
        head_dim=SM89_HEAD_DIMS,
        tile=(Tile(m=64, n=32, warps=4), Tile(m=64, n=64, warps=4)),
        stages=(2,),
        scaling=(Scaling.BLOCK, Scaling.TOKEN),
        mask=(Mask.CAUSAL,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16,),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.MULTISTAGE,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm90a forward",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=SM90A_HEAD_DIMS,
        tile=SM90A_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK, Scaling.TOKEN),
        mask=(Mask.FULL, Mask.CAUSAL),
        dtype=(Operand.E4M3, Operand.E5M2),
        out=(Out.BF16, Out.FP16, Out.E4M3),
        softmax=(Softmax.EXP2, Softmax.LINEAR, Softmax.QUADRATIC, Softmax.EXP2X2),
        schedule=tuple(s for s in Schedule if s is not Schedule.MULTISTAGE),
        cluster=tuple(Cluster),
        walk=(Walk.DENSE,),
    ),
    # 8-bit integers in Q K^T.
    Matrix(
        name="sm90a integers",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=(64, 128),
        tile=SM90A_FEW_TILES,
        stages=(3, 4),  # two are up to 3% slower (docs/lab/house.md)
        scaling=(Scaling.BLOCK,),
        mask=BANDS,
        dtype=(Operand.S8,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.CODES,),
        schedule=(Schedule.PINGPONG, Schedule.OVERLAP),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm90a integer blocks",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=(64, 128),
        tile=SM90A_LISTED_TILES[:1],
        stages=(3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.BLOCKS,),
        dtype=(Operand.S8,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.CODES,),
        schedule=(Schedule.PINGPONG, Schedule.OVERLAP),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    # What few kernels serve: those of 16-bit output, as results of windows and ragged batches are.
    Matrix(
        name="sm90a windows",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=SM90A_HEAD_DIMS,
        tile=SM90A_FEW_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.PINGPONG, Schedule.COLUMNS, Schedule.SERIAL),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm90a blocks",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=(64, 128),
        tile=SM90A_LISTED_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.BLOCKS,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.PINGPONG, Schedule.SERIAL),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
    Matrix(
        name="sm90a ragged",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=SM90A_HEAD_DIMS,
        tile=SM90A_FEW_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=BANDS,
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.LINEAR),
        schedule=(Schedule.PINGPONG, Schedule.COLUMNS, Schedule.SERIAL),
        cluster=(Cluster.SOLO,),
        walk=(Walk.RAGGED,),
    ),
    Matrix(
        name="sm90a capped",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=SM90A_HEAD_DIMS,
        tile=SM90A_FEW_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=BANDS,
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2,),
        schedule=(Schedule.PINGPONG, Schedule.SERIAL),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
        change=(Change.TANH,),
    ),
    Matrix(
        name="sm90a capped ragged",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=SM90A_HEAD_DIMS,
        tile=SM90A_FEW_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2,),
        schedule=(Schedule.PINGPONG, Schedule.SERIAL),
        cluster=(Cluster.SOLO,),
        walk=(Walk.RAGGED,),
        change=(Change.TANH,),
    ),
    # Biases: a warpgroup has registers for a tile of them where its products do not overlap. Wider heads spill.
    Matrix(
        name="sm90a biased",
        family="sm90a",
        kind=Kind.FWD,
        head_dim=(64, 96, 128),
        tile=SM90A_FEW_TILES,
        stages=(2, 3, 4),
        scaling=(Scaling.BLOCK,),
        mask=(Mask.WINDOW,),  # whose ends may be as far as they like
        dtype=(Operand.E4M3,),
        out=(Out.BF16, Out.FP16),
        softmax=(Softmax.EXP2, Softmax.EXP2X2),
        schedule=(Schedule.SERIAL,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
        change=(Change.BIAS,),
    ),
    Matrix(
        name="sm90a diagnostic",
        family="sm90a",
        kind=Kind.DIAG,
        head_dim=SM90A_HEAD_DIMS,
        tile=(Tile(m=128, n=64, warps=8),),
        stages=(2,),
        scaling=(Scaling.BLOCK, Scaling.TOKEN),
        mask=(Mask.CAUSAL,),
        dtype=(Operand.E4M3,),
        out=(Out.BF16,),
        softmax=(Softmax.EXP2, Softmax.LINEAR, Softmax.QUADRATIC),
        schedule=(Schedule.SERIAL,),
        cluster=(Cluster.SOLO,),
        walk=(Walk.DENSE,),
    ),
)


def matrix_of(family: str, kind: Kind) -> Matrix | None:
    """The first matrix of a family and kind, which declares the head_dims, tiles and modes of all others."""
    return next((m for m in MATRICES if (m.family, m.kind) == (family, kind)), None)


def head_dims(target: str) -> tuple[int, ...]:
    """What a caller's head_dim is padded up to on a target: those of the family that serves it first."""
    matrix = matrix_of(family_of(target).name, Kind.FWD)
    return matrix.head_dim if matrix else ()


def undeclared(v: Variant) -> str | None:
    """Which part of a variant no matrix declares, and what is declared; None for a declared point."""
    matrix = next((m for m in MATRICES if m.is_of(v)), None)
    if matrix is None:
        declared = dict.fromkeys(f"{m.family}_{m.kind}" for m in MATRICES)
        what = f"{v.family}_{v.kind}, mask {v.mask}, walk {v.walk}, {v.change}"
        return f"{what} is not declared ({', '.join(declared)} are)"
    for axis in Matrix.AXES:
        value, values = getattr(v, axis), getattr(matrix, axis)
        if value not in values:
            return f"{axis} {axis_text(value)} is not declared ({', '.join(map(axis_text, values))} are)"
    return None
