"""The gates on the kernels that quantise and pack: each must refuse a source that was written to fail it.

Regressions these catch: a row of the report that is another kernel's of the same source, a spill that stands in one
form and is looked for in another, a load that became narrow or is done twice, a run of the packs alone that takes the
rest of the report with it, a report of other sources than the committed ones.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from taken_apart import measure

from codegen.arch import TARGETS
from codegen.cli import main
from codegen.gates import compile as compiling
from codegen.gates import packs as packing
from codegen.gates import report
from codegen.gates.command import PARTS
from codegen.gates.compile import measure_all, parse_resources
from codegen.gates.rules import GATES, check
from codegen.gates.sass import SassError, functions, parse
from codegen.gates.subject import Kernel, Listing, Measured, Resources
from codegen.gates.toolbox import Toolbox, ToolboxError, open_toolbox
from codegen.pack import Pack, Source, packs_of
from codegen.profiles import of_profile
from codegen.select import select
from codegen.table import built
from scripts.cubins import ROOT, CompileError

PACK = Pack(head_dim=64, key_block=128, source=Source.BF16)

# A pack in small: two forms of one function, which read two chunks and a maximum. The words in capitals are replaced.
SOURCE = """
#include <cstdint>
struct Stage { static constexpr int kBytes = SIZE; };
ASSERT
__device__ __forceinline__ void product(float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%4,%4,%4},{%4,%4},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(threadIdx.x));
}
template <bool kTransform>
__global__ void __launch_bounds__(256, BOUND) pack(const uint4* __restrict__ x, const float* amax, float* o, int n) {
  extern __shared__ __align__(16) float stage[];
  __shared__ float inverse[256];
  const uint4 a = x[threadIdx.x], b = x[threadIdx.x + 256];
  float c[4] = {*amax, 1.f, 2.f, 3.f};
  stage[threadIdx.x] = __uint_as_float(a.x ^ b.y ^ a.z ^ b.w ^ a.y ^ b.x ^ a.w ^ b.z);
  inverse[threadIdx.x] = c[0];
  if (kTransform) {
    BEFORE
    for (int i = 0; i < n; ++i) {
      INSIDE
      __syncthreads();
    }
    AFTER
  }
  __syncthreads();
  o[threadIdx.x] = stage[255 - threadIdx.x] + inverse[(threadIdx.x + 1) % 256] + c[1];
}
template __global__ void pack<false>(const uint4*, const float*, float*, int);
template __global__ void pack<true>(const uint4*, const float*, float*, int);
"""
GOOD = {
    "SIZE": "4096",
    "ASSERT": "static_assert(Stage::kBytes == 4096);",
    "BOUND": "2",
    "BEFORE": "",
    "INSIDE": "",
    "AFTER": "",
}
# 96 sums that live across the loop do not fit the 64 registers of 4 x 256 threads; nor 150 the 128 of 2.
SPILLS = {
    "BOUND": "4",
    "BEFORE": "float sums[96]; for (int i = 0; i < 96; ++i) sums[i] = o[256 * i + threadIdx.x + n];",
    "INSIDE": "for (int i = 0; i < 96; ++i) sums[i] = fmaf(sums[i], c[i % 4], sums[(i + 7) % 96]);",
    "AFTER": "for (int i = 0; i < 96; ++i) o[256 * i + threadIdx.x] = sums[i];",
}
REGISTERS = {**{key: text.replace("96", "150") for key, text in SPILLS.items()}, "BOUND": "1"}
LOCAL = {
    "BEFORE": "float last[32] = {};",
    "INSIDE": "last[(a.x + i) % 32] += stage[i];",
    "AFTER": "o[threadIdx.x] = last[n % 32];",
}
NARROW = {"BEFORE": "c[1] = x[threadIdx.x + 512 + n].x;"}
TWICE = {"BEFORE": "c[1] = __uint_as_float(x[threadIdx.x + 512 + n].x ^ x[threadIdx.x + 512 + n].w);"}
MATRIX = {"INSIDE": "product(c);", "AFTER": "c[1] += c[2] + c[3];"}
STATIC = {"BEFORE": "__shared__ float beside[64]; beside[threadIdx.x % 64] = c[0];", "AFTER": "o[0] = beside[n % 64];"}

# (name, what differs in the source, what differs in the promise, gates that must refuse it)
BAD: list[tuple[str, dict[str, str], dict[str, Any], set[str]]] = [
    ("spills", SPILLS, {"narrow_loads": 97}, {"SPILL", "NO-LOCAL"}),
    ("local array", LOCAL, {}, {"NO-LOCAL"}),
    ("static shared memory", STATIC, {}, {"SMEM"}),
    ("another stage than counted", {}, {"smem_bytes": 4112}, {"SMEM"}),
    ("no statement of the stage", {"ASSERT": ""}, {}, {"SMEM"}),
    ("more than a block can have", {}, {"smem_limit": 4096}, {"SMEM"}),
    ("too many registers", REGISTERS, {"narrow_loads": 151}, {"OCCUPANCY"}),
    ("a load of 4 bytes", NARROW, {}, {"LOADS"}),
    ("a chunk more", TWICE, {}, {"LOADS"}),
    ("a product", MATRIX, {}, {"NO-MATRIX"}),
]


@pytest.fixture(scope="module")
def tools() -> Toolbox:
    try:
        return open_toolbox()
    except ToolboxError as error:
        pytest.skip(f"needs a compiler: {error}")


def _kernel(folder: Path, changes: dict[str, str] | None = None, **promise: Any) -> Kernel:
    """The second form; a promise of the first is made of it by its entry."""
    text = SOURCE
    for word, value in {**GOOD, **(changes or {})}.items():
        text = text.replace(word, value)
    source = folder / "small.cu"
    source.write_text(text)
    good = Kernel(
        id="small.pack_transform",
        target="sm89",
        family=packing.FAMILY,
        source=source,
        emulated=False,
        head_dim=64,
        threads=256,
        ctas_per_sm=2,
        smem_bytes=4096,
        smem_limit=101_376,
        mma_in_loop=0,
        entry="4packILb1E",
        static_smem=1024,
        wide_loads=2,
        narrow_loads=1,
    )
    return dataclasses.replace(good, **promise)


def _plain(kernel: Kernel) -> Kernel:
    return dataclasses.replace(kernel, id="small.pack", entry="4packILb0E")


def test_good_kernels_of_a_source_pass_every_gate(tools: Toolbox, tmp_path: Path) -> None:
    kernel = _kernel(tmp_path)
    first, second = measured = measure([kernel, _plain(kernel)], tools, tmp_path)
    assert first.code != second.code
    for k, m in zip([kernel, _plain(kernel)], measured, strict=True):
        assert check(k, m) == []
        assert m.listing.wide_loads == 2 and m.listing.counts["LDG"] == 3 and m.resources.static_smem == 1024


@pytest.mark.parametrize(("changes", "promise", "gates"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_kernel_is_refused_and_the_other_form_is_not(
    changes: dict[str, str], promise: dict[str, Any], gates: set[str], tools: Toolbox, tmp_path: Path
) -> None:
    """Of one compilation: what is wrong with one form must not be found in the other's row."""
    bad = _kernel(tmp_path, changes, **promise)
    good = _plain(_kernel(tmp_path, changes))
    of_bad, of_good = measure([bad, good], tools, tmp_path)
    assert {failure.gate for failure in check(bad, of_bad)} == gates
    if "ASSERT" not in changes:
        assert check(good, of_good) == []


def test_every_gate_of_packs_has_a_kernel_that_fails_it() -> None:
    assert set().union(*(b[3] for b in BAD)) == {g.name for g in GATES if packing.FAMILY in g.families}


def test_declared_words_may_go_through_local_memory_and_no_more(tools: Toolbox, tmp_path: Path) -> None:
    kernel = _kernel(tmp_path, SPILLS, narrow_loads=97)
    (m,) = measure([kernel], tools, tmp_path)
    words = max(m.resources.spill_loads, m.resources.spill_stores) // 4
    assert check(dataclasses.replace(kernel, spilled=words), m) == []
    assert {f.gate for f in check(dataclasses.replace(kernel, spilled=words - 1), m)} >= {"SPILL"}


def test_a_source_is_compiled_once_for_all_its_kernels(tools: Toolbox, tmp_path: Path) -> None:
    kernels = [kernel := _kernel(tmp_path), _plain(kernel)]
    said: list[str] = []
    first, failures = measure_all(kernels, tools, tmp_path / "out", 1, said.append)
    assert not failures and list(first) == kernels and len(said) == 2 and "2 to compile from 1 files" in said[0]
    assert measure_all(kernels, tools, tmp_path / "out", 1, said.append) == (first, [])
    assert said[2].startswith("2 kernels unchanged")
    _kernel(tmp_path, {"ASSERT": GOOD["ASSERT"].replace("4096", "8192")})
    assert [f.gate for f in measure_all(kernels, tools, tmp_path / "out", 1, said.append)[1]] == ["COMPILE"] * 2


def _ptxas(entry: str, registers: int) -> str:
    return (
        f"ptxas info    : Compiling entry function '{entry}' for 'sm_89'\n"
        f"ptxas info    : Function properties for {entry}\n"
        "    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 256 bytes smem\n"
    )


def test_the_report_of_ptxas_is_read_by_entry() -> None:
    text = "ptxas info    : 24 bytes gmem\n" + _ptxas("_Z4packILb0EEvv", 40) + _ptxas("_Z4packILb1EEvv", 60)
    expected = Resources(registers=60, stack=8, spill_stores=4, spill_loads=8, static_smem=256)
    assert parse_resources(text, "4packILb1E") == expected
    for entry in ("4packILb2E", "4pack", ""):
        with pytest.raises(CompileError, match="expected 1"):
            parse_resources(text, entry)


def test_a_disassembly_is_read_by_entry() -> None:
    text = """
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0010*/                   LDG.E R4, [R2.64] ;
        /*0020*/                   EXIT ;
        /*0030*/              @!P0 LDG.E.64 R4, [R2.64] ;
        /*0040*/                   EXIT ;
"""
    code = functions(text, [("_Z4amaxILb0EEvv", 0x30), ("_Z4packILb0EEvv", 0x20)])
    first, second = parse(code, "4amaxILb0E"), parse(code, "4packILb0E")
    assert (first.counts, first.wide_loads) == ({"EXIT": 1, "LDG": 2}, 1)
    assert (second.counts, second.wide_loads) == ({"EXIT": 1, "LDG": 1}, 0)
    with pytest.raises(SassError, match="no instructions of 4packILb1E"):
        parse(code, "4packILb1E")


# ---- the report -----------------------------------------------------------------------------------------------------


def _measured(registers: int) -> Measured:
    return Measured(
        resources=Resources(registers=registers, stack=0, spill_stores=0, spill_loads=0, static_smem=1024),
        listing=Listing(code_bytes=32_000, counts={"LDG": 3, "SHFL": 7}, loop=None, wide_loads=2),
        storage_bytes=4096,
        code="0123456789ab",
        seconds=1.0,
        peak_mib=100,
    )


def _part(folder: Path, registers: int, family: str) -> str:
    kernel = _kernel(folder, family=family, id=f"a_kernel_of_{family}")
    return report.render("sm89", "ci", "nvcc 13.0.88 -O3", {kernel: _measured(registers)})


def test_parts_of_a_report_are_taken_apart_and_put_together(tmp_path: Path) -> None:
    """Or a run of the packs alone would lose the other rows, or leave the old ones of the packs."""
    parts = {"attention": _part(tmp_path, 100, "sm89"), "pack": _part(tmp_path, 50, "pack")}
    text = report.join(parts)
    assert report.split(text) == parts
    assert report.join({**report.split(text), "pack": _part(tmp_path, 60, "pack")}) == text.replace(" 50 ", " 60 ")
    assert report.split(parts["pack"]) == {"pack": parts["pack"]}
    _, numbers = report.parse(parts["pack"])
    row = numbers["a_kernel_of_pack"]
    assert (row["regs"], row["ldg"], row["ldg.128"], row["shfl"]) == (50, 3, 2, 7)
    assert not {"loop", "qmma", "path"} & set(row)
    assert [str(c) for c in report.compare(numbers, report.parse(_part(tmp_path, 60, "pack"))[1])] == [
        "worse: a_kernel_of_pack: regs 50 -> 60"
    ]


def test_the_packs_alone_replace_their_part_of_a_report(tools: Toolbox, tmp_path: Path) -> None:
    """From the real generator: the packs of one variant."""
    variant = next(v for v in select().emitted if v.head_dim == 32)
    committed = tmp_path / "sm89.txt"
    attention = _part(tmp_path, 100, "sm89")
    committed.write_text(attention)
    arguments = ["gates", "--part", "packs", "--arch", "sm89", "--only", variant.id, "--out", str(tmp_path / "out")]

    def gates(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [*arguments, "--jobs", "1", "--report", str(tmp_path / "{arch}.txt"), *more])
        return result.exit_code, result.output

    status, output = gates("--check")
    assert status == 1 and "has no part about pack kernels" in output, output
    status, output = gates()
    assert status == 0 and "LOADS 13 of 13" in output and "13 kernels unchanged" in output, output
    parts = report.split(committed.read_text())
    assert parts["attention"] == attention
    assert set(report.parse(parts["pack"])[1]) == {
        f"{pack.id}.{form.name}" for pack in packs_of([variant]) for form in packing.forms(pack, "sm89")
    }
    status, output = gates("--check")
    assert status == 0 and "is true of this compilation: 13 pack kernels" in output, output


def test_whole_profiles_hold_their_packs_and_selections_hold_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr("codegen.gates.run.run", lambda chosen, **options: not asked.append((chosen, options["packs"])))
    arguments = ["gates", "--arch", "sm89", "--profile", "dev"]
    for options in ([], ["--part", "packs"], ["--filter", "head_dim=64"]):
        assert CliRunner().invoke(main, [*arguments, *options]).exit_code == 0
    (variants, packs), (none, alone), (some, no_packs) = asked
    assert set(variants) == set(some) == {"sm89"} and packs == {"sm89": packs_of(variants["sm89"])} != {"sm89": ()}
    assert (none, alone, no_packs) == ({}, packs, {})


def test_parts_of_whole_profiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run of one part would compile another, and a selection would replace the rows of a whole profile."""
    asked: list[dict[str, bool]] = []

    def run(chosen: dict[str, Any], **options: Any) -> bool:
        asked.append({"attention": bool(chosen)} | {part: bool(options[part]) for part in PARTS})
        return True

    monkeypatch.setattr("codegen.gates.run.run", run)
    for parts in ([], *([part] for part in PARTS), list(PARTS[1:])):
        arguments = ["gates", "--profile", "dev", *(word for part in parts for word in ("--part", part))]
        assert CliRunner().invoke(main, arguments).exit_code == 0
        assert asked.pop() == {"attention": not parts} | {part: part in parts or not parts for part in PARTS}
    for part in PARTS[1:]:
        refused = CliRunner().invoke(main, ["gates", "--part", "packs", "--part", part, "--filter", "head_dim=64"])
        assert refused.exit_code == 1 and f"--part {part} goes with whole profiles" in refused.output
    assert CliRunner().invoke(main, ["gates", "--part", "attention"]).exit_code == 2
    assert asked == []


@functools.cache
def _packs(arch: str, profile: str) -> tuple[Pack, ...]:
    return packs_of(built(of_profile(select().emitted, profile), (arch,), False))


@pytest.mark.edge(59)
@pytest.mark.parametrize("profile", ["ci", "release"])
@pytest.mark.parametrize("arch", TARGETS)
def test_the_reports_were_read_from_the_committed_packs(arch: str, profile: str, tmp_path: Path) -> None:
    """Every form of every pack of a build for the target, from the sources and headers as they are committed."""
    packs = _packs(arch, profile)
    text = report.split((ROOT / "generated" / "gates" / f"{arch}_{profile}.txt").read_text())["pack"]
    forms = {f"{p.id}.{form.name}" for p in packs for form in packing.forms(p, arch)}
    delivered = {f"{p.id}.deliver" for p in packs if p.delivers and arch == "sm90a"}
    assert set(report.parse(text)[1]) == forms | delivered
    # In the order of the rows, which is that of the ids.
    sources = list(dict.fromkeys(k.source for k in packing.render({arch: packs}, tmp_path)))
    assert f"# sources: {report.sources_digest(sources)}\n" in text, (
        f"run `python -m codegen gates --part packs --arch {arch} --profile {profile}` and commit generated/gates/"
    )


def test_the_kernel_that_hands_over_is_one_of_sm90a(tmp_path: Path) -> None:
    """Of head_dim 64 and 128, with the shared memory that the source states of it and not that of the other four."""
    narrow = Pack(head_dim=96, key_block=128, source=Source.BF16)
    copies = dataclasses.replace(PACK, source=Source.FP8)
    assert [f.name for f in packing.forms(copies, "sm90a")] == ["pack", "pack_ragged", "pack_gather"]
    assert [f.name for f in packing.forms(copies, "sm89")] == ["pack", "pack_ragged", "pack_gather"]
    kernels = packing.render({"sm89": (PACK,), "sm90a": (PACK, narrow)}, tmp_path)
    (kernel,) = (k for k in kernels if k.id.endswith(".deliver"))
    assert (kernel.id, kernel.target, len(kernels)) == (f"{PACK.id}.deliver", "sm90a", 3 * (len(packing.FORMS) + 1) + 1)
    ragged = {k.id for k in kernels if k.id.endswith(".pack_ragged") and k.target == "sm90a"}
    assert ragged == {f"{PACK.id}.pack_ragged", f"{narrow.id}.pack_ragged"}
    # By hand: 2 blocks of 128 x 64 in 16 bits, 2 in 8, 8 units, 2 maxima for 4 warps, 12 barriers.
    assert kernel.smem_bytes == PACK.delivery_bytes == 49152 + 1024
    assert (kernel.threads, kernel.ctas_per_sm) == (128 + 128, 3)
    stated = kernel.source.read_text()
    assert compiling._storage(stated, kernel.storage) == kernel.smem_bytes
    assert compiling._storage(stated, "") == PACK.stage_bytes
    assert compiling._storage(stated, "sizeof(Another)") is None


def test_what_is_counted_of_a_pack() -> None:
    """By hand for head_dim 64: 4 lanes a row, 64 rows at a time, 2 chunks a lane."""
    plain, rotated = (next(f for f in packing.FORMS if f.name == name) for name in ("pack", "pack_transform"))
    assert (packing.wide_loads(PACK, plain), packing.wide_loads(PACK, rotated)) == (2 * 2, 2 * 2 + 2)
    assert (packing.narrow_loads(PACK, plain), packing.narrow_loads(PACK, rotated)) == (2, 4)
    copies = dataclasses.replace(PACK, source=Source.FP8)  # whose chunks are 16 elements, so 32 rows are 2 of 128
    gather = next(f for f in packing.forms(copies, "sm90a") if f.gathers)
    assert (packing.wide_loads(copies, gather), packing.narrow_loads(copies, gather)) == (2, 8 + 2 * 2)
    assert (packing.static_smem(PACK, plain), packing.static_smem(PACK, rotated)) == (1024 + 32, 1024 + 32 + 256)
    assert rotated.entry(PACK) == "18pack_d64_n128_bf16ILb1E"
