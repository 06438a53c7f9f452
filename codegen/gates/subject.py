"""What the gates look at: a kernel with what the generator promised about it, and what the compiler made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from codegen.arch import TARGETS
from codegen.families import FAMILIES, derive
from codegen.outputs import MERGE, MERGE_PATH, PACK_MASK, PACK_MASK_PATH, PLAN, PLAN_PATH, kernel_path
from codegen.render import environment, render_kernel, render_single
from codegen.variant import Variant
from scripts.cubins import INCLUDE


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One source file for one target, with the generator's numbers (the manifest's) that the compiled code must keep.

    emulated: whether the family is emulated on the target, so that the instruction mix says nothing.
    smem_bytes, smem_limit: dynamic shared memory of a launch and the most a block may have, in bytes.
    mma_in_loop: matrix instructions in the main loop's code, where an inner loop over k steps stands once.
    integer_in_loop: of these, those of integers.
    spilled: registers that may go through local memory.
    entry: what the kernel's mangled name holds, where the source has several kernels.
    storage: what the source calls its dynamic shared memory in a static_assert, where it has several kernels.
    static_smem: bytes of shared memory that the compiler lays out. The family `pack` has such, the others none.
    wide_loads, narrow_loads: global loads of 16 bytes, and others, in the code of a kernel of the family `pack`.
    """

    id: str
    target: str
    family: str
    source: Path
    emulated: bool
    head_dim: int
    threads: int
    ctas_per_sm: int
    smem_bytes: int
    smem_limit: int
    mma_in_loop: int
    spilled: int = 0
    integer_in_loop: int = 0
    entry: str = ""
    storage: str = ""
    static_smem: int = 0
    wide_loads: int = 0
    narrow_loads: int = 0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The main loop: how many of each opcode lie between its first and last address, and on the shortest way through.

    `path` skips every block that a branch can skip, such as masks or the loads of a next tile. What an iteration
    executes lies between `path` and `counts`.
    """

    counts: dict[str, int]
    path: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a disassembly says. `counts` is by opcode without modifiers over all that was read; padding is left out.

    wide_loads: how many of the LDG take 16 bytes.
    """

    code_bytes: int
    counts: dict[str, int]
    loop: Loop | None
    wide_loads: int = 0


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What ptxas says of a kernel: registers a thread, the rest in bytes; stack and spills a thread, shared a block.

    advice: its remarks on lost performance, such as warpgroup products that it had to serialise.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A compiled kernel.

    storage_bytes: what the source's static_assert states of its dynamic shared memory, which compiled and hence is true
    (sizeof(SharedStorage), or kBytes of a pack's Stage); None when the source asserts nothing. seconds, peak_mib: wall
    time of nvcc for the source, and the largest of its processes. code: digest of the machine code.
    """

    resources: Resources
    listing: Listing
    storage_bytes: int | None
    code: str
    seconds: float = field(compare=False)
    peak_mib: float = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A gate that a kernel did not pass, with the numbers."""

    gate: str
    kernel: str
    target: str
    message: str

    def __str__(self) -> str:
        return f"{self.gate}: {self.target} {self.kernel}: {self.message}"


def write_source(path: Path, text: str) -> None:
    """Writes a source, unless it is there like that."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def mangled(name: str) -> str:
    """What the compiler's spelling of a function's name begins with: its length, itself."""
    return f"{len(name)}{name}"


def ahead(name: str, target: str, source: Path, header: str, constant: str) -> Kernel:
    """A kernel that runs before others and has no axes. Its threads are a constant of a header, by which the host
    launches it. LookupError where the header does not state it."""
    stated = re.search(rf"constexpr int {constant} = (\d+);", (INCLUDE / "fp8cutlass" / header).read_text())
    if stated is None:
        raise LookupError(f"{header} states no {constant}")
    return Kernel(
        id=name,
        target=target,
        family=name,
        source=source,
        emulated=False,
        head_dim=0,
        threads=int(stated[1]),
        ctas_per_sm=1,
        smem_bytes=0,
        smem_limit=TARGETS[target].smem_per_block,
        mma_in_loop=0,
    )


def render(chosen: Mapping[str, tuple[Variant, ...]], folder: Path) -> list[Kernel]:
    """A Kernel for each target, variant chosen for it, and other form of the variant; one more for the
    plan of ragged batches, the packing of masks, and the merging of results. Writes the sources that `folder` does not
    have like that."""
    env = environment()
    kernels: list[Kernel] = []
    for v in dict.fromkeys(v for variants in chosen.values() for v in variants):
        source = folder / kernel_path(v)
        write_source(source, render_kernel(v, env))
        d = derive(v)
        family = FAMILIES[v.family]
        for target in (t for t, variants in chosen.items() if v in variants):
            any_call = Kernel(
                id=v.id,
                target=target,
                family=v.family,
                source=source,
                emulated=target in family.emulated,
                head_dim=v.head_dim,
                threads=d.threads,
                ctas_per_sm=d.ctas_per_sm,
                smem_bytes=d.smem_bytes,
                smem_limit=min(family.smem_per_block, TARGETS[target].smem_per_block),
                mma_in_loop=d.mma_in_loop,
                integer_in_loop=d.integer_in_loop,
                spilled=d.spilled,
                entry=f"{mangled(v.id)}E" if d.unrolled or d.plain else "",
            )
            if d.plain:
                kernels.append(replace(any_call, id=f"{v.id}.plain", entry=mangled(f"{v.id}_plain")))
            forms = (
                replace(
                    any_call,
                    id=f"{v.id}.keys{u.most_keys}",
                    entry=mangled(f"{v.id}_keys{u.most_keys}"),
                    mma_in_loop=u.products,
                )
                for u in d.unrolled
            )
            kernels += [any_call, *forms]
    ragged = [t for t, variants in chosen.items() if any(v.walk.tables for v in variants)]
    if ragged:
        write_source(folder / PLAN_PATH, render_single(PLAN_PATH, env))
    header = "walk/plan_params.h"
    kernels += [ahead(PLAN, target, folder / PLAN_PATH, header, "kThreads") for target in ragged]
    listed = [t for t, variants in chosen.items() if any(v.listed for v in variants)]
    if listed:
        write_source(folder / PACK_MASK_PATH, render_single(PACK_MASK_PATH, env))
    header = "mask/params.h"
    kernels += [ahead(PACK_MASK, target, folder / PACK_MASK_PATH, header, "kMaskThreads") for target in listed]
    write_source(folder / MERGE_PATH, render_single(MERGE_PATH, env))
    kernels += [ahead(MERGE, target, folder / MERGE_PATH, "merge/params.h", "kMergeThreads") for target in chosen]
    return sorted(kernels, key=lambda k: (k.target, k.id))
