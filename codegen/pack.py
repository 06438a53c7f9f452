"""The kernels that make operands, quantising and packing: which are needed, and what follows from their shape.

Those whose source is FP8 quantise nothing: they bring bytes and descales to where attention kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.arch import REGISTERS_PER_SM, TARGETS
from codegen.axes import Operand, Walk
from codegen.axes.axis import Axis
from codegen.matrix import MATRICES
from codegen.scaling import KEY_BLOCK, key_block
from codegen.variant import Variant

LOAD = 16  # bytes of a load
THREADS = 256  # packing::kThreads
MOST_ELEMENTS = 128 * THREADS  # of a CTA: 64 registers a thread, 8 KB in flight a warp
STAGE_PAD = 32  # bytes between groups of 16 keys of V in shared memory, see TransposeStage
MOST_PIECES, PIECES_BYTES = 2, 128  # kMostPieces, kPiecesBytes
PIECE_ROOM = {"sm89": (48 * 1024, 128), "sm90a": (72 * 1024, 256)}  # kRoomOnAda, kRoomOnHopper
SAMPLES = 32  # packing::kSamples, keys that a mean is taken over
DELIVERY_UNIT, DELIVERY_BARRIERS = 32, 12  # of sm90::Delivery: bytes of a unit, mbarriers


class Source(Axis):
    element_bytes: int

    BF16 = "bf16", {"element_bytes": 2}
    FP16 = "fp16", {"element_bytes": 2}
    FP8 = "fp8", {"element_bytes": 1}  # e4m3 or e5m2: bytes are copied, or Q is lowered


@dataclass(frozen=True, kw_only=True, order=True)
class Pack:
    """One kernel. ``key_block`` keys of K and V share a block descale. FP8 sources have one kernel a head_dim, whatever
    the blocks of its users: its own are those that V is padded to."""

    head_dim: int
    key_block: int
    source: Source
    operand: Operand = Operand.E4M3  # what Q, K and V become

    @property
    def id(self) -> str:
        made = f"_{self.operand}" if self.integer else ""
        return f"pack_d{self.head_dim}_n{self.key_block}_{self.source}{made}"

    @property
    def integer(self) -> bool:
        """Whether Q and K become s8."""
        return self.operand.qk.integer

    @property
    def integer_v(self) -> bool:
        """Whether V does."""
        return self.operand.v.integer

    @property
    def path(self) -> str:
        return f"pack/{self.id}.cu"

    @property
    def quantises(self) -> bool:
        """Whether there is something to quantise, and so all other forms than the plain one."""
        return self.source is not Source.FP8

    @property
    def chunk(self) -> int:
        """Elements of a load."""
        return LOAD // self.source.element_bytes

    @property
    def chunks(self) -> int:
        """Chunks of a row that a lane owns: 2 of 16-bit elements, 1 of FP8, or 3 where the number of chunks is 3 times
        a power of two, so that the lanes of a row are a power of two and a shuffle reaches them all."""
        return 3 if self.head_dim // self.chunk % 3 == 0 else self.source.element_bytes

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return self.head_dim // self.chunk // self.chunks

    @property
    def cluster(self) -> int:
        """CTAs that share a block: one, or two where its elements would not fit the registers of one."""
        return 2 if self.key_block * self.head_dim > MOST_ELEMENTS else 1

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.key_block // self.cluster

    @property
    def passes(self) -> int:
        """Rows that a lane shares."""
        return self.rows * self.lanes // THREADS

    @property
    def ctas_per_sm(self) -> int:
        """CTAs an SM, so that one loads while another computes. Launch bounds ask for them where registers would not
        leave room for as many anyway."""
        return 2 if self.passes * self.chunks > 8 else 3

    @property
    def transform_ctas_per_sm(self) -> int:
        """Of the form that smooths and rotates, and waits more. Launch bounds ask for them: one more where a row is in
        few lanes takes 9% off, where it is in 8 the registers that this costs take it back."""
        return self.ctas_per_sm + (self.ctas_per_sm == 3 and self.lanes <= 4)

    @property
    def delivers(self) -> bool:
        """Whether there is a form for sm90a that hands over head after head to an attention kernel that runs already:
        rows of 128 or 256 bytes, as the copy engine's swizzle wants them."""
        return self.quantises and not self.integer and self.head_dim in (64, 128)

    @property
    def ragged(self) -> bool:
        """Whether there is a form for ragged batches: kernels that walk them have this head_dim."""
        return not self.integer and any(self.head_dim in m.head_dim for m in MATRICES if Walk.RAGGED in m.walk)

    @property
    def rows_at_once(self) -> int:
        """Rows of a piece that a lane asks for in one turn of a loop: pieces have a multiple of 64 rows."""
        return max(64 * self.lanes // THREADS, 1)

    def pieces_bytes(self, target: str) -> int:
        """The most shared memory of a CTA for its pieces of a ragged batch: two blocks of keys, or a larger one."""
        memory, most = PIECE_ROOM[target]
        blocks = [self.stage_bytes // self.rows * n for n in range(128, most + 1, 64)]
        two = [MOST_PIECES * b for b in blocks if PIECES_BYTES + MOST_PIECES * b <= memory]
        return PIECES_BYTES + max([*two, *blocks])

    @property
    def gather_ctas_per_sm(self) -> int:
        """Of the form that copies keys from pages: as many as leave a thread registers for its bytes of a block."""
        return 3 if self.passes * self.chunks > 4 else 5

    @property
    def delivery_threads(self) -> int:
        """Of that form: one for 64 elements, a warp that loads, three that report."""
        return self.key_block * self.head_dim // 64 + 4 * 32

    @property
    def delivery_bytes(self) -> int:
        """Shared memory of its CTA: two blocks in 16 bits, two of V in 8, and what goes with them."""
        warps = self.key_block * self.head_dim // 64 // 32
        control = 8 * DELIVERY_UNIT + 2 * 4 * warps + 8 * DELIVERY_BARRIERS
        return -(-(6 * self.key_block * self.head_dim + control) // 1024) * 1024

    @property
    def delivery_ctas_per_sm(self) -> int:
        """CTAs of it that the shared memory and the registers of an SM have room for: each takes 1 KB for the system,
        and 80 registers a thread at least."""
        memory = TARGETS["sm90a"].smem_per_block // (self.delivery_bytes + 1024)
        return min(memory, REGISTERS_PER_SM // (80 * self.delivery_threads))

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a CTA, through which it transposes V."""
        return self.rows // 16 * (16 * self.head_dim + STAGE_PAD)


def served_by(pack: Pack, v: Variant) -> bool:
    """Whether a variant reads what the pack makes."""
    if not pack.quantises:
        return v.head_dim == pack.head_dim and v.dtype.arrives
    return _made(v) == (pack.head_dim, pack.key_block, pack.operand)


def _made(v: Variant) -> tuple[int, int, Operand]:
    """What a pack kernel makes for a variant. One that reads numbers of any range also reads what is made as e4m3."""
    return v.head_dim, key_block(v), v.dtype if v.dtype.qk.integer else Operand.E4M3


def packs_of(variants: Iterable[Variant]) -> tuple[Pack, ...]:
    """Those that make operands for any of the variants, in the order of the manifest and the registry."""
    shapes = {_made(v) for v in variants}
    packs = {
        Pack(head_dim=d, key_block=n, source=s, operand=o) for d, n, o in shapes for s in Source if s is not Source.FP8
    }
    packs |= {Pack(head_dim=d, key_block=KEY_BLOCK, source=Source.FP8) for d, _, o in shapes if o is Operand.E4M3}
    return tuple(sorted(packs))


def pack_targets(
    pack: Pack, variants: Iterable[Variant], archs: tuple[str, ...], of: Callable[[Variant], tuple[str, ...]]
) -> tuple[str, ...]:
    """The targets of a build on which one of its variants, compiled for those that ``of`` says, reads what the kernel
    writes."""
    needed = {arch for v in variants if served_by(pack, v) for arch in of(v)}
    return tuple(a for a in archs if a in needed)
