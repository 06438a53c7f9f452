"""Random calls of ``attention_with_kvcache``, each a function of a seed and a number: caches of our own and of engines,
pages, groups, queries, masks, descales, tokens to append, and garbage wherever nothing is to be read.

Each sequence is a ``Case`` of its own, which says how its values are made.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

from fuzz_cases import VALUES, Case

EDGES = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 511, 512, 513, 1023, 1025)
LENGTHS = ("edges", "log-normal", "equal", "one huge", "short")
ROWS = ("decode", "decode", "speculative", "speculative", "mixed")  # one each; up to 16; prompts and decode
KERNEL_DIMS = (64, 96, 128, 192, 256)
HEAD_DIMS = (16, 32, 48, 80, 112, 160, 224)  # which a card refuses
OWN = ("native", "native pow2", "nhd", "hnd")
ENGINES = ("flashattention", "flashinfer nhd", "flashinfer hnd", "xqa pair", "vllm two first", "vllm side by side",
           "vllm all layers", "sglang slots")  # fmt: skip
GIVEN = ("pair", "rows")  # (k_cache, v_cache) themselves, with and without a page table
CACHES = OWN + ENGINES + GIVEN
PAGE_SIZES = (1, 2, 3, 8, 16, 32, 48, 64, 100, 128, 256)
ENDS = (-1, -1, 0, 1, 5, 63, 64, 128, 200, 4096)  # of windows
DESCALES = ("none", "float", "(1,)", "(H,)", "(B, H)")
WILD = (-(2**31), -1, 2**30, 2**31 - 1)  # page numbers and lengths


@dataclass(frozen=True)
class PagedCase:
    """A call. ``keys`` are those that attention sees, of which ``new`` are appended by the call, or None. ``before``
    and ``behind`` query tokens belong to no sequence. ``poisoned`` is a sequence of NaN keys, ``wild`` one whose page
    numbers and length lie, -1 for none."""

    seed: int
    number: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    new: tuple[int, ...] | None
    dense: bool  # q is (B, S, H, D)
    before: int
    behind: int
    poisoned: int
    wild: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    cache: str
    source: str
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: bool
    scale: float | None
    splits: int
    descales: str
    values: tuple[str, ...]  # of each sequence
    lse: bool

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def ends(self) -> tuple[int, int]:
        """The window in force."""
        return self.window[0], 0 if self.causal else self.window[1]

    @property
    def begins(self) -> list[int]:
        """The elements of cu_seqlens_q."""
        return list(accumulate(self.rows, initial=self.before))

    @property
    def old(self) -> tuple[int, ...]:
        """Keys of each sequence that are in the cache before the call."""
        return tuple(n - m for n, m in zip(self.keys, self.new or (0,) * len(self.keys), strict=True))

    @property
    def columns(self) -> int:
        """Of the page table: one more than the longest sequence needs, but for a row a sequence."""
        return 1 if self.cache == "rows" else 1 + -(-max(self.keys) // self.page_size)

    @property
    def static(self) -> bool:
        """Whether descales are given, not found."""
        return not self.cache.startswith("native")

    def sequence(self, s: int) -> Case:
        """What the values of sequence ``s`` are made from."""
        return Case(
            seed=self.seed, number=1000 * self.number + s, batch=1, heads=self.heads, kv_heads=self.kv_heads,
            seqlen_q=self.rows[s], seqlen_k=self.keys[s], head_dim=self.head_dim, source=self.source, out=None,
            scaling="token", precision="accurate", alignment=None, smooth_k=False, hadamard=False, scale=self.scale,
            layout="bhsd", values=self.values[s], orders=("bhsd",) * 3, descales=("float",) * 3, lse=True, pick=None,
        )  # fmt: skip


def draw_paged(seed: int, number: int, cells: int) -> PagedCase:
    """Case ``number`` of a seed, of at most ``cells`` scores. The same on every machine."""
    r = random.Random(f"paged {seed}/{number}")
    kv_heads, group = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2, 4, 5, 8, 16))
    rows, keys = _lengths(r)
    while kv_heads * group * sum(m * n for m, n in zip(rows, keys, strict=True)) > cells:
        if kv_heads > 1 and r.random() < 0.3:
            kv_heads -= 1
        else:
            keys = [n * 2 // 3 if n == max(keys) else n for n in keys]
    cache = r.choice(CACHES)
    size = r.choice([p for p in PAGE_SIZES if cache not in OWN[:2] or p % 16 == 0])
    new = None
    if r.random() < 0.4:
        new = tuple(min(n, r.choice((0, 1, 1, 3, m, size))) for m, n in zip(rows, keys, strict=True))
    dense = len(set(rows)) == 1 and r.random() < 0.5
    kinds = tuple("normal" if r.random() < 0.5 else r.choice(VALUES) for _ in rows)
    bent = r.random() < 0.25
    case = PagedCase(
        seed=seed, number=number, rows=tuple(rows), keys=tuple(keys), new=new, dense=dense,
        before=0 if dense else r.choice((0, 0, 1, 9)), behind=0 if dense else r.choice((0, 0, 1, 7)),
        poisoned=r.randrange(len(rows)) if r.random() < 0.4 else -1, wild=r.randrange(len(rows)),
        heads=kv_heads * group, kv_heads=kv_heads,
        head_dim=r.choice(KERNEL_DIMS if r.random() < 0.9 else HEAD_DIMS), page_size=size, cache=cache,
        source=r.choice(("bf16", "bf16", "fp16")), causal=r.random() < 0.7,
        window=(r.choice(ENDS), r.choice(ENDS)) if r.random() < 0.4 else (-1, -1),
        softcap=r.choice((0.5, 5.0, 30.0, 50.0)) if bent else 0.0, sinks=r.random() < 0.25,
        scale=r.choice((None, None, None, 0.0, 0.03, 0.2, -0.1)), splits=r.choice((0, 0, 1, 1, 2, 5, 32)),
        descales=r.choice(DESCALES), values=kinds, lse=r.random() < 0.8,
    )  # fmt: skip
    if cache == "rows":  # the cache has as many tokens a row as the longest sequence, and some
        case = replace(case, page_size=max(case.keys) + 1 + case.number % 5)
    return case


def _lengths(r: random.Random) -> tuple[list[int], list[int]]:
    """Query tokens and keys of each sequence."""
    kind, of_rows, count = r.choice(LENGTHS), r.choice(ROWS), r.randint(1, 7)
    if kind == "edges":
        keys = [r.choice(EDGES) for _ in range(count)]
    elif kind == "log-normal":
        keys = [min(4000, int(r.lognormvariate(5, 1.3))) for _ in range(count)]
    elif kind == "equal":
        keys = [r.choice(EDGES)] * count
    elif kind == "one huge":
        keys = [*(r.randint(0, 3) for _ in range(count)), r.randint(2000, 5000)]
    else:
        keys = [r.randint(0, 5) for _ in range(3 * count)]
    if of_rows == "decode":
        return [1] * len(keys), keys
    if of_rows == "speculative":
        same = r.randint(1, 16)
        return [same if r.random() < 0.8 else r.randint(0, 16) for _ in keys], keys
    return [r.choice((0, 1, 1, 2, 17, 40, 70)) for _ in keys], keys
