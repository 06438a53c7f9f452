"""The gates on compiled code: each must refuse a kernel that was written to fail it, and pass the one that was not.

Regressions these catch: a gate that never runs or looks at the wrong number (a spill check whose pattern no longer
matches what ptxas prints passes everything), a main loop that is mistaken for another one, an occupancy formula without
the hardware's granularities, a cache that serves the numbers of an older source, a baseline that cannot fail.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from taken_apart import listing, measure

from codegen.arch import TARGETS
from codegen.axes import Kind
from codegen.cli import main
from codegen.families import family_of
from codegen.gates import compile as compiling
from codegen.gates import machine, report
from codegen.gates.compile import job_of, measure_all, parse_resources
from codegen.gates.occupancy import ctas_per_sm
from codegen.gates.report import sources_digest
from codegen.gates.rules import GATES, check, launch_registers
from codegen.gates.run import gate_counts
from codegen.gates.sass import SassError, functions
from codegen.gates.subject import Failure, Kernel, Listing, Loop, Measured, Resources
from codegen.gates.subject import render as render_sources
from codegen.gates.toolbox import Toolbox, ToolboxError, open_toolbox
from codegen.profiles import profile_of
from codegen.select import select
from codegen.variant import Variant
from scripts import cubins
from scripts.cubins import ROOT, CompileError

# A kernel in small: a loop that loads a tile with cp.async and multiplies it twice. The words in capitals are replaced.
SOURCE = """
#include <cstdint>
struct SharedStorage { alignas(16) uint8_t tile[SIZE]; };
ASSERT
__device__ __forceinline__ void fp8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void async(uint8_t* to, const uint8_t* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}
__device__ __forceinline__ void plain(uint8_t* to, const uint8_t* from) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}
__global__ void __launch_bounds__(BOUNDS) attention(const uint32_t* q, const uint8_t* k, float* o, int tiles) {
  extern __shared__ __align__(16) uint8_t bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(bytes);
  uint8_t* mine = shared.tile + 16 * threadIdx.x;
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = q[4 * threadIdx.x + i];
  float c[4] = {};
  async(mine, k);
  BEFORE
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    LOAD(mine, k + 2048 * tile + 16 * threadIdx.x);
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    const uint32_t* b = reinterpret_cast<const uint32_t*>(shared.tile) + threadIdx.x % 32;
    for (int i = 0; i < PRODUCTS; ++i) MULTIPLY(c, a, b[32 * i], b[32 * i + 64]);
    INSIDE
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = c[i];
  AFTER
}
"""
GOOD = {
    "SIZE": "2048",
    "ASSERT": 'static_assert(sizeof(SharedStorage) == 2048, "as the manifest says");',
    "BOUNDS": "128, 2",
    "LOAD": "async",
    "PRODUCTS": "2",
    "MULTIPLY": "fp8",
    "BEFORE": "",
    "INSIDE": "",
    "AFTER": "",
}
# 64 sums that live across the loop do not fit the 32 registers of 2 x 1024 threads.
SPILLS = {
    "BOUNDS": "1024, 2",
    "BEFORE": "float sums[64]; for (int i = 0; i < 64; ++i) sums[i] = o[1024 * i + threadIdx.x];",
    "INSIDE": "for (int i = 0; i < 64; ++i) sums[i] = fmaf(sums[i], c[i % 4], sums[(i + 7) % 64]);",
    "AFTER": "for (int i = 0; i < 64; ++i) o[1024 * i + threadIdx.x] = sums[i];",
}
LOCAL_ARRAY = {
    "BEFORE": "float last[16] = {};",
    "INSIDE": "last[b[0] % 16] += c[0];",
    "AFTER": "o[threadIdx.x] = last[tiles % 16];",
}
LARGE = {"SIZE": "102400", "ASSERT": GOOD["ASSERT"].replace("2048", "102400")}
STATIC = {
    "BEFORE": "__shared__ float beside[64]; beside[threadIdx.x % 64] = c[0];",
    "AFTER": "o[0] = beside[tiles % 64];",
}

# The same for warpgroup products: a loop that copies a tile with the copy engine and multiplies it twice.
HOPPER_SOURCE = """
#include <cstdint>
struct SharedStorage { alignas(128) uint8_t tile[2048]; };
static_assert(sizeof(SharedStorage) == 2048, "as the manifest says");
__device__ __forceinline__ void fp8(float (&c)[4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, 1, 1, 1;"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b));
}
__device__ __forceinline__ void bf16(float (&c)[4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b));
}
__device__ __forceinline__ void bulk(const uint8_t* from, uint32_t to, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
               ::"r"(to), "l"(from), "r"(barrier) : "memory");
}
__device__ __forceinline__ void plain(const uint8_t* from, uint32_t to, uint32_t barrier) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(*reinterpret_cast<const uint32_t*>(from)) : "memory");
}
__global__ void __launch_bounds__(384, 1) attention(const uint8_t* k, float* o, int tiles) {
  extern __shared__ __align__(128) uint8_t bytes[];
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(bytes));
  uint64_t a = at / 16, b = (at + 1024) / 16;
  float c[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  fp8(c, a, b);  // of the first tile: the loop is not all there is
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    LOAD(k + 1024 * tile, at, at + 1536);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int i = 0; i < PRODUCTS; ++i) {
      MULTIPLY(c, a + 2 * i, b + 2 * i);
      BETWEEN
    }
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    c[0] += o[tile];
  }
  for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = c[i];
}
"""
HOPPER_GOOD = {"LOAD": "bulk", "PRODUCTS": "2", "MULTIPLY": "fp8", "BETWEEN": ""}
HOPPER_BAD = [
    ("plain loads", {"LOAD": "plain"}, {}, {"TMA"}),
    ("one product too many", {"PRODUCTS": "3"}, {}, {"QGMMA-COUNT"}),
    ("bf16 products", {"MULTIPLY": "bf16"}, {}, {"QGMMA-COUNT", "FP8-ONLY"}),
    # The compiler also drains the pipeline there, by an HGMMA on no registers.
    ("accumulators used between products", {"BETWEEN": "c[1] += 1.f;"}, {}, {"NO-ADVICE", "FP8-ONLY"}),
    ("more threads than registers", {}, {"threads": 32 * 1024}, {"LAUNCH-REGS"}),
    ("another size than promised", {}, {"smem_bytes": 2064}, {"SMEM"}),
]

# (name, what differs in the source, what differs in the promise, gates that must refuse it)
BAD = [
    ("spills", SPILLS, {}, {"SPILL", "NO-LOCAL"}),
    ("local array", LOCAL_ARRAY, {}, {"NO-LOCAL"}),
    ("bf16 product", {"MULTIPLY": "bf16"}, {}, {"QMMA-COUNT", "NO-HMMA"}),
    ("one product too many", {"PRODUCTS": "3"}, {}, {"QMMA-COUNT"}),
    ("cp.async outside the loop only", {"LOAD": "plain"}, {}, {"CP-ASYNC"}),
    ("another size than promised", {}, {"smem_bytes": 2064}, {"SMEM"}),
    ("more than a block can have", LARGE, {"smem_bytes": 102_400}, {"SMEM", "OCCUPANCY"}),
    ("static shared memory", STATIC, {}, {"SMEM"}),
    ("no statement of the size", {"ASSERT": ""}, {}, {"SMEM"}),
    ("fewer CTAs than promised", {}, {"threads": 1024, "ctas_per_sm": 2}, {"OCCUPANCY"}),
    ("one CTA at head_dim 128", {}, {"threads": 1024, "ctas_per_sm": 1, "head_dim": 128}, {"OCCUPANCY"}),
]


@pytest.fixture(scope="module")
def tools() -> Toolbox:
    try:
        return open_toolbox()
    except ToolboxError as error:
        pytest.skip(f"needs a compiler: {error}")


def _kernel(folder: Path, changes: dict[str, str] | None = None, **promise: Any) -> Kernel:
    text = SOURCE
    for word, value in {**GOOD, **(changes or {})}.items():
        text = text.replace(word, value)
    source = folder / "kernel.cu"
    source.write_text(text)
    good = Kernel(
        id="kernel",
        target="sm89",
        family="sm89",
        source=source,
        emulated=False,
        head_dim=64,
        threads=128,
        ctas_per_sm=2,
        smem_bytes=2048,
        smem_limit=101_376,
        mma_in_loop=2,
    )
    return dataclasses.replace(good, **promise)


def _hopper(folder: Path, changes: dict[str, str] | None = None, **promise: Any) -> Kernel:
    text = HOPPER_SOURCE
    for word, value in {**HOPPER_GOOD, **(changes or {})}.items():
        text = text.replace(word, value)
    good = dataclasses.replace(_kernel(folder), target="sm90a", family="sm90a", threads=384, ctas_per_sm=1)
    good.source.write_text(text)
    return dataclasses.replace(good, **promise)


def _refused(kernel: Kernel, tools: Toolbox, folder: Path) -> set[str]:
    (measured,) = measure([kernel], tools, folder)
    return {failure.gate for failure in check(kernel, measured)}


def test_a_good_kernel_passes_every_gate(tools: Toolbox, tmp_path: Path) -> None:
    kernel = _kernel(tmp_path)
    (measured,) = measure([kernel], tools, tmp_path)
    assert check(kernel, measured) == []
    assert measured.listing.loop is not None
    assert {"QMMA": 2, "LDGSTS": 1, "BAR": 2}.items() <= measured.listing.loop.counts.items()
    assert measured.seconds > 0 and measured.peak_mib > 10


@pytest.mark.parametrize(("changes", "promise", "gates"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_kernel_is_refused(
    changes: dict[str, str], promise: dict[str, Any], gates: set[str], tools: Toolbox, tmp_path: Path
) -> None:
    assert _refused(_kernel(tmp_path, changes, **promise), tools, tmp_path) == gates


def test_a_good_warpgroup_kernel_passes_every_gate(tools: Toolbox, tmp_path: Path) -> None:
    kernel = _hopper(tmp_path)
    (measured,) = measure([kernel], tools, tmp_path)
    assert check(kernel, measured) == []
    assert measured.listing.counts["QGMMA"] == 3
    assert measured.listing.loop is not None and measured.listing.loop.counts["QGMMA"] == 2


@pytest.mark.parametrize(("changes", "promise", "gates"), [b[1:] for b in HOPPER_BAD], ids=[b[0] for b in HOPPER_BAD])
def test_a_bad_warpgroup_kernel_is_refused(
    changes: dict[str, str], promise: dict[str, Any], gates: set[str], tools: Toolbox, tmp_path: Path
) -> None:
    assert _refused(_hopper(tmp_path, changes, **promise), tools, tmp_path) == gates


def test_every_gate_has_a_kernel_that_fails_it() -> None:
    assert set().union(*(b[3] for b in BAD)) == {g.name for g in GATES if "sm89" in g.families}
    own = {g.name for g in GATES if g.families == ("sm90a",)}
    assert own and own <= set().union(*(b[3] for b in HOPPER_BAD))


@pytest.mark.parametrize(("threads", "registers"), [(256, 255), (384, 168), (512, 128)])
def test_registers_at_launch(threads: int, registers: int) -> None:
    assert launch_registers(threads) == registers


def test_emulation_is_excused_only_where_it_is_declared(tools: Toolbox, tmp_path: Path) -> None:
    native = _kernel(tmp_path, target="sm90a")
    assert _refused(native, tools, tmp_path) == {"QMMA-COUNT", "NO-HMMA"}
    assert _refused(dataclasses.replace(native, emulated=True), tools, tmp_path) == set()
    spills = _kernel(tmp_path, SPILLS, target="sm90a", emulated=True)
    assert _refused(spills, tools, tmp_path) == set()
    assert {"SPILL", "NO-LOCAL"} <= _refused(dataclasses.replace(spills, emulated=False), tools, tmp_path)
    too_small = dataclasses.replace(spills, smem_bytes=spills.smem_bytes + 128)
    assert _refused(too_small, tools, tmp_path) == {"SMEM"}, (
        "what does not depend on the instructions is held all the same"
    )


def test_results_are_reused_until_source_or_options_change(tools: Toolbox, tmp_path: Path) -> None:
    def lines(kernel: Kernel, tools: Toolbox) -> str:
        said: list[str] = []
        results, failures = measure_all([kernel], tools, tmp_path / "out", 1, said.append)
        assert not failures
        seen.append(results[kernel])
        return said[0]

    seen: list[Measured] = []
    kernel = _kernel(tmp_path)
    assert lines(kernel, tools).startswith("0 kernels unchanged")
    assert lines(kernel, tools).startswith("1 kernels unchanged")
    assert seen[0] == seen[1]
    assert lines(kernel, dataclasses.replace(tools, options=(*tools.options, "-lineinfo"))).startswith("0 kernels")
    _kernel(tmp_path, LOCAL_ARRAY)
    assert lines(kernel, tools).startswith("0 kernels unchanged")
    assert seen[-1].resources.stack > 0


def test_cubins_that_are_taken_apart_together_are_as_alone(tools: Toolbox, tmp_path: Path) -> None:
    """One that does not compile is not in anybody's place."""
    changes = ({}, {"ASSERT": GOOD["ASSERT"].replace("2048", "4096")}, {"PRODUCTS": "3"})
    kernels = []
    for number, changed in enumerate(changes):
        kernel = _kernel(tmp_path, changed)
        kernels.append(dataclasses.replace(kernel, source=kernel.source.rename(tmp_path / f"kernel{number}.cu")))
    first, broken, third = compiling.measure([[k] for k in kernels], tools, tmp_path / "together")
    assert isinstance(broken, CompileError) and "as the manifest says" in str(broken)
    for kernel, found in ((kernels[0], first), (kernels[2], third)):
        assert found == measure([kernel], tools, tmp_path / "alone")
    assert first != third


def test_a_kernel_that_does_not_compile_is_a_failure(tools: Toolbox, tmp_path: Path) -> None:
    kernel = _kernel(tmp_path, {"ASSERT": GOOD["ASSERT"].replace("2048", "4096")})
    results, failures = measure_all([kernel], tools, tmp_path / "out", 1, lambda line: None)
    assert results == {}
    assert [f.gate for f in failures] == ["COMPILE"] and "as the manifest says" in failures[0].message


# ---- parsers --------------------------------------------------------------------------------------------------------

PTXAS = """ptxas info    : Compiling entry function 'kernel' for 'sm_89'
ptxas info    : Function properties for kernel
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 256 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for helper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
"""


def test_the_report_of_ptxas_is_understood() -> None:
    expected = Resources(registers=40, stack=24, spill_stores=5, spill_loads=10, static_smem=256)
    assert parse_resources(PTXAS) == expected
    for text in ("", PTXAS + PTXAS, PTXAS.splitlines()[0]):
        with pytest.raises(CompileError, match="expected 1"):
            parse_resources(text)


# An outer loop around the main loop, which holds a block to be skipped, and behind both a block that returns into it.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0020*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*0030*/               @P0 BRA 0x60 ;
        /*0040*/              @!P1 MUFU.EX2 R0, R0 ;
        /*0050*/                   BRA.DIV ~URZ, 0xb0 ;
        /*0060*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*0070*/                   LDGSTS.E.128 [R0], [R2.64] ;
        /*0080*/              @!P2 BRA 0x20 ;
        /*0090*/               @P3 BRA 0x10 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   STL [R1], R0 ;
        /*00c0*/                   BRA 0x70 ;
        /*00d0*/                   BRA 0xd0;
        /*00e0*/                   NOP;
        /*00f0*/                   NOP;
"""


def test_the_main_loop_is_the_innermost_around_most_products() -> None:
    # The outer loop holds one product more; without it both hold two, and the inner one is the shorter.
    outer = listing(SASS, "kernel").loop
    assert outer is not None and outer.counts["HMMA"] == 1
    inner = listing(SASS.replace("HMMA.16816.F32", "FFMA"), "kernel")
    assert inner.loop == Loop(
        counts={"BRA": 3, "LDGSTS": 1, "MUFU": 1, "QMMA": 2}, path={"BRA": 2, "LDGSTS": 1, "QMMA": 2}
    )
    assert inner.code_bytes == 14 * 16  # the padding at the end is no code
    assert inner.counts["STL"] == 1  # in the block behind the loop


# Products of a first tile, a loop whose wait spins behind the kernel's end, and an outer loop over items.
WARPGROUP_SASS = """
        /*0000*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R4, gdesc[UR4], R4 ;
        /*0010*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R4, gdesc[UR4], R4 ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0030*/              @!P1 BRA 0xa0 ;
        /*0040*/                   QGMMA.64x8x32.F32.E4M3.E4M3 R4, gdesc[UR4], R4 ;
        /*0050*/               @P0 BRA 0x70 ;
        /*0060*/                   FADD R0, R0, R4 ;
        /*0070*/               @P2 BRA 0x20 ;
        /*0080*/               @P3 BRA 0x0 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*00b0*/              @!P1 BRA 0xa0 ;
        /*00c0*/                   BRA 0x40 ;
"""


def test_the_loop_of_warpgroup_products_is_the_innermost_with_all_its_blocks() -> None:
    """By addresses the outer loop would win, as it holds more products, and the spin would look like another loop."""
    found = listing(WARPGROUP_SASS, "kernel")
    assert found.counts["QGMMA"] == 3
    assert found.loop == Loop(
        counts={"BRA": 5, "FADD": 1, "QGMMA": 1, "SYNCS": 2}, path={"BRA": 3, "QGMMA": 1, "SYNCS": 1}
    )


def test_the_outer_loop_counts_where_no_other_has_products() -> None:
    loop = listing(WARPGROUP_SASS.replace("@P2 BRA 0x20", "@P2 NOP"), "kernel").loop
    assert loop is not None and loop.counts["QGMMA"] == 3


def test_what_ptxas_says_of_lost_performance_is_kept() -> None:
    said = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to it"
    other = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 3116"
    assert parse_resources(f"{PTXAS}{said}\n{other}\n").advice == (said,)
    assert parse_resources(PTXAS).advice == ()


def test_what_ptxas_says_of_a_kernel_stands_before_it() -> None:
    """Of a source with several, the advice goes to the kernel that it names, and what names none to all."""
    said = "ptxas info    : (C7511) Potential Performance Loss: products serialised in the function '_Z9attentionE'"
    text = f"{said}\n{PTXAS}{PTXAS}".replace("'kernel'", "'_Z9attentionE'", 1).replace("'kernel'", "'_Z4planE'", 1)
    assert parse_resources(text, "9attentionE").advice == (said,)
    assert parse_resources(text, "4planE").advice == ()
    assert parse_resources(text.replace("_Z9attentionE'", "it'", 1), "4planE").advice == ()


def test_a_loop_without_products_is_no_main_loop() -> None:
    assert listing(SASS.replace("QMMA.16832", "FADD").replace("HMMA", "FADD"), "kernel").loop is None


def test_a_disassembly_that_is_not_understood_is_refused() -> None:
    with pytest.raises(SassError, match="/\\*0030\\*/ of kernel"):
        listing(SASS.replace("@P0 BRA 0x60 ;", "@P0 bra ;"), "kernel")
    with pytest.raises(SassError, match="/\\*00f0\\*/ of kernel"):
        listing(SASS.replace("        /*00f0*/                   NOP;\n", ";"), "kernel")
    with pytest.raises(SassError, match="behind /\\*0100\\*/"):
        functions(SASS + "        /*0100*/                   NOP;", [("kernel", 0x100)])
    with pytest.raises(SassError, match="no instructions"):
        listing("", "kernel")


def test_places_of_a_second_function_are_its_own() -> None:
    """Functions of a cubin, and cubins, follow each other: a branch leads to an address of them all."""
    shifted = re.sub(
        r"(/\*)(\w+)(?=\*/)|(BRA(?:\.DIV ~URZ,)? 0x)(\w+)",
        lambda m: f"{m[1] or m[3]}{int(m[2] or m[4], 16) + 0x100:04x}",
        SASS,
    )
    first, second = functions(SASS + shifted, [("first", 0x100), ("second", 0x100)])
    assert dataclasses.replace(second, name="first") == first
    both = listing(SASS + shifted, "first", "second")
    assert both.code_bytes == 2 * 14 * 16 and both.loop == listing(SASS, "kernel").loop


@pytest.mark.parametrize("profile", ["ci", "release"])
@pytest.mark.parametrize("arch", TARGETS)
def test_reports_are_of_the_options_of_the_build(arch: str, profile: str) -> None:
    """Numbers of other options are not compared, so that a baseline of them would hold nothing."""
    text = (ROOT / "generated" / "gates" / f"{arch}_{profile}.txt").read_text()
    compilers = re.findall(r"^# compiler: nvcc [0-9.]+ (.*)$", text, re.M)
    assert compilers == [" ".join(cubins.OPTIONS)] * len(report.split(text))


# ---- the cubins of a build ----


def test_the_cubins_of_a_build_are_read_and_nothing_is_compiled(
    tools: Toolbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, build = _kernel(tmp_path), tmp_path / "build"
    cubins.make(job_of(kernel), tools, build)
    monkeypatch.setattr(cubins, "run_nvcc", lambda *_: pytest.fail("something is compiled"))
    said: list[str] = []
    results, failures = measure_all([kernel], tools, tmp_path / "out", 1, said.append, built=build)
    assert not failures and check(kernel, results[kernel]) == [] and "1 to read from 1 files" in said[0]
    assert measure_all([kernel], tools, tmp_path / "out", 1, said.append, built=build) == (results, [])
    assert said[-1].startswith("1 kernels unchanged")


@pytest.mark.parametrize("lost", ["source", "options", "cubin", "log"])
def test_a_cubin_that_is_not_what_the_build_would_make_now_is_refused(
    lost: str, tools: Toolbox, tmp_path: Path
) -> None:
    """Also where its numbers are known: what ships is gone, or another."""
    kernel, build, out = _kernel(tmp_path), tmp_path / "build", tmp_path / "out"
    cubin = cubins.make(job_of(kernel), tools, build)
    assert measure_all([kernel], tools, out, 1, lambda line: None, built=build)[1] == []
    if lost == "source":
        _kernel(tmp_path, LOCAL_ARRAY)
    elif lost == "options":
        tools = dataclasses.replace(tools, options=(*tools.options, "-lineinfo"))
    else:
        cubin.path.with_suffix(f".{lost}").unlink()
    results, failures = measure_all([kernel], tools, out, 1, lambda line: None, built=build)
    assert results == {} and [f.gate for f in failures] == ["COMPILE"]
    assert "has no cubin of this source" in failures[0].message


# ---- the digest of the machine code ----


def test_a_digest_stays_with_names_and_changes_with_the_code(tools: Toolbox, tmp_path: Path) -> None:
    """Another name of the file and of the kernel, and another constant in one instruction."""

    def digest(name: str, changes: dict[str, str], old: str = "", new: str = "") -> str:
        folder = tmp_path / name
        folder.mkdir()
        kernel = _kernel(folder, changes)
        renamed = folder / f"{name}.cu"
        renamed.write_text(kernel.source.read_text().replace(old, new) if old else kernel.source.read_text())
        return measure([dataclasses.replace(kernel, source=renamed)], tools, folder)[0].code

    first = digest("first", {})
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert digest("second", {}, " attention(", " something_else(") == first
    assert digest("third", {"AFTER": "o[512] = 1.f;"}) != digest("fourth", {"AFTER": "o[512] = 2.f;"}) != first


def test_a_digest_is_refused_of_what_is_no_cubin(tools: Toolbox, tmp_path: Path) -> None:
    measure([_kernel(tmp_path)], tools, tmp_path)
    cubin = (tmp_path / "sm89" / "kernel.cubin").read_bytes()
    assert len(machine.digest(cubin, "attention")) == machine.DIGITS
    with pytest.raises(machine.MachineError, match="no code of missing"):
        machine.digest(cubin, "missing")
    for broken in (b"", b"text", cubin[:200]):
        with pytest.raises(machine.MachineError, match="ELF|sections"):
            machine.digest(broken)


# ---- occupancy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "registers", "smem", "threads", "ctas"),
    [
        ("sm89", 255, 16_384, 128, 2),
        ("sm89", 168, 16_384, 128, 3),
        ("sm89", 169, 16_384, 128, 2),  # 65,536 / (169 * 128) = 3.03, but a warp takes 22 units of 256
        ("sm89", 128, 16_384, 256, 2),
        ("sm89", 32, 32_000, 128, 3),
        ("sm89", 32, 33_200, 128, 2),  # three are 99,600 bytes; 1 KiB each and 128-byte units make them 102,912
        ("sm89", 32, 1_024, 128, 12),  # 48 warps
        ("sm90a", 32, 1_024, 128, 16),  # 64 warps
        ("sm89", 32, 128, 32, 24),  # blocks an SM
        ("sm89", 32, 101_377, 128, 0),
    ],
)
def test_occupancy(target: str, registers: int, smem: int, threads: int, ctas: int) -> None:
    assert ctas_per_sm(target, registers=registers, smem_bytes=smem, threads=threads) == ctas


# ---- the report as a baseline ---------------------------------------------------------------------------------------


def _measured(registers: int = 100, code_bytes: int = 32_000, code: str = "0123456789ab") -> Measured:
    loop = Loop(counts={"BAR": 1, "FFMA": 5, "LDGSTS": 2, "QMMA": 2}, path={"FFMA": 3, "QMMA": 2})
    return Measured(
        resources=Resources(registers=registers, stack=0, spill_stores=0, spill_loads=0, static_smem=0),
        listing=Listing(code_bytes=code_bytes, counts=loop.counts, loop=loop),
        storage_bytes=2048,
        code=code,
        seconds=1.0,
        peak_mib=100,
    )


def _numbers(kernel: Kernel, measured: Measured) -> dict[str, report.Row]:
    compiler, numbers = report.parse(report.render("sm89", "ci", "nvcc 13.0.88 -O3", {kernel: measured}))
    assert compiler == "nvcc 13.0.88 -O3"
    return numbers


def test_gates_are_counted_by_the_kernels_that_they_apply_to(tmp_path: Path) -> None:
    """A failure of one kernel, one that is emulated, and one of another family."""
    names = ("a", "b", "c")
    kernels = [_kernel(tmp_path, id=name, emulated=name == "b") for name in names] + [_hopper(tmp_path, id="d")]
    failures = [Failure(gate="SPILL", kernel="a", target="sm89", message="spills")]
    text = gate_counts(kernels, failures)
    assert "SPILL 2 of 3" in text and "SMEM 4 of 4" in text and "QMMA-COUNT 2 of 2" in text and "TMA 1 of 1" in text


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    kernel = _kernel(tmp_path)
    numbers = _numbers(kernel, _measured())
    assert list(numbers) == ["kernel"] and numbers["kernel"]["regs"] == 100 and numbers["kernel"]["path/mma"] == 2.5
    assert report.compare(numbers, numbers) == []
    with pytest.raises(ValueError, match="not a report"):
        report.parse("# something else\n")


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (_measured(registers=101), ["worse: kernel: regs 100 -> 101"]),
        (_measured(registers=99), ["better: kernel: regs 100 -> 99"]),
        (_measured(registers=169), ["worse: kernel: regs 100 -> 169", "worse: kernel: ctas 4 -> 2"]),
        (_measured(code_bytes=33_600), []),
        (_measured(code_bytes=33_616), ["worse: kernel: code 32000 -> 33616"]),
        (_measured(code_bytes=30_000), ["better: kernel: code 32000 -> 30000"]),
        (_measured(code="ba9876543210"), ["worse: kernel: machine 0123456789ab -> ba9876543210"]),
    ],
)
def test_changes_are_reported_in_both_directions(measured: Measured, expected: list[str], tmp_path: Path) -> None:
    kernel = _kernel(tmp_path)
    assert [str(c) for c in report.compare(_numbers(kernel, _measured()), _numbers(kernel, measured))] == expected


def test_a_report_has_the_columns_of_its_families(tmp_path: Path) -> None:
    ada = _kernel(tmp_path, id="ada", target="sm90a", emulated=True)
    hopper = _kernel(tmp_path, id="hopper", target="sm90a", family="sm90a")
    texts = {
        names: report.render("sm90a", "ci", "nvcc 13.0.88 -O3", dict.fromkeys(kernels, _measured()))
        for names, kernels in {"ada": [ada], "hopper": [hopper], "both": [ada, hopper]}.items()
    }
    columns = {names: set(next(iter(report.parse(text)[1].values()))) for names, text in texts.items()}
    assert "l.qmma" in columns["ada"] and "l.qgmma" not in columns["ada"]
    assert "l.qgmma" in columns["hopper"] and "l.qmma" not in columns["hopper"]
    assert columns["both"] == columns["ada"] | columns["hopper"]
    assert ["is emulated on this target" in texts[x] for x in ("ada", "hopper", "both")] == [True, False, True]
    assert report.compare(*(report.parse(texts["both"])[1],) * 2) == []


def test_kernels_that_come_or_go_are_changes(tmp_path: Path) -> None:
    numbers = _numbers(_kernel(tmp_path), _measured())
    assert [str(c) for c in report.compare({}, numbers)] == ["worse: kernel: is new"]
    assert [str(c) for c in report.compare(numbers, {})] == ["worse: kernel: is gone"]


def test_the_command_writes_and_then_holds_a_baseline(tools: Toolbox, tmp_path: Path) -> None:
    """From the real generator: the first kernel of the smallest profile that has no other kernel beside it."""
    variant = next(v for v in select().emitted if profile_of(v) == "dev" and not v.listed)
    baseline = tmp_path / "sm89.txt"
    arguments = ["gates", "--arch", "sm89", "--only", variant.id, "--out", str(tmp_path / "out"), "--jobs", "1"]

    def gates(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / "{arch}.txt"), *more])
        return result.exit_code, result.output

    status, output = gates("--check")
    assert status == 1 and "does not exist" in output
    status, output = gates()
    assert status == 0 and baseline.is_file(), output
    assert "sm89: gates passed: SPILL 1 of 1, NO-LOCAL 1 of 1, SMEM 1 of 1" in output
    written = baseline.read_text()
    status, output = gates("--check")
    assert status == 0 and "2 kernels unchanged" in output, output

    row = next(line for line in written.splitlines() if line.startswith(variant.id))
    fewer = row.replace(f" {row.split()[1]} ", " 16 ", 1)
    baseline.write_text(written.replace(row, fewer))
    status, output = gates("--check")
    assert status == 1 and f"worse: {variant.id}: regs 16 -> " in output
    baseline.write_text(written.replace(row, fewer).replace("# compiler: nvcc ", "# compiler: nvcc 1"))
    status, output = gates("--check")
    assert status == 0 and "the numbers are not compared" in output


@pytest.mark.parametrize("arch", TARGETS)
def test_the_kernels_of_a_report_do_not_depend_on_other_targets(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or `--check` with one target would miss kernels that stand in a report written with all."""
    asked: list[dict[str, tuple[Variant, ...]]] = []
    monkeypatch.setattr("codegen.gates.run.run", lambda chosen, **options: not asked.append(chosen))
    for options in ([], ["--arch", arch]):
        assert CliRunner().invoke(main, ["gates", "--profile", "ci", *options]).exit_code == 0
    both, one = asked
    assert set(both) == set(TARGETS) and set(one) == {arch} and one[arch] == both[arch]
    assert {v.family for v in one[arch]} >= {family_of(arch).name}


def test_a_named_kernel_is_gated_where_it_is_emulated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, tuple[Variant, ...]]] = []
    monkeypatch.setattr("codegen.gates.run.run", lambda chosen, **options: not asked.append(chosen))
    v = next(v for v in select().emitted if v.family == "sm89" and v.kind is Kind.DIAG)
    assert CliRunner().invoke(main, ["gates", "--only", v.id]).exit_code == 0
    assert asked == [{"sm89": (v,), "sm90a": (v,)}]


def test_check_of_a_selection_needs_its_own_baseline() -> None:
    result = CliRunner().invoke(main, ["gates", "--filter", "head_dim=32", "--check"])
    assert result.exit_code == 1 and "--report" in result.output


@pytest.mark.edge(59)
@pytest.mark.parametrize("arch", TARGETS)
def test_the_release_report_was_read_from_the_committed_sources(arch: str, tmp_path: Path) -> None:
    """`make test` compiles the ci profile only; README rests on the release report, so it must not go stale unseen."""
    native = {v for v in select().emitted if v.family == family_of(arch).name}
    sources = sorted({k.source for k in render_sources({arch: tuple(native)}, tmp_path)})
    report = (ROOT / "generated" / "gates" / f"{arch}_release.txt").read_text()
    assert f"# sources: {sources_digest(sources)}\n" in report, (
        f"run `python -m codegen gates --arch {arch} --profile release` and commit generated/gates/{arch}_release.txt"
    )
