"""What the sm90a template may ask about a variant beyond its axes."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.derived import Unrolled
from codegen.families.view import View, common
from codegen.families.warpgroup.derive import ITEM_SLOTS, derive
from codegen.variant import Variant

# The tensor core cuts every product toward zero at 13 bits below the sum so far. One of P and 1 has four bits, one of P
# and a value of V up to eight: with many keys a tile, P V loses more than the row sums that divide it, by nothing (V a
# power of two) to 0.2% (V of one sign). Of that, 0.06% is given back (docs/lab/sm90a.md, the bias): less than bf16 and
# e4m3 can show of a constant V. fp16 shows it, and would overflow with V near its end, so that it gets nothing back.
MANY_KEYS = 128
TRUNCATION = 1.0006


@dataclass(frozen=True, kw_only=True)
class KernelView(View):
    schedule_text: str
    warpgroups: int
    q_buffers: int
    item_slots: int
    split: int
    halves: int
    key_slots: int
    value_slots: int
    parts: int
    part_columns: int
    part_buffers: int
    tight: bool
    quantises_q: bool
    seen_type: str  # what a lane's rows see of a tile of a list
    one_end: bool  # slopes of an item, and the last key that all of its rows see, are kept in registers
    handed: bool  # K and V may be packed while the kernel runs
    prepares: bool
    early: bool
    middle: bool
    narrows: bool
    unrolled: tuple[Unrolled, ...]
    plain: bool
    loader_registers: int
    compute_registers: int
    mma_scores: str
    mma_widths: tuple[tuple[int, str], ...]
    mma_rest: str
    mma_comment: str
    ones: str
    truncation: str


def kernel_view(v: Variant) -> KernelView:
    d = derive(v)
    qk, score = v.dtype.qk.mma, v.score.upper()

    def mma_scores(keys: int) -> str:
        form = "" if v.dtype.qk.integer else "<>"  # of floating point: signs that an operand may have
        return f"MMA_64x{keys}x32_{score}{qk}{qk}_SS_TN{form}"

    return KernelView(
        **common(v, d),
        schedule_text=v.schedule.text,
        warpgroups=d.warpgroups,
        q_buffers=d.query_buffers,
        item_slots=ITEM_SLOTS,
        split=v.cluster.ctas,
        halves=d.halves,
        key_slots=d.key_slots,
        value_slots=d.value_slots,
        parts=d.parts,
        part_columns=d.part_columns,
        part_buffers=d.part_buffers,
        tight=d.tight,
        quantises_q=d.quantises_q,
        seen_type="SeenPair" if v.paired else "uint2",
        one_end=v.softmax.exact and not (v.windowed or v.listed),
        handed=d.quantises_q and not v.walk.tables,
        prepares=d.prepares,
        early=d.early,
        middle=d.middle,
        narrows=d.narrows,
        unrolled=d.unrolled,
        plain=d.plain,
        loader_registers=d.producer_registers,
        compute_registers=d.consumer_registers,
        mma_scores=mma_scores(v.tile_n // d.halves),
        mma_widths=tuple((n, mma_scores(n)) for n in sorted({v.tile_n, *(u.last_keys for u in d.unrolled)})),
        mma_rest=f"MMA_64x{d.part_columns}x32_{v.dtype.v.sums.upper()}{v.dtype.p.mma}{v.dtype.v.mma}_RS_TN",
        mma_comment=f"{d.mma_per_tile} of these a warpgroup and KV tile",
        ones=f"0x{v.dtype.v.ones:08X}",
        truncation=f"{TRUNCATION}f" if v.tile_n > MANY_KEYS and v.out.corrected else "1.f",
    )
