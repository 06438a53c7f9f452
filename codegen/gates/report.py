"""The committed report: one line a kernel, which is also the baseline that later numbers are held to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from codegen.gates.decodes import FAMILY as DECODE
from codegen.gates.decodes import WIDE
from codegen.gates.packs import FAMILY as PACK
from codegen.gates.residents import FAMILY as RESIDENT
from codegen.gates.rules import applicable, check, occupancy, smem_bytes
from codegen.gates.sass import MATRIX
from codegen.gates.subject import Kernel, Measured
from codegen.outputs import APPEND, CUT, ROUTE
from scripts.cubins import INCLUDE, code_of, digest_of, own_headers

# The parts of a report, and how the first line of each begins.
PARTS = {
    "attention": "# Compiled code of",
    PACK: "# Kernels that quantise and pack, of",
    DECODE: "# Kernels of decode, of",
    RESIDENT: "# Kernels that keep K and V in shared memory, of",
}
ATTENTION = ("sm89", "sm90a")
LOOPS = (*ATTENTION, DECODE, WIDE, RESIDENT)
CODE_TOLERANCE = 0.05  # of the code size; below it a change is scheduling and padding


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the report, or a word.

    `better`: -1 less is better, +1 more is, 0 neither (a promise of the manifest). Columns without `compared` follow
    from others. `tolerance` is a fraction of the baseline's value. A column stands in parts with kernels of its
    families.
    """

    name: str
    value: Callable[[Kernel, Measured], int | float | str]
    better: int = -1
    tolerance: float = 0.0
    compared: bool = True
    families: tuple[str, ...] = (*ATTENTION, PACK, DECODE, WIDE, CUT, APPEND, ROUTE, RESIDENT)


def _count(opcode: str) -> Callable[[Kernel, Measured], int]:
    return lambda k, m: m.listing.counts.get(opcode, 0)


def _loop(opcode: str) -> Callable[[Kernel, Measured], int]:
    return lambda k, m: m.listing.loop.counts.get(opcode, 0) if m.listing.loop else 0


def _path(opcode: str) -> Callable[[Kernel, Measured], int]:
    return lambda k, m: m.listing.loop.path.get(opcode, 0) if m.listing.loop else 0


def _whole_loop(k: Kernel, m: Measured) -> int:
    return sum(m.listing.loop.counts.values()) if m.listing.loop else 0


def _whole_path(k: Kernel, m: Measured) -> int:
    return sum(m.listing.loop.path.values()) if m.listing.loop else 0


def _per_matrix(k: Kernel, m: Measured) -> float:
    if m.listing.loop is None:
        return 0.0
    return sum(m.listing.loop.path.values()) / sum(m.listing.loop.counts.get(x, 0) for x in MATRIX)


COLUMNS = (
    Column(name="regs", value=lambda k, m: m.resources.registers),
    Column(name="spill", value=lambda k, m: m.resources.spill_stores + m.resources.spill_loads),
    Column(name="stack", value=lambda k, m: m.resources.stack),
    Column(name="smem", value=smem_bytes),
    Column(name="ctas", value=occupancy, better=1),
    Column(name="asked", value=lambda k, m: k.ctas_per_sm, better=0),
    Column(name="code", value=lambda k, m: m.listing.code_bytes, tolerance=CODE_TOLERANCE),
    Column(name="machine", value=lambda k, m: m.code, better=0),
    Column(name="qmma", value=_count("QMMA"), better=0, families=("sm89",)),
    Column(name="hmma", value=_count("HMMA"), families=("sm89", DECODE)),
    Column(name="hgmma", value=_count("HGMMA"), better=0, families=(WIDE,)),
    Column(name="qgmma", value=_count("QGMMA"), better=0, families=("sm90a", RESIDENT)),
    Column(name="tma", value=_count("UTMALDG"), better=0, families=("sm90a",)),
    Column(name="ldl+stl", value=lambda k, m: m.listing.counts.get("LDL", 0) + m.listing.counts.get("STL", 0)),
    Column(name="loop", value=_whole_loop, families=LOOPS),
    Column(name="l.qmma", value=_loop("QMMA"), better=0, families=("sm89",)),
    Column(name="l.ldgsts", value=_loop("LDGSTS"), families=("sm89", DECODE)),
    Column(name="l.ldsm", value=_loop("LDSM"), families=("sm89", DECODE)),
    Column(name="l.qgmma", value=_loop("QGMMA"), better=0, families=("sm90a", RESIDENT)),
    Column(name="l.wait", value=_loop("WARPGROUP"), families=("sm90a", RESIDENT)),
    Column(name="l.hgmma", value=_loop("HGMMA"), better=0, families=(WIDE,)),
    Column(name="l.mov", value=_loop("MOV"), families=("sm90a",)),
    Column(name="l.mufu", value=_loop("MUFU"), families=LOOPS),
    Column(name="l.bar", value=_loop("BAR"), families=LOOPS),
    Column(name="path", value=_whole_path, families=LOOPS),
    Column(name="p.mufu", value=_path("MUFU"), families=ATTENTION),
    Column(name="path/mma", value=_per_matrix, compared=False, families=ATTENTION),
    Column(name="ldg.128", value=lambda k, m: m.listing.wide_loads, families=(PACK,)),
    Column(name="ldg", value=_count("LDG"), families=(PACK,)),
    Column(name="stg", value=_count("STG"), families=(PACK,)),
    Column(name="lds", value=_count("LDS"), families=(PACK,)),
    Column(name="sts", value=_count("STS"), families=(PACK,)),
    Column(name="shfl", value=_count("SHFL"), families=(PACK,)),
    Column(name="bar", value=_count("BAR"), families=(PACK,)),
    Column(name="all", value=lambda k, m: sum(m.listing.counts.values()), tolerance=CODE_TOLERANCE, families=(PACK,)),
)

LEGEND = """\
# regs: registers a thread. spill, stack: bytes a thread. smem: bytes a block. ctas: blocks an SM by registers, shared
# memory and warps; asked: those of __launch_bounds__. code: bytes. machine: digest of the code, which names of kernels
# and files do not change. qmma, hmma, ldl+stl: instructions in the kernel.
# loop: instructions in the main loop (one KV tile of one warp), and l.*: how many of a kind. Blocks that the compiler
# moved behind the loop are not in it. path: the fewest instructions that an iteration can issue, which leaves out what
# branches can skip (masks, an LSE, loads where no tile follows), but not what is predicated; p.mufu: MUFU among them;
# path/mma: path for each matrix instruction of the loop. A loop inside the main loop counts as one pass of its code.
"""

SM90A_LEGEND = """\
# Warpgroup kernels: regs are those at launch, before warps trade them. qgmma, tma (UTMALDG): instructions in the
# kernel; l.wait: WARPGROUP in the loop (fences and waits), l.mov: copies of registers there. loop is everything in it,
# wherever the compiler put it.
"""

PACK_LEGEND = """\
# Four kernels a 16-bit source: amax raises the maxima of groups larger than a block, pack quantises and packs;
# _transform are those for calls that smooth keys or rotate rows. pack_ragged packs a ragged batch; on sm90a deliver
# hands K and V over. For FP8 pack copies, and pack_gather reads pages. regs: registers a thread. spill, stack: bytes a
# thread. smem: bytes a block, the most of any launch. ctas: blocks an SM by registers, shared memory and warps; asked:
# those that must fit. code: bytes; machine: digest of the code. The rest are instructions in the kernel: ldg.128, with
# LDGSTS, and ldg; all: of any kind.
"""


RESIDENT_LEGEND = """\
# Two kernels a source, by mask. loop is what a warp does for a tile of keys, or for a row tile where there is one tile
# of keys; qgmma: warpgroup products in the kernel; l.wait: WARPGROUP in the loop (fences and waits).
"""

DECODE_LEGEND = """\
# The same words. The loop is a slice of keys of one warp. hmma: products in f16, which e4m3 becomes in registers.
# Units of 64 rows: the loop is a tile of one warpgroup; regs are those at launch, before warps trade them; hgmma: its
# products.
"""


def part_of(family: str) -> str:
    """The part of a report that a kernel stands in."""
    return DECODE if family in (WIDE, CUT, APPEND, ROUTE) else family if family in PARTS else "attention"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A number that is not the baseline's.

    worse: also true for a kernel that appeared or vanished and for a changed promise of the manifest.
    """

    kernel: str
    text: str
    worse: bool

    def __str__(self) -> str:
        return f"{'worse' if self.worse else 'better'}: {self.kernel}: {self.text}"


def _cell(value: int | float | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def sources_digest(sources: list[Path]) -> str:
    """What the numbers were read from, 16 hex digits: the code of the kernels in order and of their headers."""
    digest = hashlib.sha256(digest_of(INCLUDE, own_headers(sources), code_of).encode())
    for source in sources:
        digest.update(code_of(source))
    return digest.hexdigest()[:16]


def render(target: str, profile: str, compiler: str, measured: dict[Kernel, Measured]) -> str:
    """One part of a target's report. `compiler`: its version and options; numbers of another one cannot be compared."""
    kernels = sorted(measured, key=lambda k: k.id)
    families = {k.family for k in kernels}
    (part,) = {part_of(f) for f in families}
    columns = [c for c in COLUMNS if families & set(c.families)]
    rows = [["kernel", *(c.name for c in columns)]]
    rows += [[k.id, *(_cell(c.value(k, measured[k])) for c in columns)] for k in kernels]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    sources = sorted({k.source for k in kernels}, key=lambda path: path.stem)
    lines = [
        f"{PARTS[part]} profile {profile} for {target}, {len(kernels)} kernels.",
        "# Written and checked by `python -m codegen gates`.",
        f"# compiler: {compiler}",
        f"# sources: {sources_digest(sources)}",
        "#",
        f"# Gates, passed by {sum(not check(k, measured[k]) for k in kernels)} of {len(kernels)} kernels:",
    ]
    lines += [f"#   {g.name:11} {g.why}" for g in applicable(kernels)]
    if any(k.emulated for k in kernels):
        lines.append(
            "# FP8 mma.sync is emulated on this target (F2FP and HMMA): registers and instruction mix are not held."
        )
    legends = {PACK: PACK_LEGEND, DECODE: LEGEND + DECODE_LEGEND, RESIDENT: LEGEND + RESIDENT_LEGEND}
    legend = legends.get(part, LEGEND + (SM90A_LEGEND if "sm90a" in families else ""))
    lines += ["#", *legend.splitlines(), ""]
    for row in rows:
        lines.append(
            "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        )
    return "\n".join(lines) + "\n"


def split(text: str) -> dict[str, str]:
    """The parts of a report by their name in PARTS, those that it has."""
    starts = {part: found.start() for part, title in PARTS.items() if (found := re.search(f"^{title}", text, re.M))}
    ends = sorted([*starts.values(), len(text)])
    return {part: text[at : ends[ends.index(at) + 1]].rstrip() + "\n" for part, at in starts.items()}


def join(parts: Mapping[str, str]) -> str:
    """A report of its parts."""
    return "\n".join(parts[part] for part in PARTS if part in parts)


Row = dict[str, float | str]
WORDS = ("machine",)  # columns that are no numbers


def parse(text: str) -> tuple[str, dict[str, Row]]:
    """(compiler, kernel -> column -> number or word) of a part of a report. Raises ValueError for text that is none."""
    compiler = next(
        (line.removeprefix("# compiler: ") for line in text.splitlines() if line.startswith("# compiler: ")), ""
    )
    table = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    if not compiler or not table or table[0][0] != "kernel" or any(len(row) != len(table[0]) for row in table):
        raise ValueError("not a report of `python -m codegen gates`")
    names = table[0][1:]
    return compiler, {
        row[0]: {n: x if n in WORDS else float(x) for n, x in zip(names, row[1:], strict=True)} for row in table[1:]
    }


def compare(baseline: dict[str, Row], fresh: dict[str, Row]) -> list[Change]:
    """What changed from the committed numbers to the fresh ones, in either direction."""
    changes = [Change(kernel=k, text="is new", worse=True) for k in sorted(set(fresh) - set(baseline))]
    changes += [Change(kernel=k, text="is gone", worse=True) for k in sorted(set(baseline) - set(fresh))]
    for kernel in sorted(set(baseline) & set(fresh)):
        for c in COLUMNS:
            if not c.compared or c.name not in fresh[kernel]:
                continue
            old, new = baseline[kernel].get(c.name), fresh[kernel][c.name]
            if old is None:
                changes.append(Change(kernel=kernel, text=f"the report has no column {c.name}", worse=True))
            elif isinstance(old, str) or isinstance(new, str):
                if new != old:
                    changes.append(Change(kernel=kernel, text=f"{c.name} {old} -> {new}", worse=True))
            elif abs(new - old) > c.tolerance * old:
                worse = c.better == 0 or (new - old) * c.better < 0
                changes.append(Change(kernel=kernel, text=f"{c.name} {old:g} -> {new:g}", worse=worse))
    return changes
