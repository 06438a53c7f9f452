"""The key of the dispatch table: its axes, written once, and how a problem falls into them."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import TARGETS, Card
from codegen.cost import Shape
from codegen.matrix import HEAD_DIMS
from codegen.spec import Dtype, Out, Scaling, Softmax, axis_text

SEQLEN_BOUNDS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # inclusive; a last bucket has no bound
LOAD_ROWS = 128  # rows of a work item when the load is judged
# A load and how many such items an SM it has fewer than, as a fraction; the last is unbounded.
LOAD_BOUNDS = (("few", 1, 8), ("light", 2, 1))
LOADS = (*(name for name, _, _ in LOAD_BOUNDS), "heavy")
# The softmaxes that serve what the caller asks for, the preferred one first.
SOFTMAXES = {
    "fast": (Softmax.LINEAR, Softmax.EXP2),
    "accurate": (Softmax.EXP2,),
    "high": (Softmax.EXP2X2,),
}
PRECISIONS = tuple(SOFTMAXES)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One cell. `seqlen` is a position among the buckets."""

    arch: str
    head_dim: int
    seqlen: int
    dtype: Dtype
    out: Out
    scaling: Scaling
    causal: bool
    precision: str
    load: str


def axes(archs: tuple[str, ...] = tuple(TARGETS)) -> list[tuple[str, list[object]]]:
    return [
        ("arch", list(archs)),
        ("head_dim", list(HEAD_DIMS)),
        ("seqlen", [*SEQLEN_BOUNDS, None]),
        ("dtype", [axis_text(x) for x in Dtype]),
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
    items = batch_heads * -(-seqlen_q // LOAD_ROWS)
    return next((name for name, part, whole in LOAD_BOUNDS if items * whole < part * sms), LOADS[-1])


def representative(card: Card, seqlen: int, load: str, causal: bool) -> Shape:
    """The problem that stands for a cell in the cost model: the bucket's upper end, 1/16, 0.5 or 8 items an SM.

    seqlen: a position among the buckets.
    """
    keys = SEQLEN_BOUNDS[seqlen] if seqlen < len(SEQLEN_BOUNDS) else 2 * SEQLEN_BOUNDS[-1]
    items = {"few": max(1, card.sms // 16), "light": card.sms // 2}.get(load, 8 * card.sms)
    queries = min(keys, LOAD_ROWS * items)  # so that one head alone is no heavier than the cell
    batch_heads = max(1, items // -(-queries // LOAD_ROWS))
    return Shape(batch_heads=batch_heads, seqlen_q=queries, seqlen_k=keys, causal=causal)
