"""The machine code of a cubin as bytes, so that "nothing changed" can be said of a kernel in a word."""

from __future__ import annotations

import hashlib
import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # of an ELF file of 64 bits
_SECTION = struct.Struct("<IIQQQQIIQQ")
_TEXT = ".text."
_CODE = (_TEXT, ".nv.constant2.")  # instructions, and tables of jumps
DIGITS = 12


class MachineError(ValueError):
    """Bytes that are no cubin, or a cubin without the code that was asked for."""


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF file by name, but those that take no room in it. Raises MachineError for other bytes."""
    if len(cubin) < _HEADER.size or cubin[:5] != b"\x7fELF\x02":
        raise MachineError("not an ELF file of 64 bits")
    header = _HEADER.unpack_from(cubin)
    start, size, count, names = header[6], header[11], header[12], header[13]
    if size != _SECTION.size or start + size * count > len(cubin) or names >= count:
        raise MachineError("the table of sections does not lie within the file")
    table = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    strings = cubin[table[names][4] :][: table[names][5]]
    empty = 8  # SHT_NOBITS
    return {
        strings[s[0] : strings.index(b"\0", s[0])].decode(): cubin[s[4] : s[4] + s[5]] for s in table if s[1] != empty
    }


def functions(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each function by its section's name. Raises MachineError for bytes that are no cubin."""
    return {name: data for name, data in sections(cubin).items() if name.startswith(_TEXT)}


def digest(cubin: bytes, entry: str = "") -> str:
    """Of the code of the functions whose name holds `entry`: 12 hex digits.

    Code knows neither names nor addresses: branches are relative, and labels are not in it. So this stays when a kernel
    or its file is renamed, and changes with every instruction, register and stall.
    """
    code = [data for name, data in sorted(sections(cubin).items()) if name.startswith(_CODE) and entry in name]
    if not code:
        raise MachineError(f"no code{' of ' + entry if entry else ''} in the cubin")
    total = hashlib.sha256()
    for data in sorted(code):
        total.update(struct.pack("<Q", len(data)) + data)
    return total.hexdigest()[:DIGITS]
