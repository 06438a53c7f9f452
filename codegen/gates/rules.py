"""The gates: what must hold for the compiled code of every kernel, with the reason, and the numbers when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.arch import REGISTERS_PER_SM, REGISTERS_PER_THREAD
from codegen.gates.decodes import FAMILY as DECODE
from codegen.gates.decodes import WIDE
from codegen.gates.occupancy import ctas_per_sm
from codegen.gates.packs import FAMILY as PACK
from codegen.gates.residents import FAMILY as RESIDENT
from codegen.gates.sass import MATRIX
from codegen.gates.subject import Failure, Kernel, Measured
from codegen.outputs import APPEND, CUT, MERGE, PACK_MASK, PLAN, ROUTE


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`check` returns None or what is wrong. `native_only` gates do not apply where FP8 `mma.sync` is emulated: there
    the instructions are others, and their 16-bit operands take registers that the kernel was not laid out for."""

    name: str
    why: str
    native_only: bool
    check: Callable[[Kernel, Measured], str | None]
    families: tuple[str, ...] = ("sm89", "sm90a")

    def applies(self, kernel: Kernel) -> bool:
        return kernel.family in self.families and not (self.native_only and kernel.emulated)


def smem_bytes(kernel: Kernel, m: Measured) -> int:
    """Shared memory a block really takes: what the launch asks for, which may be nothing, and what the compiler put
    beside it."""
    stated = m.storage_bytes if kernel.smem_bytes else None
    return (kernel.smem_bytes if stated is None else stated) + m.resources.static_smem


def occupancy(kernel: Kernel, m: Measured) -> int:
    """Resident blocks an SM, from the compiled kernel's registers and shared memory."""
    return ctas_per_sm(
        kernel.target, registers=m.resources.registers, smem_bytes=smem_bytes(kernel, m), threads=kernel.threads
    )


STACK_UNIT = 16  # bytes, of which a stack frame is a multiple


def _spill(kernel: Kernel, m: Measured) -> str | None:
    r = m.resources
    if max(r.spill_stores, r.spill_loads) > 4 * kernel.spilled:
        return f"{r.spill_stores} bytes of spill stores, {r.spill_loads} of loads with {r.registers} registers"
    return None


def _local(kernel: Kernel, m: Measured) -> str | None:
    loads, stores, stack = m.listing.counts.get("LDL", 0), m.listing.counts.get("STL", 0), m.resources.stack
    if max(loads, stores) > kernel.spilled or stack > -(-4 * kernel.spilled // STACK_UNIT) * STACK_UNIT:
        return f"{loads} LDL and {stores} STL, stack of {stack} bytes: an array is indexed at run time, or spilled"
    return None


def _smem(kernel: Kernel, m: Measured) -> str | None:
    if m.storage_bytes is None:
        return "the source states no sizeof(SharedStorage)"
    if m.storage_bytes != kernel.smem_bytes:
        return f"sizeof(SharedStorage) is {m.storage_bytes:,}, the manifest says {kernel.smem_bytes:,}"
    if m.resources.static_smem:
        return f"{m.resources.static_smem:,} bytes of static shared memory beside SharedStorage"
    if m.storage_bytes > kernel.smem_limit:
        return f"{m.storage_bytes:,} bytes of shared memory > {kernel.smem_limit:,}"
    return None


def _pack_smem(kernel: Kernel, m: Measured) -> str | None:
    name = kernel.storage or "Stage::kBytes"
    if m.storage_bytes is None:
        return f"the source states no {name}"
    if kernel.smem_bytes not in (0, m.storage_bytes):
        return f"{name} is {m.storage_bytes:,}, the generator counts {kernel.smem_bytes:,}"
    if m.resources.static_smem != kernel.static_smem:
        return f"{m.resources.static_smem:,} bytes of static shared memory, the generator counts {kernel.static_smem:,}"
    if (have := smem_bytes(kernel, m)) > kernel.smem_limit:
        return f"{have:,} bytes of shared memory > {kernel.smem_limit:,}"
    return None


def _pack_occupancy(kernel: Kernel, m: Measured) -> str | None:
    return _fewer_ctas(kernel, m, kernel.ctas_per_sm)


def _loads(kernel: Kernel, m: Measured) -> str | None:
    wide, counts = m.listing.wide_loads, m.listing.counts
    narrow = counts.get("LDG", 0) + counts.get("LDGSTS", 0) - wide
    if (wide, narrow) != (kernel.wide_loads, kernel.narrow_loads):
        return (
            f"{wide} loads of 16 bytes and {narrow} others; the elements take {kernel.wide_loads}, "
            f"maxima {kernel.narrow_loads}"
        )
    return None


def _no_matrix(kernel: Kernel, m: Measured) -> str | None:
    return ", ".join(f"{n} {x}" for x in MATRIX if (n := m.listing.counts.get(x, 0))) or None


def _cp_async(kernel: Kernel, m: Measured) -> str | None:
    loop = m.listing.loop
    if loop is None or not loop.counts.get("LDGSTS"):
        return f"no LDGSTS in the main loop, {m.listing.counts.get('LDGSTS', 0)} outside"
    return None


def _occupancy(kernel: Kernel, m: Measured) -> str | None:
    return _fewer_ctas(kernel, m, max(kernel.ctas_per_sm, 2 if kernel.head_dim <= 128 else 1))


def _fewer_ctas(kernel: Kernel, m: Measured, need: int) -> str | None:
    if (have := occupancy(kernel, m)) < need:
        return (
            f"{have} CTAs an SM < {need} ({m.resources.registers} registers x {kernel.threads} threads, "
            f"{smem_bytes(kernel, m):,} B)"
        )
    return None


def _count(opcode: str, integers: str = "IGMMA") -> Callable[[Kernel, Measured], str | None]:
    """The main loop holds as many of the family's matrix instructions as the generator counted."""

    def check(kernel: Kernel, m: Measured) -> str | None:
        if m.listing.loop is None:
            return "no loop around matrix instructions"
        counts = {opcode: kernel.mma_in_loop - kernel.integer_in_loop, integers: kernel.integer_in_loop}
        for name, counted in counts.items():
            if (have := m.listing.loop.counts.get(name, 0)) != counted:
                return f"{have} {name} in the main loop, the generator counts {counted}"
        return None

    return check


def _tma(kernel: Kernel, m: Measured) -> str | None:
    counts = m.listing.counts
    return None if counts.get("UTMALDG") or counts.get("UBLKCP") else "neither UTMALDG nor UBLKCP: tiles come by loads"


def launch_registers(threads: int) -> int:
    """Registers a thread with which one block of so many threads starts, as ptxas rounds them."""
    return min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // threads // 8 * 8)


def _launch(kernel: Kernel, m: Measured) -> str | None:
    if (have := m.resources.registers) > (most := launch_registers(kernel.threads)):
        return f"{have} registers a thread > {most}, with which {kernel.threads} threads can start"
    return None


def _advice(kernel: Kernel, m: Measured) -> str | None:
    return "; ".join(m.resources.advice) or None


def _hmma(kernel: Kernel, m: Measured) -> str | None:
    count = m.listing.counts.get("HMMA", 0)
    return f"{count} HMMA: a product runs in 16 bits" if count else None


def _warp_products(kernel: Kernel, m: Measured) -> str | None:
    integers = () if kernel.integer_in_loop else ("IGMMA",)
    found = {x: n for x in ("HMMA", "IMMA", "QMMA", "HGMMA", *integers) if (n := m.listing.counts.get(x, 0))}
    return ", ".join(f"{n} {x}" for x, n in found.items()) + ": not FP8 warpgroup products" if found else None


GATES = (
    Gate(name="SPILL", why="no register goes through local memory", native_only=True, check=_spill),
    Gate(name="NO-LOCAL", why="no stack, no LDL, no STL", native_only=True, check=_local),
    Gate(
        name="SMEM",
        why="sizeof(SharedStorage) is the manifest's smem_bytes, fits a block, and nothing lies beside it",
        native_only=False,
        check=_smem,
        families=("sm89", "sm90a", DECODE, WIDE, RESIDENT),
    ),
    Gate(
        name="CP-ASYNC",
        why="tiles are loaded by LDGSTS inside the main loop",
        native_only=False,
        check=_cp_async,
        families=("sm89", DECODE),
    ),
    Gate(
        name="OCCUPANCY",
        why="as many CTAs an SM as the manifest says, and 2 up to head_dim 128",
        native_only=True,
        check=_occupancy,
        families=("sm89",),
    ),
    Gate(
        name="QMMA-COUNT",
        why="the main loop has exactly the FP8 matrix instructions that the generator counts for a tile",
        native_only=True,
        check=_count("QMMA", "IMMA"),
        families=("sm89",),
    ),
    Gate(
        name="NO-HMMA",
        why="no product falls back to 16 bits",
        native_only=True,
        check=_hmma,
        families=("sm89",),
    ),
    Gate(
        name="TMA",
        why="tiles are loaded by the copy engine",
        native_only=True,
        check=_tma,
        families=("sm90a",),
    ),
    Gate(
        name="LAUNCH-REGS",
        why="the registers at launch, before warps trade them, fit one block an SM",
        native_only=True,
        check=_launch,
        families=("sm90a",),
    ),
    Gate(
        name="QGMMA-COUNT",
        why="the main loop has exactly the FP8 warpgroup products that the generator counts for a tile, or for an item",
        native_only=True,
        check=_count("QGMMA"),
        families=("sm90a", RESIDENT),
    ),
    Gate(
        name="FP8-ONLY",
        why="no product runs in 16 bits, as integers where operands are none, or one warp at a time",
        native_only=True,
        check=_warp_products,
        families=("sm90a", RESIDENT),
    ),
    Gate(
        name="NO-ADVICE",
        why="ptxas had to serialise no warpgroup products (C7510 to C7514) and saw no other loss",
        native_only=True,
        check=_advice,
        families=("sm90a", WIDE, RESIDENT),
    ),
    Gate(
        name="SPILL",
        why="no register goes through local memory; a few words where rows are transformed (SPILLED)",
        native_only=True,
        check=_spill,
        families=(PACK, PLAN, PACK_MASK, MERGE, DECODE, WIDE, CUT, APPEND, ROUTE, RESIDENT),
    ),
    Gate(
        name="NO-LOCAL",
        why="no stack, no LDL, no STL beyond these words",
        native_only=True,
        check=_local,
        families=(PACK, PLAN, PACK_MASK, MERGE, DECODE, WIDE, CUT, APPEND, ROUTE, RESIDENT),
    ),
    Gate(
        name="SMEM",
        why="Stage::kBytes and static shared memory are what the generator counts, and fit a block",
        native_only=False,
        check=_pack_smem,
        families=(PACK,),
    ),
    Gate(
        name="OCCUPANCY",
        why="as many CTAs an SM as it takes for some to load while another computes",
        native_only=True,
        check=_pack_occupancy,
        families=(PACK,),
    ),
    Gate(
        name="OCCUPANCY",
        why="as many CTAs an SM as the manifest says",
        native_only=True,
        check=_pack_occupancy,
        families=(DECODE, WIDE, RESIDENT),
    ),
    Gate(
        name="HMMA-COUNT",
        why="the main loop has exactly the matrix instructions that the generator counts for a slice",
        native_only=True,
        check=_count("HMMA"),
        families=(DECODE,),
    ),
    Gate(
        name="HGMMA-COUNT",
        why="the main loop has exactly the warpgroup products that the generator counts for a tile",
        native_only=True,
        check=_count("HGMMA"),
        families=(WIDE,),
    ),
    Gate(
        name="LOADS",
        why="elements are read 16 bytes at a time, once; other loads are of maxima and descales",
        native_only=True,
        check=_loads,
        families=(PACK,),
    ),
    Gate(
        name="NO-MATRIX",
        why="no matrix instruction",
        native_only=True,
        check=_no_matrix,
        families=(PACK,),
    ),
)


def applicable(kernels: Iterable[Kernel]) -> tuple[Gate, ...]:
    """The gates that some of the kernels must pass."""
    held = list(kernels)
    return tuple(g for g in GATES if any(g.applies(k) for k in held))


def check(kernel: Kernel, m: Measured) -> list[Failure]:
    """Every gate that the compiled kernel does not pass."""
    return [
        Failure(gate=g.name, kernel=kernel.id, target=kernel.target, message=message)
        for g in GATES
        if g.applies(kernel) and (message := g.check(kernel, m)) is not None
    ]
