"""How many blocks of a kernel an SM holds at once, from its registers, shared memory and threads."""

from __future__ import annotations

from codegen.arch import REGISTERS_PER_SM, SMEM_RESERVED_PER_CTA, TARGETS

PARTITIONS = 4  # of an SM; a warp's registers come from its partition's quarter of the file
REGISTER_UNIT = 256  # registers a warp are allocated in these
SMEM_UNIT = 128  # bytes

# (warps, blocks) an SM can hold: CUDA programming guide, technical specifications by compute capability.
RESIDENT = {(8, 9): (48, 24), (9, 0): (64, 32)}


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def ctas_per_sm(target: str, *, registers: int, smem_bytes: int, threads: int) -> int:
    """Resident blocks an SM, 0 when one does not fit. registers: a thread. smem_bytes: static and dynamic, a block."""
    t = TARGETS[target]
    max_warps, max_blocks = RESIDENT[t.capability]
    warps = _up(threads, 32) // 32
    smem = _up(smem_bytes, SMEM_UNIT)
    if smem > t.smem_per_block:
        return 0
    warps_by_registers = REGISTERS_PER_SM // PARTITIONS // _up(registers * 32, REGISTER_UNIT) * PARTITIONS
    return min(
        max_blocks,
        max_warps // warps,
        warps_by_registers // warps,
        t.smem_per_sm // (smem + SMEM_RESERVED_PER_CTA),
    )
