"""The key of the dispatch table: its axes, written once, and how a problem falls into them."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import CARDS, MODEL_CARD, TARGETS
from codegen.matrix import HEAD_DIMS
from codegen.model import Shape
from codegen.spec import Dtype, Out, Scaling, axis_text

SEQLEN_BOUNDS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # inclusive; a last bucket has no bound
LOAD_ROWS = 128  # rows of a work item when the load is judged
LOADS = ("light", "heavy")  # light: fewer than two such items an SM
PRECISIONS = ("fast", "accurate")


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
    return "light" if batch_heads * -(-seqlen_q // LOAD_ROWS) < 2 * sms else "heavy"


def representative(key: Key) -> Shape:
    """The problem that stands for a cell in the cost model: the bucket's upper end, 0.5 or 8 items an SM."""
    card = CARDS[MODEL_CARD]
    seqlen = SEQLEN_BOUNDS[key.seqlen] if key.seqlen < len(SEQLEN_BOUNDS) else 2 * SEQLEN_BOUNDS[-1]
    items = card.sms // 2 if key.load == "light" else 8 * card.sms
    queries = min(seqlen, LOAD_ROWS * items)  # so that one head alone is no heavier than the cell
    batch_heads = max(1, items // -(-queries // LOAD_ROWS))
    return Shape(batch_heads=batch_heads, seqlen_q=queries, seqlen_k=seqlen, causal=key.causal)
