"""The kernels of decode: attention of few queries over long caches, read where they lie. Which there are, and what
follows from their shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from codegen.arch import REGISTERS_PER_SM, SMEM_RESERVED_PER_CTA, TARGETS
from codegen.cover import cover
from codegen.profiles import PROFILES

HEAD_DIMS = (64, 96, 128, 192, 256)
ROWS = (8, 16, 32)  # of a unit
WIDE_ROWS = 64  # of a unit that warpgroups multiply, with K, V, Q and P as f16 operands of wgmma
WIDE_KEYS = 64  # that a warpgroup takes at a time
WIDE_STAGES = 2  # tiles of a warpgroup in f16
WIDE_RING_BYTES = 4 * (8 + 4 * 13) + 2 * 4 * 8  # of shares that are worked on, and the next ones
WARPS = {"sm89": (4, 2), "sm90a": (8, 4)}  # of a CTA: the first with which it has stages enough, else the last
MOST_OUTPUTS = 4096  # rows times head_dim of a unit, whose float32 sums are in the registers of a warp
SLICES = {"sm89": 16, "sm90a": 32}  # keys that a warp takes at a time
MOST_STAGES = 4
WARPS_TRIED = (2, 4, 8)
CUT_BYTES = 48  # of where a share begins or ends
LENGTHS_BYTES = 4 * (32 + 32 + 32)  # of sequences, that a warp holds
# Slices of a warp on their way while one is worked on. What an Ada card's memory delivers in its latency is in one.
FEWEST_STAGES = {"sm89": 2, "sm90a": 3}


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True, kw_only=True, order=True)
class Decode:
    """One kernel. ``rows`` are those of a unit: pairs of a query and a head of the group.

    A candidate states ``keys`` of a slice and ``ctas`` an SM, to be timed against what follows where they are 0.
    """

    target: str
    head_dim: int
    rows: int
    warps: int
    keys: int = 0
    ctas: int = 0

    @property
    def id(self) -> str:
        shape = f"_k{self.keys}c{self.ctas}w{self.warps}" if self.candidate else ""
        return f"decode_{self.target}_d{self.head_dim}_r{self.rows}{shape}"

    @property
    def wide(self) -> bool:
        """Whether warpgroups multiply, from keys that they turned into f16 in shared memory."""
        return self.rows == WIDE_ROWS

    @property
    def candidate(self) -> bool:
        return self.keys > 0

    @property
    def path(self) -> str:
        return f"decode/{self.id}.cu"

    @property
    def threads(self) -> int:
        """Of wide kernels as many warps again: they copy keys and turn them into f16."""
        return 32 * self.warps * (2 if self.wide else 1)

    @property
    def slice(self) -> int:
        """Keys that a warp takes at a time, or a warpgroup of a wide kernel. 16 where scores of 32 rows, or O, leave
        registers for no more, or slots of more keys were too large to have enough of them."""
        if self.candidate:
            return self.keys
        if self.wide:
            return WIDE_KEYS
        large = self.rows == ROWS[-1] or self.outputs > MOST_OUTPUTS // 2 or self.head_dim > 128
        return 16 if large else SLICES[self.target]

    @property
    def outputs(self) -> int:
        return self.rows * self.head_dim

    @property
    def products(self) -> int:
        """Matrix instructions in the loop: of 16 x 8 x 16 for a slice, of K Q^T and of V^T P^T. Or of 64 x 64 x 16 for
        a warpgroup's keys, of Q K^T and of P V."""
        if self.wide:
            return self.head_dim // 16 + WIDE_KEYS // 16 * (self.head_dim // 64)
        return 2 * (self.slice // 16) * (self.head_dim // 16) * (self.rows // 8)

    @property
    def tile(self) -> int:
        """Keys that a CTA takes at a time."""
        return self.slice * self.warps // (4 if self.wide else 1)

    @property
    def slot_bytes(self) -> int:
        """Of a slice of K and V in shared memory: rows with a power of two of 16-byte chunks are swizzled, others
        padded."""
        chunks = self.head_dim // 16
        pitch = 16 * (chunks if chunks & (chunks - 1) == 0 else chunks | 1)
        return _up(2 * _up(self.slice * pitch, 128) + 2 * 4 * self.slice, 128)

    @property
    def places_bytes(self) -> int:
        """Of where the keys of a slice lie."""
        return 8 * self.slice + 16

    @property
    def exchange_bytes(self) -> int:
        """Of Q in f16 for this unit and the next, the result in float32, and what the warps tell one another."""
        pitch = 2 * self.head_dim if self.wide else _up(2 * self.head_dim, 128) + 32
        queries = _up(self.rows * (pitch + 4) + 8 * self.warps, self.alignment)
        result = 4 * self.rows * (self.head_dim + 4)
        return _up(2 * queries + result + 4 * self.rows * (2 + 2 * self.warps) + 4 * self.warps, self.alignment)

    @property
    def alignment(self) -> int:
        """Of what warps exchange: panels of wgmma are swizzled by eight rows of 128 bytes."""
        return 1024 if self.wide else 16

    @property
    def key_tile_bytes(self) -> int:
        """Of a warpgroup's keys in f16, with their descales."""
        return _up(2 * 2 * WIDE_KEYS * self.head_dim + 2 * 4 * WIDE_KEYS, 1024)

    def smem_with(self, stages: int) -> int:
        """Of wide kernels ``stages`` counts tiles in f16: keys wait in registers until one is free."""
        if self.wide:
            groups, handoff = self.warps // 4, 4 * 8 + 4 * 4
            tiles = groups * stages * self.key_tile_bytes
            shares = _up(tiles + self.exchange_bytes + WIDE_RING_BYTES, 16) + 2 * CUT_BYTES
            return _up(shares + groups * handoff + 8, 1024)
        slots = self.warps * stages * (self.slot_bytes + self.places_bytes)
        lengths = LENGTHS_BYTES * self.warps
        return _up(_up(slots + lengths, 16) + self.exchange_bytes + 2 * CUT_BYTES, 128)

    def room_with(self, ctas: int) -> int:
        """Shared memory that each of so many CTAs has in an SM."""
        target = TARGETS[self.target]
        return min(target.smem_per_sm // ctas - SMEM_RESERVED_PER_CTA, target.smem_per_block)

    def _stages_with(self, ctas: int) -> int:
        room = self.room_with(ctas)
        return max(s for s in range(MOST_STAGES + 1) if s == 0 or self.smem_with(s) <= room)

    @property
    def ctas_per_sm(self) -> int:
        """One of eight warps. Two of four, where both have stages enough: one loads while the other ends a unit."""
        if self.candidate:
            return self.ctas
        return 2 if self.warps == 4 and self._stages_with(2) >= FEWEST_STAGES[self.target] else 1

    @property
    def stages(self) -> int:
        return WIDE_STAGES if self.wide else self._stages_with(self.ctas_per_sm)

    @property
    def registers(self) -> int:
        """Of a thread, a guess that errs low: O, S and P, and what any kernel takes."""
        if self.wide:  # by the launch bounds, before warps give some to others
            return REGISTERS_PER_SM // self.threads
        return 80 + self.outputs // 32 + 3 * self.slice * self.rows // 64

    @property
    def smem_bytes(self) -> int:
        return self.smem_with(self.stages)

    @property
    def part_floats(self) -> int:
        """Of what a CTA leaves of a unit that it shares."""
        return self.rows * (self.head_dim + 2)

    @property
    def summary(self) -> str:
        return f"head_dim {self.head_dim}, {self.rows} rows a unit, {self.tile} keys a tile"


def kernel(target: str, head_dim: int, rows: int) -> Decode:
    """The one of this shape."""
    if rows == WIDE_ROWS:
        return Decode(target=target, head_dim=head_dim, rows=rows, warps=WARPS_TRIED[-1])
    made = [Decode(target=target, head_dim=head_dim, rows=rows, warps=w) for w in WARPS[target]]
    return next((d for d in made if d.stages >= FEWEST_STAGES[target]), made[-1])


WIDE = tuple(("sm90a", d) for d in (64, 128))  # the target has wgmma; head_dim is a number of whole panels


def has_rows(target: str, head_dim: int, rows: int) -> bool:
    """Whether a target has units of so many rows. Those of 64 take the place of those of 32, and are faster there."""
    if (target, head_dim) in WIDE:
        return rows != ROWS[-1]
    return rows != WIDE_ROWS and rows * head_dim <= MOST_OUTPUTS


ALL = tuple(
    kernel(a, d, r) for a in TARGETS for d in HEAD_DIMS for r in (*ROWS, WIDE_ROWS) if has_rows(a, d, r)
)  # in the order of the registry


@dataclass(frozen=True)
class Rule:
    """Why a declared shape is no kernel. ``broken`` gives the numbers that decided, "" where it holds."""

    name: str
    why: str
    broken: Callable[[Decode], str]


def _rows(d: Decode) -> str:
    wide = (d.target, d.head_dim) in WIDE
    if not d.wide:
        return f"{d.target} multiplies {WIDE_ROWS} rows by warpgroups" if wide and d.rows == ROWS[-1] else ""
    return "" if wide else f"warpgroups multiply at {', '.join(f'head_dim {h} on {t}' for t, h in WIDE)}"


def _outputs(d: Decode) -> str:
    if d.wide or d.outputs <= MOST_OUTPUTS:
        return ""
    return f"{d.rows} x {d.head_dim} = {d.outputs:,} outputs a unit, at most {MOST_OUTPUTS:,}"


def _stages(d: Decode) -> str:
    if d.stages >= 2:
        return ""
    return f"{d.smem_with(2):,} bytes for 2 stages in each of {d.ctas} CTAs, an SM has {d.room_with(d.ctas):,} for each"


def _registers(d: Decode) -> str:
    needed = d.registers * d.threads * d.ctas
    if needed <= REGISTERS_PER_SM:
        return ""
    return f"{d.registers} registers x {d.threads} threads x {d.ctas} CTAs = {needed:,}, an SM has {REGISTERS_PER_SM:,}"


RULES = (
    Rule("DECODE-ROWS", "more than 16 rows a unit are for warpgroups, where a target has them", _rows),
    Rule("DECODE-OUTPUTS", "the float32 sums of O of a unit are in the registers of each warp", _outputs),
    Rule("DECODE-STAGES", "a slice of keys is on its way while one is worked on", _stages),
    Rule("DECODE-REGISTERS", "CTAs of an SM share its registers; the guess errs low", _registers),
)
KEYS, CTAS = (16, 32), (1, 2, 3, 4)  # of a slice, of an SM
DECLARED = tuple(
    Decode(target=a, head_dim=d, rows=r, keys=k, ctas=c, warps=w)
    for a in TARGETS for d in HEAD_DIMS for r in ROWS for w in WARPS_TRIED if w in (*WARPS[a], 4, 8)
    for k in KEYS for c in CTAS
) + tuple(
    Decode(target=a, head_dim=d, rows=WIDE_ROWS, keys=WIDE_KEYS, ctas=1, warps=WARPS_TRIED[-1])
    for a in TARGETS for d in HEAD_DIMS
)  # fmt: skip


def refusal(d: Decode) -> tuple[Rule, str] | None:
    """The first rule that a shape breaks, and the numbers; None where it is legal."""
    return next(((rule, text) for rule in RULES if (text := rule.broken(d))), None)


def emitted_as(d: Decode) -> Decode | None:
    """The kernel whose shape a declared one states; None where its shape is another."""
    plain = replace(d, keys=0, ctas=0)
    same = plain in ALL and (d.keys, d.ctas) == (plain.slice, plain.ctas_per_sm)
    return plain if same else None


def candidates(head_dims: tuple[int, ...], archs: tuple[str, ...]) -> tuple[Decode, ...]:
    """What is worth timing: shapes with two stages or more that an SM has shared memory and registers for."""
    return tuple(d for d in DECLARED if d.target in archs and d.head_dim in head_dims and refusal(d) is None)


@cache
def profile_of(d: Decode) -> str:
    """The smallest profile that has the kernel: `ci` has each head_dim and each number of rows, `dev` one of each
    template."""
    if d.candidate:
        return PROFILES[-1]
    of_target = [x for x in ALL if x.target == d.target]
    dev = [x.id for x in of_target if x.head_dim == HEAD_DIMS[0] and x.rows in (ROWS[0], WIDE_ROWS)]
    if d.id in dev:
        return "dev"
    parts = {x.id: frozenset({x.head_dim, -x.rows}) for x in of_target}
    return "ci" if d.id in cover(parts, given=tuple(dev)) else "release"


def decodes_of(profile: str, archs: tuple[str, ...]) -> tuple[Decode, ...]:
    """Of a build, in the order of the manifest and the registry."""
    rank = PROFILES.index(profile)
    return tuple(d for d in ALL if d.target in archs and PROFILES.index(profile_of(d)) <= rank)
