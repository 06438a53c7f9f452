"""The variant: one point of the declared matrix, with an id that parses back to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property


class Name(str, Enum):
    """An enum whose members print as their value."""

    def __str__(self) -> str:
        return str(self.value)


class Kind(Name):
    FWD = "fwd"
    DIAG = "diag"  # the same kernel, writing scores, P and tile products for the tests of each stage


class Scaling(Name):
    TENSOR = "tensor"
    HEAD = "head"
    BLOCK = "block"
    TOKEN = "token"


class Dtype(Name):
    E4M3 = "e4m3"
    E5M2 = "e5m2"


class Out(Name):
    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"


class Softmax(Name):
    EXP2 = "exp2"  # f32 scores, P = e4m3(2^x)
    EXP2X2 = "exp2x2"  # the same with P as the sum of two e4m3 numbers, each multiplied by V
    LINEAR = "linear"  # f16 scores, P by its e4m3 code
    QUADRATIC = "quadratic"  # the same, with the code bent inside an octave as 2^x is

    @property
    def by_code(self) -> bool:
        """Whether P comes from f16 scores by its e4m3 code."""
        return self in (Softmax.LINEAR, Softmax.QUADRATIC)


class Schedule(Name):
    """How the warps of a CTA overlap matrix products with softmax."""

    MULTISTAGE = "multistage"  # sm89: loads run ahead of the warps, CTAs that share an SM overlap each other
    PINGPONG = "pingpong"  # warpgroups take turns on the tensor cores: P V of a tile and Q K^T of the next in one turn
    OVERLAP = "overlap"  # Q K^T of the next tile is issued before P V of this one; no turns
    COLUMNS = "columns"  # P V in column parts: one is multiplied while the one before is added to O; for wide heads
    SERIAL = "serial"  # no overlap inside a warpgroup: the others fill the tensor cores


class Cluster(Name):
    """How many CTAs share a query tile: each takes a part of its keys, then they merge through shared memory."""

    SOLO = "solo"
    SPLIT2 = "split2"
    SPLIT4 = "split4"

    @property
    def ctas(self) -> int:
        return {Cluster.SOLO: 1, Cluster.SPLIT2: 2, Cluster.SPLIT4: 4}[self]


@dataclass(frozen=True, kw_only=True, order=True)
class Tile:
    """Query rows and keys of a CTA's tile, and the warps that share its rows (without those that only load)."""

    m: int
    n: int
    warps: int

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}w{self.warps}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    family: str
    kind: Kind
    head_dim: int
    tile: Tile
    stages: int
    scaling: Scaling
    causal: bool
    dtype: Dtype
    out: Out
    softmax: Softmax
    schedule: Schedule
    cluster: Cluster

    @cached_property
    def id(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.family}_{self.kind}_d{self.head_dim}_{self.tile}_s{self.stages}_"
            f"{self.scaling}_{mask}_{self.dtype}_{self.out}_{self.softmax}{self._execution}"
        )

    @property
    def _execution(self) -> str:
        """Schedule and cluster; not written where they are what a family without a choice has."""
        plain = self.schedule is Schedule.MULTISTAGE and self.cluster is Cluster.SOLO
        return "" if plain else f"_{self.schedule}_{self.cluster}"

    @property
    def shape(self) -> str:
        """What tells the rivals of a problem apart: tile, stages, schedule, cluster."""
        return f"{self.tile}_s{self.stages}{self._execution}"

    # What the template calls the tile's parts.
    @property
    def tile_m(self) -> int:
        return self.tile.m

    @property
    def tile_n(self) -> int:
        return self.tile.n

    @property
    def warps(self) -> int:
        return self.tile.warps

    @property
    def warpgroups(self) -> int:
        """Those that compute; 0 for fewer than 4 warps."""
        return self.tile.warps // 4

    @property
    def score(self) -> str:
        """Accumulator of Q K^T: the code-domain softmax works on f16 pairs, the exact ones on f32."""
        return "f16" if self.softmax.by_code else "f32"

    @property
    def terms(self) -> int:
        """e4m3 numbers whose sum is a P: each takes a product with V and one with ones."""
        return 2 if self.softmax is Softmax.EXP2X2 else 1


def _one_of(names: type[Name]) -> str:
    return "|".join(str(x) for x in names)


_ID = re.compile(
    rf"(?P<family>[a-z0-9]+)_(?P<kind>{_one_of(Kind)})_d(?P<head_dim>\d+)_m(?P<m>\d+)n(?P<n>\d+)w(?P<warps>\d+)_s(?P<stages>\d+)_"
    rf"(?P<scaling>{_one_of(Scaling)})_(?P<mask>causal|full)_(?P<dtype>{_one_of(Dtype)})_(?P<out>{_one_of(Out)})_"
    rf"(?P<softmax>{_one_of(Softmax)})(?:_(?P<schedule>{_one_of(Schedule)})_(?P<cluster>{_one_of(Cluster)}))?",
    re.ASCII,
)


def parse_id(text: str) -> Variant:
    """The variant with this id. Raises ValueError for any other text, also for another spelling of an id (d064)."""
    match = _ID.fullmatch(text)
    if match is not None:
        g = match.groupdict()
        v = Variant(
            family=g["family"],
            kind=Kind(g["kind"]),
            head_dim=int(g["head_dim"]),
            tile=Tile(m=int(g["m"]), n=int(g["n"]), warps=int(g["warps"])),
            stages=int(g["stages"]),
            scaling=Scaling(g["scaling"]),
            causal=g["mask"] == "causal",
            dtype=Dtype(g["dtype"]),
            out=Out(g["out"]),
            softmax=Softmax(g["softmax"]),
            schedule=Schedule(g["schedule"] or Schedule.MULTISTAGE),
            cluster=Cluster(g["cluster"] or Cluster.SOLO),
        )
        if v.id == text:
            return v
    raise ValueError(
        f"{text!r} is not a variant id; they look like sm89_fwd_d64_m128n64w4_s2_block_causal_e4m3_bf16_linear "
        "or sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"
    )


AXES = tuple(f.name for f in fields(Variant))


def axis_text(value: object) -> str:
    """How an axis value is written on the command line, in the ledger and in the table."""
    return str(value).lower() if isinstance(value, bool) else str(value)
