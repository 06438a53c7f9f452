"""The variant: one point of the declared matrix. Its id, and the parser of ids, follow from its fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from codegen.axes import Change, Cluster, Granularity, Kind, Mask, Operand, Out, Scaling, Schedule, Softmax, Tile, Walk
from codegen.axes.axis import Axis

LISTED_KEYS = 128  # of a tile of a mask's lists: kMaskTile of include/fp8cutlass/walk/tile_mask.h


@dataclass(frozen=True, kw_only=True)
class _Part:
    """How an id spells a field: `prefix`, then text that `pattern` matches and `parse` reads.

    plain: the value that is not written. Fields of a `group` are written unless all of them are plain.
    """

    pattern: str
    parse: Callable[[str], object]
    prefix: str = ""
    plain: Axis | None = None
    group: str = ""


def _part(**how: Any) -> Any:
    return field(metadata={"part": _Part(**how)})


def _axis(of: type[Axis], plain: Axis | None = None, group: str = "") -> Any:
    return _part(pattern="|".join(map(str, of)), parse=of, plain=plain, group=group)


def _number(prefix: str) -> Any:
    return _part(pattern=r"\d+", parse=int, prefix=prefix)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Fields in the order of the id."""

    family: str = _part(pattern="[a-z0-9]+", parse=str)
    kind: Kind = _axis(Kind)
    head_dim: int = _number("d")
    tile: Tile = _part(pattern=Tile.PATTERN, parse=Tile.parse)
    stages: int = _number("s")
    scaling: Scaling = _axis(Scaling)
    mask: Mask = _axis(Mask)
    dtype: Operand = _axis(Operand)
    out: Out = _axis(Out)
    softmax: Softmax = _axis(Softmax)
    schedule: Schedule = _axis(Schedule, plain=Schedule.MULTISTAGE, group="execution")
    cluster: Cluster = _axis(Cluster, plain=Cluster.SOLO, group="execution")
    walk: Walk = _axis(Walk, plain=Walk.DENSE, group="walk")
    change: Change = _axis(Change, plain=Change.NONE, group="change")

    def __hash__(self) -> int:
        return hash(self.id)  # a string keeps its hash

    @cached_property
    def id(self) -> str:
        return self._text(AXES)

    @cached_property
    def shape(self) -> str:
        """What tells the rivals of a problem apart: tile, stages, schedule, cluster."""
        return self._text(SHAPE)

    @property
    def problem(self) -> tuple[object, ...]:
        """What rivals have in common: everything but tile, stages, schedule and cluster. One tile of a list and two are
        no rivals, as it is the mask that decides between them."""
        same = (self.family, self.kind, self.head_dim, self.scaling, self.mask, self.dtype, self.out, self.softmax)
        return (*same, self.walk, self.change, self.paired)

    def _text(self, axes: tuple[str, ...]) -> str:
        values = self.__dict__
        return _form(axes, tuple([values[axis] is plain for axis, plain in _PLAIN])).format_map(values)

    @property
    def causal(self) -> bool:
        """Whether the last key of a row depends on its number."""
        return self.mask.diagonal

    @property
    def windowed(self) -> bool:
        """Whether the first key of a row does, too."""
        return self.mask.windowed

    @property
    def listed(self) -> bool:
        """Whether lists in memory say which tiles rows visit."""
        return self.mask.listed

    @property
    def paired(self) -> bool:
        """Whether a tile of keys is two neighbours of a list's tiles, one of which may not be in the list."""
        return self.listed and self.tile.n > LISTED_KEYS

    @property
    def serves(self) -> str:
        """What calls it is for, as the manifest says it: fwd, window, ragged, capped, biased, blocks; or diag."""
        if self.change is not Change.NONE:
            return str(self.change)
        if self.listed:
            return "blocks"
        return "ragged" if self.walk.tables else "window" if self.windowed else str(self.kind)

    @property
    def special(self) -> bool:
        """Whether it serves a window, lists of tiles, a ragged batch, a cap or a bias: a class has one kernel, and the
        table no cell."""
        return self.windowed or self.listed or self.walk.tables or self.change is not Change.NONE

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
        """Accumulator of Q K^T."""
        return self.softmax.score

    @property
    def grain(self) -> Granularity:
        """What shares a descale: as the scaling mode says, but K may have several for a block, and V one a token."""
        grain = self.scaling.grain
        if self.dtype.groups == 1 or grain.k != "block":
            return grain
        return replace(grain, k="group", v="token" if self.dtype.v.integer else grain.v)

    @property
    def terms(self) -> int:
        """e4m3 numbers whose sum is a P."""
        return self.softmax.terms


_PARTS: dict[str, _Part] = {f.name: f.metadata["part"] for f in fields(Variant)}
AXES = tuple(_PARTS)
SHAPE = ("tile", "stages", "schedule", "cluster")  # the axes in which rivals of a problem differ


_PLAIN = tuple((axis, part.plain) for axis, part in _PARTS.items() if part.plain is not None)


@cache
def _form(axes: tuple[str, ...], plain: tuple[bool, ...]) -> str:
    """How such axes of a variant are written. plain: which values of _PLAIN it has."""
    has = {axis for (axis, _), is_plain in zip(_PLAIN, plain, strict=True) if is_plain}
    written = {_PARTS[axis].group for axis in axes if axis not in has}
    return "_".join(f"{_PARTS[axis].prefix}{{{axis}}}" for axis in axes if _PARTS[axis].group in written)


def _pattern() -> re.Pattern[str]:
    """What ids look like: parts joined by underscores, a group with a plain form as a whole or not at all."""
    groups: dict[str, str] = {}
    for axis, part in _PARTS.items():
        mark = "_" if groups else ""
        groups[part.group] = groups.get(part.group, "") + f"{mark}{part.prefix}(?P<{axis}>{part.pattern})"
    return re.compile("".join(f"(?:{text})?" if group else text for group, text in groups.items()), re.ASCII)


_ID = _pattern()


def parse_id(text: str) -> Variant:
    """The variant with this id. Raises ValueError for any other text, also for another spelling of an id (d064)."""
    if (match := _ID.fullmatch(text)) is not None:
        found = match.groupdict()
        values: dict[str, Any] = {
            axis: part.plain if found[axis] is None else part.parse(found[axis]) for axis, part in _PARTS.items()
        }
        v = Variant(**values)
        if v.id == text:
            return v
    raise ValueError(
        f"{text!r} is not a variant id; they look like sm89_fwd_d64_m128n64w4_s2_block_causal_e4m3_bf16_linear "
        "or sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"
    )


def axis_text(value: object) -> str:
    """How an axis value is written on the command line, in the ledger and in the table."""
    return str(value).lower() if isinstance(value, bool) else str(value)
