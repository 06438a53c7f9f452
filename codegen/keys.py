"""The key of the dispatch table: its axes, written once, and how a problem falls into them."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import TARGETS, Card
from codegen.axes import Mask, Operand, Out, Precision, Scaling, Softmax
from codegen.cost import Shape
from codegen.matrix import HEAD_DIMS
from codegen.variant import axis_text

SEQLEN_BOUNDS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # inclusive; a last bucket has no bound
LOAD_ROWS = 64  # query rows of a tile when the load is judged: the height of the lowest tile
# A load and how many such tiles an SM it has at most, as a fraction. Up to four waves of them, what the height of a
# tile leaves over decides between kernels: three are one wave and a half of tiles twice as high.
LOAD_BOUNDS = (("few", 1, 4), ("half", 1, 2), ("wave1", 1, 1), ("wave2", 2, 1), ("wave3", 3, 1), ("wave4", 4, 1))
MOST = "heavy"  # beyond the last bound
SHORT = "short"  # more than few tiles, each alone in its head: a higher one would be no fewer
LOADS = (*(name for name, _, _ in LOAD_BOUNDS), MOST, SHORT)
SOFTMAXES = {str(precision): precision.softmaxes for precision in Precision}
PRECISIONS = tuple(SOFTMAXES)


def precision_of(softmax: Softmax) -> str:
    """What a caller asks for who prefers a softmax to all others."""
    return next(precision for precision, softmaxes in SOFTMAXES.items() if softmaxes[0] is softmax)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One cell. `seqlen` is a position among the buckets."""

    arch: str
    head_dim: int
    seqlen: int
    dtype: Operand
    out: Out
    scaling: Scaling
    causal: bool
    precision: str
    load: str

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal)


def axes(archs: tuple[str, ...] = tuple(TARGETS)) -> list[tuple[str, list[object]]]:
    return [
        ("arch", list(archs)),
        ("head_dim", list(HEAD_DIMS)),
        ("seqlen", [*SEQLEN_BOUNDS, None]),
        ("dtype", [axis_text(x) for x in Operand]),
        ("out", [axis_text(x) for x in Out]),
        ("scaling", [axis_text(x) for x in Scaling]),
        ("causal", [False, True]),
        ("precision", list(PRECISIONS)),
        ("load", list(LOADS)),
    ]


def seqlen_bucket(seqlen: int) -> int:
    return next((i for i, bound in enumerate(SEQLEN_BOUNDS) if seqlen <= bound), len(SEQLEN_BOUNDS))


def bucket_text(bucket: int) -> str:
    low = 0 if bucket == 0 else SEQLEN_BOUNDS[bucket - 1] + 1
    return f"{low}..{SEQLEN_BOUNDS[bucket]}" if bucket < len(SEQLEN_BOUNDS) else f"{low}.."


def load_of(batch_heads: int, seqlen_q: int, sms: int) -> str:
    tiles = batch_heads * -(-seqlen_q // LOAD_ROWS)
    load = next((name for name, part, whole in LOAD_BOUNDS if tiles * whole <= part * sms), MOST)
    return SHORT if seqlen_q <= LOAD_ROWS and load != LOADS[0] else load


def representative(card: Card, seqlen: int, load: str, causal: bool) -> Shape:
    """The problem that stands for a cell in the cost model: the bucket's upper end, in tiles of 128 rows an SM a
    sixteenth, a quarter to 2, or 8; of short queries 4 tiles.

    seqlen: a position among the buckets.
    """
    keys = SEQLEN_BOUNDS[seqlen] if seqlen < len(SEQLEN_BOUNDS) else 2 * SEQLEN_BOUNDS[-1]
    if load == SHORT:
        return Shape(batch_heads=4 * card.sms, seqlen_q=min(keys, LOAD_ROWS), seqlen_k=keys, causal=causal)
    waves = {name: part * card.sms // (2 * whole) for name, part, whole in LOAD_BOUNDS}
    items = {**waves, LOADS[0]: max(1, card.sms // 16), MOST: 8 * card.sms}[load]
    # At most what one head alone may have, and at least what is not short.
    queries = min(keys if load == LOADS[0] else max(keys, 2 * LOAD_ROWS), 128 * items)
    batch_heads = max(1, items // -(-queries // 128))
    if batch_heads < 4 and load != MOST:  # whole heads would be too far from so many tiles
        batch_heads = -(-items // -(-queries // 128))
        queries = min(queries, 128 * (items // batch_heads))
    return Shape(batch_heads=batch_heads, seqlen_q=queries, seqlen_k=keys, causal=causal)
