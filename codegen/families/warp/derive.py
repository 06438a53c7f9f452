"""What follows from the axes of an sm89 variant: fragments, shared memory, registers, occupancy, instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from codegen.arch import REGISTERS_PER_SM, REGISTERS_PER_THREAD, SMEM_RESERVED_PER_CTA
from codegen.derived import Derived
from codegen.variant import Variant

SMEM_PER_BLOCK, SMEM_PER_SM = 101_376, 102_400
MAX_CTAS_PER_SM = 3  # a fourth adds no overlap that three do not have, and takes registers from all
STEPS_AT_ONCE = 4  # k steps of Q K^T unrolled where Q comes from shared memory
WORK_ITEM_BYTES, RAGGED_ITEM_BYTES = 128, 256  # two decoded work items
ROW_STATE_BYTES = 32  # RowState in softmax.cuh
ROWS_OUTPUT_REGISTERS = 128  # from this many registers of O on, the state of the rows lives in shared memory
Q_FRAGMENT_REGISTERS = 32  # beyond this many, Q fragments are read from shared memory for every tile instead


@dataclass(frozen=True, kw_only=True)
class WarpDerived(Derived):
    m_fragments: int
    q_in_registers: bool
    rows_in_registers: bool


def row_pitch(row_bytes: int) -> int:
    """Bytes from row to row in shared memory, as SmemTile in layout.h: powers of two are swizzled, 96 is padded."""
    return row_bytes if row_bytes & (row_bytes - 1) == 0 else row_bytes + 16


def estimate_registers(v: Variant, fragments: int, q_in_registers: bool, rows_in_registers: bool) -> int:
    """Registers a thread needs in the main loop, on the safe side.

    The gates hold the compiler to the launch bound, not to this.
    """
    output = fragments * v.head_dim // 2
    scores = fragments * v.tile_n // 8 * v.softmax.score_registers
    prob = fragments * v.tile_n // 8 * v.terms
    product = fragments * 8  # two n8 blocks of P V in flight
    q = fragments * v.head_dim // 8 if q_in_registers else fragments * 4
    state = fragments * (14 if rows_in_registers else 2)  # reference, sums, slopes, factors
    # From 96 accumulators on, the compiler needs slack for the alignment of fragments: without it spills were seen.
    slack = 46 if output >= 96 else 0
    # The code domain keeps more maxima and offsets in flight, bytes the descales of V.
    addresses = 36 if v.score == "f32" else 56
    if v.change.biased:  # a fragment's 16-bit values, and where they lie
        addresses += v.tile_n // 8 * 2 + 10
    # P overwrites S piece by piece, so only the larger of (S) and (P + product) counts beside O and Q.
    return output + max(scores + prob // 2, prob + product) + q + state + addresses + slack


def descale_slots(v: Variant) -> int:
    """Buffers for descales of single keys, K's or V's: the softmax reads a tile's after the load of the next K may have
    begun."""
    return max(2, v.stages)


@cache
def derive(v: Variant) -> WarpDerived:
    threads = 32 * v.warps
    rows_per_warp = v.tile_m // v.warps
    fragments = max(1, rows_per_warp // 16)
    q_in_registers = fragments * v.head_dim // 8 <= Q_FRAGMENT_REGISTERS and v.head_dim <= 128
    rows_in_registers = fragments * v.head_dim // 2 < ROWS_OUTPUT_REGISTERS
    parts = [
        ("Q", v.tile_m * row_pitch(v.head_dim)),
        (f"{v.stages} x K", v.stages * v.tile_n * row_pitch(v.head_dim)),
        (f"{v.stages} x V", v.stages * v.head_dim * row_pitch(v.tile_n)),
    ]
    for operand, shared_by in (("K", v.grain.k), ("V", v.grain.v)):
        if shared_by == "token":
            parts.append((f"{descale_slots(v)} x {operand} descales", descale_slots(v) * max(128, 4 * v.tile_n)))
    if not rows_in_registers:
        parts.append(("row state", threads * fragments * ROW_STATE_BYTES))
    parts.append(("work items", RAGGED_ITEM_BYTES if v.walk.tables else WORK_ITEM_BYTES))
    smem = sum(size for _, size in parts)

    registers = estimate_registers(v, fragments, q_in_registers, rows_in_registers)
    limits = {
        "shared memory": SMEM_PER_SM // (smem + SMEM_RESERVED_PER_CTA),
        "registers": REGISTERS_PER_SM // (threads * min(registers, REGISTERS_PER_THREAD + 1)),
        "choice": MAX_CTAS_PER_SM,
    }
    limit = min(limits, key=lambda k: limits[k])
    steps_n, steps_d = v.tile_n // 32, v.head_dim // 32
    sums = 0 if v.softmax.by_byte else 1  # n8 blocks
    values = fragments * (v.head_dim // 8 + sums) * steps_n * v.terms  # P V and the row sums
    scores = fragments * v.tile_n // 8
    in_loop = scores * (steps_d if q_in_registers else STEPS_AT_ONCE)
    return WarpDerived(
        threads=threads,
        rows_per_warp=rows_per_warp,
        m_fragments=fragments,
        q_in_registers=q_in_registers,
        rows_in_registers=rows_in_registers,
        smem_parts=tuple(parts),
        smem_bytes=smem,
        registers=registers,
        register_limit=REGISTERS_PER_THREAD,
        ctas_per_sm=limits[limit],
        ctas_limit=limit,
        mma_per_tile=values + scores * steps_d,
        integer_in_loop=v.dtype.qk.integer * in_loop + v.dtype.p.integer * values,
        mma_in_loop=values + in_loop,
    )
