"""Reads what `nvdisasm -b` prints: opcodes, and the main loop, which is the innermost around the matrix products.

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

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<predicate>@!?\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"^(?P<modifiers>[.\w]*)(?P<condition>.*?)(?P<address>0x[0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET")  # without a predicate nothing follows them


class SassError(ValueError):
    """A disassembly that is not what nvdisasm is known to print."""


@dataclass(kw_only=True)
class Function:
    """One function's code. Everything is by position, counted from its first instruction.

    targets: position of a branch -> where it leads. no_fall: positions that control never leaves downwards.
    wide_loads: LDG and LDGSTS of 16 bytes.
    """

    name: str
    opcodes: list[str] = field(default_factory=list)
    targets: dict[int, int] = field(default_factory=dict)
    no_fall: set[int] = field(default_factory=set)
    wide_loads: int = 0

    def add(self, opcode: str, rest: str, predicated: bool, begin: int) -> None:
        """begin: the address of the first instruction."""
        here = len(self.opcodes)
        self.opcodes.append(opcode)
        if opcode in ("LDG", "LDGSTS") and ".128" in rest.split()[0]:
            self.wide_loads += 1
        if opcode == "BRA" and (target := _TARGET.match(rest)):
            self.targets[here] = (int(target["address"], 16) - begin) // INSTRUCTION_BYTES
            # Some branches name their condition as an operand: BRA.DIV ~URZ, 0x350
            predicated = predicated or bool(target["condition"].strip())
        if opcode in ("BRA", *_ENDS) and not predicated:
            self.no_fall.add(here)


def functions(text: str, sizes: Iterable[tuple[str, int]]) -> list[Function]:
    """The functions of which `text` is the disassembly, their code one after the other from address 0; `sizes` are the
    names, and the bytes of each. Raises SassError for a line that is not understood."""
    found = iter([m for m in map(_INSTRUCTION.match, text.splitlines()) if m is not None])
    made, begin = [], 0
    for name, size in sizes:
        function = Function(name=name)
        for address in range(begin, begin + size, INSTRUCTION_BYTES):
            m = next(found, None)
            if m is None or int(m["address"], 16) != address:
                raise SassError(f"the instruction at /*{address:04x}*/ of {name} was not understood")
            function.add(m["opcode"], m["rest"], m["predicate"] is not None, begin)
        while function.opcodes and function.opcodes[-1] == "NOP":  # alignment of the end
            function.opcodes.pop()
        made.append(function)
        begin += size
    if next(found, None) is not None:
        raise SassError(f"there are instructions behind /*{begin:04x}*/, where the last function ends")
    return made


def _count(opcodes: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(opcodes).items()))


def _shortest_path(function: Function, start: int, end: int) -> list[str]:
    """Opcodes on the way from `start` to `end` with the fewest instructions that never leaves or turns back."""
    before: dict[int, int] = {}
    length = {start: 1}
    for here in range(start, end):
        if here not in length:
            continue
        ways = [] if here in function.no_fall else [here + 1]
        target = function.targets.get(here)
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
    return [function.opcodes[p] for p in positions]


def _main_loop(function: Function) -> Loop | None:
    """The shortest stretch from a label to a branch back to it among those with the most matrix instructions.

    Blocks that the compiler moved behind the loop are not counted: what is wanted is what every tile runs through.
    """
    if any(opcode in WARPGROUP for opcode in function.opcodes):
        return _natural_loop(function)
    best: tuple[tuple[int, int], tuple[int, int]] | None = None
    for end, start in function.targets.items():
        if not 0 <= start <= end:
            continue
        products = sum(opcode in MATRIX for opcode in function.opcodes[start : end + 1])
        rank = (products, start - end)
        if products and (best is None or rank > best[0]):
            best = rank, (start, end)
    if best is None:
        return None
    start, end = best[1]
    return Loop(counts=_count(function.opcodes[start : end + 1]), path=_count(_shortest_path(function, start, end)))


def _natural_loop(function: Function) -> Loop | None:
    """The innermost loop with most warpgroup products."""
    inside = range(len(function.opcodes))
    targets = {here: there if there in inside else None for here, there in function.targets.items()}
    products = {i for i, opcode in enumerate(function.opcodes) if opcode in WARPGROUP}
    found = innermost(len(function.opcodes), targets, function.no_fall, products)
    if found is None:
        return None
    return Loop(
        counts=_count(function.opcodes[i] for i in found.body), path=_count(function.opcodes[i] for i in found.path)
    )


def parse(code: Iterable[Function], entry: str = "") -> Listing:
    """The listing of the functions whose mangled name holds `entry`. Raises SassError where there is none."""
    found = [f for f in code if entry in f.name and f.opcodes]
    if not found:
        raise SassError(f"no instructions{' of ' + entry if entry else ''} in the disassembly")
    loops = [loop for f in found if (loop := _main_loop(f)) is not None]
    return Listing(
        code_bytes=sum(len(f.opcodes) for f in found) * INSTRUCTION_BYTES,
        counts=_count(opcode for f in found for opcode in f.opcodes),
        wide_loads=sum(f.wide_loads for f in found),
        loop=max(loops, key=lambda loop: sum(loop.counts.get(m, 0) for m in MATRIX), default=None),
    )
