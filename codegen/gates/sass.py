"""Reads what `nvdisasm -c` prints: opcodes, and the main loop, which is the innermost around the matrix products.

Kernels with warpgroup products have products outside the loop as well (those of the first tile) and blocks of it
elsewhere (waits), so there the loop is a natural one of the control flow; in others it is a stretch of addresses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from codegen.gates.flow import innermost
from codegen.gates.subject import Listing, Loop

INSTRUCTION_BYTES = 16  # since sm_70
MATRIX = ("QMMA", "HMMA", "IMMA", "QGMMA", "HGMMA", "IGMMA")
WARPGROUP = ("QGMMA", "HGMMA", "IGMMA")

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<predicate>@!?\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"^(?P<modifiers>[.\w]*)(?P<condition>[^`]*)`\((?P<label>\.L\w+)\)")
_ENDS = ("EXIT", "RET")  # without a predicate nothing follows them


class SassError(ValueError):
    """A disassembly that is not what nvdisasm is known to print."""


@dataclass(kw_only=True)
class _Section:
    """One function's code. Everything is by position; `labels` stand for that of the instruction that follows.

    branches: position -> label. no_fall: positions that control never leaves downwards. wide_loads: LDG of 16 bytes.
    """

    name: str
    opcodes: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branches: dict[int, str] = field(default_factory=dict)
    no_fall: set[int] = field(default_factory=set)
    wide_loads: int = 0

    def add(self, opcode: str, rest: str, predicated: bool) -> None:
        here = len(self.opcodes)
        self.opcodes.append(opcode)
        if opcode == "LDG" and ".128" in rest.split()[0]:
            self.wide_loads += 1
        if opcode == "BRA" and (target := _TARGET.match(rest)):
            self.branches[here] = target["label"]
            # Some branches name their condition as an operand: BRA.DIV ~URZ, `(.L_x_1)
            predicated = predicated or bool(target["condition"].strip())
        if opcode in ("BRA", *_ENDS) and not predicated:
            self.no_fall.add(here)


def _sections(text: str) -> list[_Section]:
    sections: list[_Section] = []
    for line in text.splitlines():
        if begun := _SECTION.match(line):
            sections.append(_Section(name=begun[1]))
        elif not sections:
            continue
        elif label := _LABEL.match(line):
            sections[-1].labels[label[1]] = len(sections[-1].opcodes)
        elif found := _INSTRUCTION.match(line):
            section, opcode = sections[-1], found["opcode"]
            if int(found["address"], 16) != len(section.opcodes) * INSTRUCTION_BYTES:
                raise SassError(f"an instruction before /*{found['address']}*/ was not understood: {line.strip()}")
            section.add(opcode, found["rest"], found["predicate"] is not None)
    for section in sections:
        while section.opcodes and section.opcodes[-1] == "NOP":  # alignment of the section's end
            section.opcodes.pop()
    return [s for s in sections if s.opcodes]


def _count(opcodes: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(opcodes).items()))


def _shortest_path(section: _Section, start: int, end: int) -> list[str]:
    """Opcodes on the way from `start` to `end` with the fewest instructions that never leaves or turns back."""
    before: dict[int, int] = {}
    length = {start: 1}
    for here in range(start, end):
        if here not in length:
            continue
        ways = [] if here in section.no_fall else [here + 1]
        target = section.labels.get(section.branches.get(here, ""))
        if target is not None and here < target <= end:
            ways.append(target)
        for there in ways:
            if length[here] + 1 < length.get(there, end - start + 2):
                length[there], before[there] = length[here] + 1, here
    if end not in length:
        raise SassError("no way through the main loop was found")
    positions = [end]
    while positions[-1] != start:
        positions.append(before[positions[-1]])
    return [section.opcodes[p] for p in positions]


def _main_loop(section: _Section) -> Loop | None:
    """The shortest stretch from a label to a branch back to it among those with the most matrix instructions.

    Blocks that the compiler moved behind the loop are not counted: what is wanted is what every tile runs through.
    """
    if any(opcode in WARPGROUP for opcode in section.opcodes):
        return _natural_loop(section)
    best: tuple[tuple[int, int], tuple[int, int]] | None = None
    for end, label in section.branches.items():
        start = section.labels.get(label)
        if start is None or start > end:
            continue
        products = sum(opcode in MATRIX for opcode in section.opcodes[start : end + 1])
        rank = (products, start - end)
        if products and (best is None or rank > best[0]):
            best = rank, (start, end)
    if best is None:
        return None
    start, end = best[1]
    return Loop(counts=_count(section.opcodes[start : end + 1]), path=_count(_shortest_path(section, start, end)))


def _natural_loop(section: _Section) -> Loop | None:
    """The innermost loop with most warpgroup products."""
    targets = {here: section.labels.get(label) for here, label in section.branches.items()}
    products = {i for i, opcode in enumerate(section.opcodes) if opcode in WARPGROUP}
    found = innermost(len(section.opcodes), targets, section.no_fall, products)
    if found is None:
        return None
    return Loop(
        counts=_count(section.opcodes[i] for i in found.body), path=_count(section.opcodes[i] for i in found.path)
    )


def parse(text: str, entry: str = "") -> Listing:
    """The listing of a cubin, of the functions whose mangled name holds `entry`.

    Raises SassError for text without code of such, or with a line that is not understood.
    """
    sections = [s for s in _sections(text) if entry in s.name]
    if not sections:
        raise SassError(f"no instructions{' of ' + entry if entry else ''} in the disassembly")
    loops = [loop for s in sections if (loop := _main_loop(s)) is not None]
    return Listing(
        code_bytes=sum(len(s.opcodes) for s in sections) * INSTRUCTION_BYTES,
        counts=_count(opcode for s in sections for opcode in s.opcodes),
        wide_loads=sum(s.wide_loads for s in sections),
        loop=max(loops, key=lambda loop: sum(loop.counts.get(m, 0) for m in MATRIX), default=None),
    )
