"""The list of kernels (``manifest.json``), and where it and the tables beside it are read from.
docs/design/formats.md defines the files.

Where they are read from, first match wins:

1. the directory in the environment variable ``FP8CUTLASS_GENERATED``;
2. ``fp8cutlass/_generated/`` inside the installed package;
3. ``generated/`` of a source checkout, two levels above the package.

A compiled extension carries its own pair, for the profile it was built with: see :mod:`.native.extension`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

FORMAT = 1
KEY_BLOCK = 128  # keys that share a `block` descale in public tensors; packed V is padded to a multiple of it
INTEGER = {"int8": "s8", "int8_full": "s8u8"}  # what bf16 and fp16 operands become, by precision; others become e4m3
GROUPS, GROUP_STEP = 4, 8  # `group`: of each 8 keys of a block two neighbours, as a lane of a kernel has them
# Of Q and K for kernels with f16 scores: 256 products of two values up to 14 are at most 50,176, which f16 (65,504)
# holds at every head_dim <= 256. 14 = 448 / 32, so the largest element of a block is as exact as at 448.
SCORE_AMAX = 14.0
# What a directory of the generator, an installed package and a library are described by.
TABLES = ("manifest.json", "table.txt", "times.txt")
PACKAGE_DIR = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Variant:
    """One kernel of the manifest. ``tile_m`` and ``tile_n`` count query rows and keys; ``smem_bytes`` is per CTA.

    ``scaling`` is the finest mode that it reads, ``scalings`` are all of them. ``key_block`` keys share a ``block``
    descale of K and V in what it reads: KEY_BLOCK, or its tile where that does not divide KEY_BLOCK.
    """

    id: str
    family: str
    kind: str  # "fwd", "diag", or what has no cell of the table: "window", "blocks", "biased", "ragged", "capped"
    head_dim: int
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    scaling: str
    scalings: tuple[str, ...]
    key_block: int
    mask: str  # "full", "causal", "window" or "blocks"
    walk: str  # "dense" or "ragged"
    causal: bool
    dtype: str  # "e4m3" or "e5m2"
    out: str  # "bf16", "fp16" or "e4m3"
    softmax: str  # "linear", "quadratic", "exp2" or "exp2x2"
    score: str  # accumulator of Q K^T: "f16" or "f32"
    schedule: str  # how products and softmax overlap: "multistage" (sm89), "pingpong", "overlap" or "serial" (sm90a)
    cluster: str  # CTAs that share a query tile: "solo", "split2" or "split4"
    profile: str  # the smallest profile that contains the variant
    threads: int
    ctas_per_sm: int
    smem_bytes: int
    quantises_q: bool  # takes Q in bf16 and fp16, too, with a scale for each row
    unrolled: tuple[tuple[int, int], ...]  # the least and the most keys of each form with an item's tiles unrolled
    plain: tuple[int, ...]  # forms for calls without LSE, sinks and amax, by their most keys; 0 for any number
    targets: tuple[str, ...]  # architectures that it is compiled for
    file: str
    sha256: str

    def unrolled_for(self, seqlen_k: int, *, plain: bool = True) -> tuple[int, int] | None:
        """The least and the most keys of the form that runs for so many; None for the one that takes any number."""
        serving = (form for form in self.unrolled if plain or form[1] not in self.plain)
        return next((form for form in serving if form[0] <= seqlen_k <= form[1]), None)


@dataclass(frozen=True)
class Decode:
    """A kernel of decode. Its position in ``Manifest.decodes`` is its number in an extension built from it.

    A unit is ``rows`` pairs of a query and a head of a group; a CTA takes ``tile`` keys at a time, and leaves
    ``part_floats`` of a unit that it shares with others.
    """

    id: str
    arch: str
    head_dim: int
    rows: int
    tile: int
    stages: int  # tiles in shared memory, with those on their way
    threads: int
    ctas_per_sm: int
    smem_bytes: int
    part_floats: int
    candidate: bool  # built to be timed, and chosen by its number alone
    profile: str  # the smallest that has it


@dataclass(frozen=True)
class Resident:
    """A kernel that keeps a head's K and V in shared memory, for at most ``keys`` keys. Its position in
    ``Manifest.residents`` is its number in an extension built from it."""

    id: str
    head_dim: int
    keys: int
    source: str  # of Q, K, V and O: "bf16" or "fp16"
    threads: int
    ctas_per_sm: int
    smem_bytes: int
    profile: str  # the smallest that has it


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``; the position of a variant in ``variants`` is its number in an extension built from it."""

    directory: Path
    profile: str
    archs: tuple[str, ...]
    capability: dict[str, tuple[int, int]]  # of the devices that run each architecture's code
    key_block: int
    scaling: dict[str, dict[str, str]]
    operands: dict[str, dict[str, str]]  # of each dtype of a variant, the numbers of Q and K ("qk"), of P and of V
    head_dims: dict[str, tuple[int, ...]]  # of each architecture, ascending: a caller's is padded up to the next
    variants: tuple[Variant, ...]
    decodes: tuple[Decode, ...]
    residents: tuple[Resident, ...]
    index: dict[str, int]

    def head_dims_of(self, arch: str, dtype: str) -> tuple[int, ...]:
        """Those of kernels whose operands are of ``dtype``, ascending: integers have kernels for fewer head dims. All
        that an architecture has where no kernel is of that type, and the emulator borrows the tiles of others."""
        if dtype not in INTEGER.values():
            return self.head_dims[arch]
        return _head_dims_of(self.directory, arch, dtype) or self.head_dims[arch]

    def known(self, variant_id: str) -> Variant | None:
        """The variant of that id, if it is there."""
        return self.variants[self.index[variant_id]] if variant_id in self.index else None

    def find(self, variant_id: str) -> Variant:
        """Return the variant of that id; UnsupportedError names the profile and what is near it."""
        found = self.known(variant_id)
        if found is None:
            near = [v.id for v in self.variants if v.id.split("_")[:3] == variant_id.split("_")[:3]][:4]
            hint = f"; among those it has are {', '.join(near)}" if near else ""
            raise UnsupportedError(
                f"kernel={variant_id!r} is not in the manifest of profile {self.profile!r} "
                f"({len(self.variants)} variants in {self.directory}){hint}"
            )
        return found


@cache
def _head_dims_of(directory: Path, arch: str, dtype: str) -> tuple[int, ...]:
    variants = load_manifest(directory).variants
    return tuple(sorted({v.head_dim for v in variants if v.dtype == dtype and v.kind == "fwd" and arch in v.targets}))


_FIELDS = tuple(field.name for field in fields(Variant))


def _variant(row: dict[str, Any]) -> Variant:
    values = {name: row[name] for name in _FIELDS}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = _frozen(value)
    made = object.__new__(Variant)  # a frozen dataclass's own way sets each field by a call: 20 ms for all of them
    made.__dict__.update(values)
    return made


def _decode(row: dict[str, Any]) -> Decode:
    (arch,) = row["targets"]
    return Decode(arch=arch, **{field.name: row[field.name] for field in fields(Decode) if field.name != "arch"})


def _resident(row: dict[str, Any]) -> Resident:
    return Resident(**{field.name: row[field.name] for field in fields(Resident)})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(x) for x in value) if isinstance(value, list) else value


REMEDY = "install the package again, or in a checkout run `python -m codegen`"


def broken(path: Path, what: object) -> ValueError:
    """The error for a file that is not as the generator writes it, with what to do about it."""
    return ValueError(f"{path} is damaged ({what}): {REMEDY}")


def read_file(path: Path) -> str:
    """ValueError, with what to do about it, for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {REMEDY}") from error


def check_format(path: Path, found: object, reads: object) -> None:
    if found != reads:
        raise ValueError(f"{path}: format {found!r}, this package reads format {reads!r}: {REMEDY}")


def read_blocks(path: Path, reads: int) -> list[list[str]]:
    """The lines of a text table, by the blocks that empty lines part; without comments. ValueError, with what to do
    about it, for a file that is none of ours, or has not its last line as a whole."""
    text = read_file(path)
    blocks = [block.splitlines() for block in text.split("\n\n")]
    blocks[0] = [line for line in blocks[0] if not line.startswith("#")]
    word, _, found = (blocks[0] or [""])[0].partition(" ")
    if word != "format" or not text.endswith("\n"):
        raise broken(path, "no table, or cut off")
    check_format(path, found, str(reads))
    return blocks


def _read(path: Path) -> dict[str, Any]:
    """ValueError, with what to do about it, for a file that is none of ours."""
    try:
        data: Any = json.loads(read_file(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} cannot be read ({error}): {REMEDY}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no table: {REMEDY}")
    check_format(path, data.get("format"), FORMAT)
    return data


@cache
def load_manifest(directory: Path) -> Manifest:
    """Read ``directory/manifest.json``; ValueError when its format or its ``key_block`` is not this package's."""
    data = _read(directory / "manifest.json")
    if data["key_block"] != KEY_BLOCK:
        raise ValueError(
            f"{directory / 'manifest.json'}: key_block {data['key_block']!r}, this package quantises and packs by "
            f"{KEY_BLOCK} keys"
        )
    try:
        variants = tuple(_variant(row) for row in data["variants"])
        decodes = tuple(_decode(row) for row in data["decodes"])
        residents = tuple(_resident(row) for row in data["residents"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'manifest.json'} lacks {error}: {REMEDY}") from error
    return Manifest(
        directory=directory,
        profile=data["profile"],
        archs=tuple(data["archs"]),
        capability={arch: (major, minor) for arch, (major, minor) in data["capability"].items()},
        key_block=data["key_block"],
        scaling=data["scaling"],
        operands=data["operands"],
        head_dims={arch: tuple(dims) for arch, dims in data["head_dims"].items()},
        variants=variants,
        decodes=decodes,
        residents=residents,
        index={variant.id: number for number, variant in enumerate(variants)},
    )


def generated_dir() -> Path:
    """The directory that holds the shipped manifest and table, by the order given at the top of this module."""
    return _generated_dir(os.environ.get("FP8CUTLASS_GENERATED"))


@cache
def _generated_dir(override: str | None) -> Path:
    if override:
        if not (Path(override) / "manifest.json").is_file():
            raise UnsupportedError(f"FP8CUTLASS_GENERATED={override!r} holds no manifest.json")
        return Path(override)
    candidates = (PACKAGE_DIR / "_generated", PACKAGE_DIR.parent.parent / "generated")
    for candidate in candidates:
        if (candidate / "manifest.json").is_file():
            return candidate
    raise UnsupportedError(
        f"no manifest.json in {' or '.join(map(str, candidates))}",
        "reinstall the package, run `python -m codegen` in a source checkout, or set FP8CUTLASS_GENERATED",
    )
