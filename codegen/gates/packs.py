"""The kernels that quantise and pack, as the gates look at them, and what their code must keep. A 16-bit source has
four, those of e4m3 one more for ragged batches, and two head_dims for sm90a one that hands over; an FP8 source has
three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from codegen.arch import TARGETS
from codegen.gates.subject import Kernel, mangled, write_source
from codegen.pack import SAMPLES, THREADS, Pack
from codegen.render import environment, render_pack

FAMILY = "pack"

# Words a thread that may be read back from local memory where rows are transformed. Launch bounds leave those kernels
# 80 or 128 registers, and the compiler overlaps more rows than fit: a word is then written once and read once or twice,
# out of L1, which costs less than the CTA that more registers would cost.
SPILLED = 15

# Of the lengths of a ragged batch: one to find a block's sequence and 3 of it; 3 to find those of some rows of O, and 3
# of the first and of a row's own.
LENGTH_READS = 13
# Of the form that reads pages, beside the page and the descale of each row: members and their keys, one to find a
# block's member, 5 of it, a descale of the head.
GATHER_READS = 8
PIECES = {  # how a source calls the shared memory of its form for ragged batches of FP8
    target: f"most_pieces_bytes(kRoomOn{card}, Stage::kBytes / kRows)"
    for target, card in (("sm89", "Ada"), ("sm90a", "Hopper"))
}
DESCALE_READS = 1  # of a descale that is given
MAXIMUM_READS = 2  # of a float32 maximum: that of a head or a tensor, that of a column


@dataclass(frozen=True, kw_only=True)
class Form:
    """One of the kernels of a source. maxima: it raises the maxima of groups larger than a block, and packs nothing.
    transforms: it is the one for calls that smooth keys or rotate rows. ragged: the one for ragged batches. copies: it
    is one of an FP8 source. gathers: it reads pages."""

    name: str
    maxima: bool = False
    transforms: bool = False
    ragged: bool = False
    copies: bool = False
    gathers: bool = False

    @property
    def lowers(self) -> bool:
        """Whether it brings Q into the range of f16 scores."""
        return self.copies and not self.gathers

    def entry(self, pack: Pack) -> str:
        """What its mangled name holds: the function's name, its length in front, and the template's argument."""
        if self.gathers:
            return mangled(f"{pack.id}_gather") + "E"
        if self.ragged:
            return mangled(f"{pack.id}_ragged") + "E"
        if self.copies:
            return mangled(pack.id) + "E"
        return mangled(f"{pack.id}_amax" if self.maxima else pack.id) + f"ILb{int(self.transforms)}E"


FORMS = tuple(
    Form(name=name + suffix, maxima=name == "amax", transforms=bool(suffix))
    for name in ("amax", "pack")
    for suffix in ("", "_transform")
)
RAGGED = Form(name="pack_ragged", ragged=True)
COPY = Form(name="pack", copies=True)
RAGGED_COPY = Form(name="pack_ragged", ragged=True, copies=True)
GATHER = Form(name="pack_gather", copies=True, gathers=True)


def forms(pack: Pack, target: str) -> tuple[Form, ...]:
    """Those of a source that are kernels on a target."""
    if not pack.quantises:
        return (COPY, RAGGED_COPY, GATHER) if pack.ragged else (COPY,)
    return (*FORMS, RAGGED) if pack.ragged else FORMS


def static_smem(pack: Pack, form: Form) -> int:
    """Bytes: maxima of each warp and the cluster, a float for each thread or, for the maxima, column; the mean of K."""
    if form.copies:
        return 0
    warps = 4 * THREADS // 32
    own = 4 * (pack.head_dim if form.maxima else THREADS)
    shared = 16 if pack.cluster > 1 and not form.maxima else 0  # one word, aligned
    return warps + own + shared + (4 * pack.head_dim if form.transforms else 0)


def smem_bytes(pack: Pack, form: Form, target: str) -> int:
    """Bytes that a launch asks for, the most of any."""
    if form.maxima and not form.transforms:
        return 0
    return pack.pieces_bytes(target) if form.copies and form.ragged else pack.stage_bytes


def ctas_per_sm(pack: Pack, form: Form, target: str) -> int:
    if form.copies and form.ragged:
        return 3 if target == "sm90a" else 2
    if form.gathers:
        return pack.gather_ctas_per_sm
    return pack.transform_ctas_per_sm if form.transforms else pack.ctas_per_sm


def wide_loads(pack: Pack, form: Form) -> int:
    """Loads of 16 bytes in the code: every element once, and the samples of K's mean."""
    if form.copies and form.ragged:
        return pack.rows_at_once * pack.chunks
    samples = -(-SAMPLES * pack.lanes // THREADS) * pack.chunks
    return pack.passes * pack.chunks + (samples if form.transforms else 0)


def narrow_loads(pack: Pack, form: Form) -> int:
    """Loads of 4 bytes in the code, on the way of rows as they are and on that of rows that are transformed."""
    if form.maxima:
        return 0
    if form.gathers:
        return GATHER_READS + 2 * pack.passes
    if form.lowers:  # the descale of each row of Q, and of a ragged batch where a row's sequence begins
        return LENGTH_READS + 2 if form.ragged else DESCALE_READS + 1
    return MAXIMUM_READS * (2 if form.transforms else 1) + (LENGTH_READS if form.ragged else 0)


def render(chosen: Mapping[str, tuple[Pack, ...]], folder: Path) -> list[Kernel]:
    """A Kernel for each target, pack chosen for it and form. Writes the sources that `folder` does not have so."""
    env = environment()
    for pack in {p for packs in chosen.values() for p in packs}:
        write_source(folder / pack.path, render_pack(pack, env))
    kernels = [
        Kernel(
            id=f"{pack.id}.{form.name}",
            target=target,
            family=FAMILY,
            source=folder / pack.path,
            emulated=False,
            head_dim=pack.head_dim,
            threads=THREADS,
            ctas_per_sm=ctas_per_sm(pack, form, target),
            smem_bytes=smem_bytes(pack, form, target),
            smem_limit=TARGETS[target].smem_per_block,
            mma_in_loop=0,
            spilled=SPILLED if form.transforms else 0,
            entry=form.entry(pack),
            static_smem=static_smem(pack, form),
            wide_loads=wide_loads(pack, form),
            narrow_loads=narrow_loads(pack, form),
            storage=PIECES[target] if form.copies and form.ragged else "",
        )
        for target, packs in chosen.items()
        for pack in packs
        for form in forms(pack, target)
    ]
    kernels += [
        Kernel(
            id=f"{pack.id}.deliver",
            target="sm90a",
            family=FAMILY,
            source=folder / pack.path,
            emulated=False,
            head_dim=pack.head_dim,
            threads=pack.delivery_threads,
            ctas_per_sm=pack.delivery_ctas_per_sm,
            smem_bytes=pack.delivery_bytes,
            smem_limit=TARGETS["sm90a"].smem_per_block,
            mma_in_loop=0,
            spilled=0,
            entry=mangled(f"{pack.id}_deliver"),
            storage="sizeof(Delivery::Storage)",
        )
        for pack in chosen.get("sm90a", ())
        if pack.delivers
    ]
    return sorted(kernels, key=lambda k: (k.target, k.id))
