"""What follows from the axes of an sm90a variant: shared memory, registers of each role, warpgroup instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from codegen import tuned
from codegen.axes import Mask
from codegen.derived import Derived, Unrolled
from codegen.variant import Variant

SMEM_PER_BLOCK, SMEM_PER_SM = 232_448, 233_472
PRODUCER_THREADS = 128  # one more warpgroup, which only loads
ROWS_PER_WARPGROUP = 64
ONES = 8  # columns of the product with ones that gives the row sums; the width of the narrowest product
SWIZZLE_ALIGNMENT = 1_024  # bytes: where a tile that TMA writes with a swizzle may begin
CONTROL_BYTES = 1_024  # work items and barriers
EXACT_BYTES = 16  # a thread: two rows' sums of unquantised exponentials, of the item and of the tile
ITEM_SLOTS = 4  # work items and their rows' slopes that are known at a time
MERGE_STATE = 16  # floats a row that the CTAs of a cluster exchange beside its O: Part in merge.cuh
MOST_ACCUMULATORS = 200  # registers of O and of all column parts, above which parts share
HALVED_KEYS = 256  # of a tile in schedule `columns` for which K and V lie in halves: two whole ones would not fit
COLUMNS_PART = 64  # columns of a part in schedule `columns`: the narrowest product that runs at the full rate
WIDE_HEAD_DIM = 128  # beyond it a product of P V with all columns does not fit the registers beside O

# Registers a thread after setmaxnreg, by the number of warpgroups that compute: together no more than the launch has.
# One alone needs no setmaxnreg, and what it is held to is below the 255 that a thread can have.
CONSUMER_REGISTERS = {1: 240, 2: 232, 3: 160}
PRODUCER_REGISTERS = {1: 24, 2: 40, 3: 32}
PAIRED_REGISTERS = (224, 56)  # a loader that pairs entries of a list needs more
TIGHT_REGISTERS = (240, 24)  # those of two warpgroups where O alone takes half of them

LAST_KEYS = 64  # the last tile is multiplied in steps of so many keys

# Registers beside accumulators: row state, addresses, loop counters, and what the compiler wants for alignment.
STATE_OVERLAPPED = 22  # pingpong and overlap, where all accumulators live at once
STATE_EXACT = 20  # the same with s32 scores, as nvcc was seen to do with
STATE_SERIAL = 18
STATE_HALVED = 12  # columns in halves: what is left beside two parts, as nvcc was seen to do with
STATE_TOKEN = 4  # a scale for each key


@dataclass(frozen=True, kw_only=True)
class WarpgroupDerived(Derived):
    """Sizes in bytes unless they say otherwise.

    key_slots, value_slots: how many there are.
    value_stage: a slot of V with its ones rows.
    part_columns: of one of the products of P V; part 0 has ONES more.
    part_buffers: accumulators for the parts.
    tight: the warps that compute take so many registers that the loading warp has to do with the fewest.
    prepares: what a tile's softmax needs beside its scores is made ready before they are there.
    early: P V of a tile is added to O while the next Q K^T runs, not after it.
    middle: tiles in the middle of an item have a loop of their own, which has fewer jumps.
    narrows: where rows see few keys of a tile, its softmax is made of these. Beside `prepares`.
    merge_bytes: what the CTAs of a cluster exchange, laid over the stages of K and V; 0 for one CTA alone.
    """

    warpgroups: int
    key_slots: int
    value_slots: int
    value_stage: int
    query_buffers: int
    descale_slots: int
    part_columns: int
    part_buffers: int
    tight: bool
    prepares: bool
    early: bool
    middle: bool
    narrows: bool
    merge_bytes: int
    stream_bytes: int  # stages of K and V together
    consumer_registers: int
    producer_registers: int


def row_pitch(head_dim: int) -> int:
    """Bytes from row to row of Q and K in shared memory. 96 are no swizzle width: they take 128."""
    return 128 if head_dim == 96 else head_dim


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def parts(v: Variant) -> int:
    """Products that share the columns of P V."""
    if v.schedule.columns:
        return max(1, v.head_dim // COLUMNS_PART)
    return 2 if v.head_dim > WIDE_HEAD_DIM else 1


def halves(v: Variant) -> int:
    """Slots of shared memory that a tile of K, or of V, takes."""
    return 2 if v.schedule.columns and v.tile_n == HALVED_KEYS else 1


def _slots(v: Variant) -> tuple[int, int]:
    """Slots of K and of V. Of halved tiles V is held for longer: until the last column part is multiplied."""
    return (v.stages - 1 if halves(v) > 1 else v.stages), v.stages


def estimate_registers(v: Variant) -> int:
    """Registers a thread that computes needs in the main loop."""
    output = v.head_dim // 2
    product = (v.head_dim // parts(v) + ONES) // 2
    scores = v.tile_n // 8 * v.softmax.score_registers
    prob = v.tile_n // 8 * v.terms
    token = STATE_TOKEN if v.scaling.per_key else 0
    if halves(v) > 1:  # P and a part of P V lie where the scores were
        return output + max(scores, prob + product - ONES // 2) + product + STATE_HALVED
    if v.schedule.columns:  # two parts at a time, or the last one beside the next scores
        return output + prob + product - ONES // 2 + max(scores, product) + STATE_SERIAL + token
    if v.schedule.serial:
        bias = v.tile_n // 8 * 2 if v.change.biased else 0  # as 16-bit ones are read ahead
        return output + max(scores + bias, prob + product) + STATE_SERIAL + token
    state = STATE_EXACT if v.softmax.exact else STATE_OVERLAPPED
    return output + product + scores + prob + state + token


def _spilled(v: Variant) -> int:
    """Registers that may go through local memory."""
    return sum(tuned.numbers(v, "spilled"))


def _smem(
    v: Variant, query_buffers: int, value_stage: int, descale_slots: int, *, quantises_q: bool = False
) -> tuple[tuple[str, int], ...]:
    pitch = row_pitch(v.head_dim)
    key_slots, value_slots = _slots(v)
    sizes = [
        (f"{query_buffers} x Q", query_buffers * v.tile_m * pitch),
        *([("Q in 16 bits", 2 * v.tile_m * v.head_dim)] if quantises_q else []),
        (f"{key_slots} x K", key_slots * v.tile_n // halves(v) * pitch),
        (f"{value_slots} x V", value_slots * value_stage),
    ]
    if descale_slots:
        sizes.append((f"{descale_slots} x K descales", descale_slots * 4 * v.tile_n))
    if v.change.biased:
        sizes.append(("a bias", 4 * v.tile_m * v.tile_n))
    sizes.append(("sums for the LSE", EXACT_BYTES * 32 * v.warps))
    sizes.append(("slopes", ITEM_SLOTS * 4 * v.tile_m))
    sizes.append(("work items and barriers", CONTROL_BYTES))
    total = sum(size for _, size in sizes)
    if padding := _up(total, SWIZZLE_ALIGNMENT) - total:
        sizes.append(("padding", padding))
    return tuple(sizes)


def _quantises_q(v: Variant) -> bool:
    """Whether callers with Q in 16 bits come to a kernel at all: they get e4m3. For wider heads the best lack room."""
    return not v.kind.diagnostic and v.dtype.made and v.dtype.arrives and v.head_dim <= WIDE_HEAD_DIM


def _unrolled(v: Variant) -> tuple[Unrolled, ...]:
    plain = not v.special and v.mask is Mask.FULL and v.cluster.ctas == 1 and not v.scaling.per_key
    if not plain or v.kind.diagnostic:
        return ()
    forms = []
    for most in tuned.numbers(v, "unrolled"):
        tiles = -(-most // v.tile_n)
        before = (tiles - 1) * v.tile_n
        last = _up(most - before, LAST_KEYS)
        forms.append(
            Unrolled(
                least_keys=before + 1,
                most_keys=most,
                tiles=tiles,
                last_keys=last,
                products=tiles * -(-v.head_dim // 32) + (before + last) // 32,
                plain=most in tuned.numbers(v, "plain"),
            )
        )
    return tuple(forms)


@cache
def derive(v: Variant) -> WarpgroupDerived:
    key_slots, value_slots = _slots(v)
    value_stage = _up(v.tile_n // halves(v) * (v.head_dim + ONES), SWIZZLE_ALIGNMENT)
    descale_slots = v.stages if v.scaling.per_key else 0
    # A second Q is loaded while the first is still in use. The CTAs of a cluster have one item.
    buffers = 2 if v.cluster.ctas == 1 else 1
    smem = _smem(v, buffers, value_stage, descale_slots)
    if buffers == 2 and sum(size for _, size in smem) > SMEM_PER_BLOCK:
        buffers = 1
        smem = _smem(v, buffers, value_stage, descale_slots)
    products = parts(v)
    quantises_q = False
    if buffers == 2 and _quantises_q(v):
        with_source = _smem(v, buffers, value_stage, descale_slots, quantises_q=True)
        if quantises_q := sum(size for _, size in with_source) <= SMEM_PER_BLOCK:
            smem = with_source
    mma = halves(v) * -(-v.head_dim // 32) + products * v.terms * v.tile_n // 32
    consumer, producer = CONSUMER_REGISTERS.get(v.warpgroups, 0), PRODUCER_REGISTERS.get(v.warpgroups, 0)
    part_buffers = products
    tight = v.schedule.columns and v.warpgroups == 2
    prepares = tuned.found(v, "prepares") is not None
    if tight:
        consumer, producer = TIGHT_REGISTERS
        # Each part its own accumulator where they fit, else two in turns.
        if (v.head_dim + products * COLUMNS_PART) // 2 > MOST_ACCUMULATORS:
            part_buffers = 2
    elif v.paired:
        consumer, producer = PAIRED_REGISTERS
    spilled = _spilled(v)
    return WarpgroupDerived(
        threads=32 * v.warps + PRODUCER_THREADS,
        rows_per_warp=v.tile_m // v.warps,
        smem_parts=smem,
        smem_bytes=sum(size for _, size in smem),
        registers=estimate_registers(v) - spilled,
        spilled=spilled,
        register_limit=consumer,
        ctas_per_sm=1,
        ctas_limit="choice",
        mma_per_tile=mma,
        mma_in_loop=mma,
        integer_in_loop=halves(v) * -(-v.head_dim // 32) if v.dtype.qk.integer else 0,
        warpgroups=v.warpgroups,
        halves=halves(v),
        key_slots=key_slots,
        value_slots=value_slots,
        value_stage=value_stage,
        query_buffers=buffers,
        descale_slots=descale_slots,
        parts=products,
        part_columns=v.head_dim // products,
        part_buffers=part_buffers,
        tight=tight,
        quantises_q=quantises_q,
        prepares=prepares,
        early=tuned.found(v, "early") is not None,
        middle=v.mask in (Mask.FULL, Mask.CAUSAL) and tuned.found(v, "middle") is not None,  # first tile is number 0
        narrows=v.windowed and prepares and tuned.found(v, "narrows") is not None,
        unrolled=_unrolled(v),
        plain=0 in tuned.numbers(v, "plain") and v.cluster.ctas == 1 and not (v.special or v.kind.diagnostic),
        merge_bytes=0 if v.cluster.ctas == 1 else 4 * v.tile_m * (v.head_dim + MERGE_STATE),
        stream_bytes=key_slots * v.tile_n // halves(v) * row_pitch(v.head_dim) + value_slots * value_stage,
        consumer_registers=consumer,
        producer_registers=producer,
    )
