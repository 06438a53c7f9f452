"""Random calls of ``attention_varlen``, each a function of a seed and a number: lengths, what of them is used, windows,
types, memory orders, and what lies where no token counts.

Each sequence is a ``Case`` of its own, which says how its values are made and how its result is judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from fuzz_cases import CAPS, HALF, HEAD_DIMS, SOURCES, VALUES, Case, values_of
from layouts import laid_out

from fp8cutlass.quant.quantize import quantize

EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 512, 513)
LENGTHS = ("edges", "log-normal", "equal", "one huge", "few tokens", "random")
KEYS = ("rows", "rows", "prefix", "apart", "one row")  # lengths of keys: those of rows, longer, others; one row each
ENDS = (-1, -1, 0, 1, 5, 63, 64, 128, 200, 4096)  # of windows
ORDERS = ("bhsd", "bshd", "wide rows", "unaligned")  # of (1, heads, tokens, D): "bshd" is contiguous
DESCALES = ("(1,)", "(sequences, heads)", "(sequences, kv heads)")


@dataclass(frozen=True)
class RaggedCase:
    """A call. ``rows`` and ``keys`` are lengths, ``used_rows`` and ``used_keys`` how many tokens of them count, or
    None. ``before`` and ``behind`` tokens of the tensors belong to no sequence. ``poisoned`` is a sequence of NaN, -1
    for none; so is all that does not count."""

    seed: int
    number: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    used_rows: tuple[int, ...] | None
    used_keys: tuple[int, ...] | None
    before: int
    behind: int
    poisoned: int
    heads: int
    kv_heads: int
    head_dim: int
    source: str
    out: str | None
    precision: str
    causal: bool
    window: tuple[int, int]
    alignment: str
    scale: float | None
    values: tuple[str, ...]  # of each sequence
    orders: tuple[str, str, str]
    descales: str
    lse: bool
    softcap: float = 0.0
    sinks: bool = False

    @property
    def half(self) -> bool:
        return self.source in HALF

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def counted(self) -> list[tuple[int, int]]:
        """Rows and keys of each sequence that count."""
        return list(zip(self.used_rows or self.rows, self.used_keys or self.keys, strict=True))

    @property
    def ends(self) -> tuple[int, int]:
        """The window in force."""
        return self.window[0], 0 if self.causal else self.window[1]

    def begins(self, lengths: tuple[int, ...]) -> list[int]:
        """The elements of cu_seqlens."""
        return list(accumulate(lengths, initial=self.before))

    def sequence(self, s: int) -> Case:
        """What is judged of sequence ``s``: a call of its own."""
        rows, keys = self.counted[s]
        masked = self.ends != (-1, -1)
        return Case(
            seed=self.seed, number=1000 * self.number + s, batch=1, heads=self.heads, kv_heads=self.kv_heads,
            seqlen_q=rows, seqlen_k=keys, head_dim=self.head_dim, source=self.source, out=self.out,
            scaling="block" if self.half else "tensor" if self.descales == "(1,)" else "head",
            precision=self.precision, alignment=self.alignment if masked else None, smooth_k=False, hadamard=False,
            scale=self.scale, layout="bhsd", values=self.values[s], orders=("bhsd",) * 3, descales=("float",) * 3,
            lse=self.lse, pick=None, softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip

    def seen(self, s: int) -> torch.Tensor:
        """(rows, keys) bool: what the rows of a sequence see, from the words of the docstring."""
        rows, keys = self.counted[s]
        left, right = self.ends
        own = torch.arange(rows)[:, None] + (keys - rows if self.alignment == "bottom_right" else 0)
        key = torch.arange(keys)[None]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if left >= 0:
            seen &= key >= own - left
        if right >= 0:
            seen &= key <= own + right
        return seen


def draw_ragged(seed: int, number: int, cells: int) -> RaggedCase:
    """Case ``number`` of a seed, of at most ``cells`` scores. The same on every machine."""
    r = random.Random(f"varlen {seed}/{number}")
    kv_heads, group = r.randint(1, 3), r.choice((1, 1, 2, 4, 5))
    rows, keys = _lengths(r)
    while sum(m * n for m, n in zip(rows, keys, strict=True)) * kv_heads * group > cells:
        if kv_heads * group > 4:
            kv_heads, group = max(1, kv_heads - 1), max(1, group // 2)
        else:
            longest = max(*rows, *keys)
            rows, keys = ([n * 2 // 3 if n == longest else n for n in part] for part in (rows, keys))
    source = r.choice(("bf16", "bf16", "fp16", "e4m3"))

    def used(lengths: list[int]) -> tuple[int, ...] | None:
        return tuple(r.choice((n, n, r.randint(0, n))) for n in lengths) if r.random() < 0.3 else None

    one_kind = r.random() < 0.5
    kinds = tuple("normal" if one_kind or r.random() < 0.4 else r.choice(VALUES) for _ in rows)
    apart = random.Random(f"scores of varlen {seed}/{number}")  # so that cases keep the rest
    softcap, sinks = (
        (apart.choice(CAPS), apart.random() < 0.5) if apart.random() < 0.15 else (0.0, apart.random() < 0.1)
    )
    return RaggedCase(
        softcap=softcap,
        sinks=sinks,
        seed=seed,
        number=number,
        rows=tuple(rows),
        keys=tuple(keys),
        used_rows=used(rows),
        used_keys=used(keys),
        before=r.choice((0, 0, 0, 1, 70)),
        behind=r.choice((0, 0, 1, 130)),
        poisoned=r.randrange(len(rows)) if len(rows) > 1 and r.random() < 0.3 else -1,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=r.choice(HEAD_DIMS),
        source=source,
        out=r.choice((None, None, "bf16", "fp16")),
        precision=r.choice(("fast", "fast", "accurate")),
        causal=r.random() < 0.4,
        window=(r.choice(ENDS), r.choice(ENDS)) if r.random() < 0.6 else (-1, -1),
        alignment=r.choice(("bottom_right", "bottom_right", "top_left")),
        scale=r.choice((None, None, None, None, 0.0, 0.03, 0.2, -0.1)),
        values=kinds,
        orders=(r.choice(ORDERS), r.choice(ORDERS), r.choice(ORDERS)),
        descales=r.choice(DESCALES),
        lse=r.random() < 0.7,
    )


def _lengths(r: random.Random) -> tuple[list[int], list[int]]:
    """Rows and keys of each sequence."""
    kind, count = r.choice(LENGTHS), r.randint(1, 9)

    def some() -> list[int]:
        if kind == "edges":
            return [r.choice(EDGES) for _ in range(count)]
        if kind == "log-normal":
            return [min(1500, int(r.lognormvariate(4.5, 1.2))) for _ in range(count)]
        if kind == "equal":
            return [r.choice(EDGES[1:])] * count
        if kind == "one huge":
            return [*(r.randint(0, 3) for _ in range(count)), 1023]
        if kind == "few tokens":
            return [r.randint(0, 4) for _ in range(4 * count)]
        return [r.randint(0, 300) for _ in range(count)]

    rows, of_keys = some(), r.choice(KEYS)
    if of_keys == "prefix":
        return rows, [n + r.choice((0, 1, 64, 200)) for n in rows]
    if of_keys == "one row":
        return [1] * len(rows), rows
    if of_keys == "apart":
        keys = some()
        r.shuffle(keys)
        return rows, keys
    return rows, list(rows)


@dataclass
class RaggedInputs:
    """q, k and v (tokens, heads, D) as ``attention_varlen`` takes them, on the CPU, and descales of FP8 operands."""

    tensors: list[torch.Tensor]
    descales: list[torch.Tensor] | None


def ragged_inputs(case: RaggedCase) -> RaggedInputs:
    """The tensors of a case: what counts, and NaN around it, in their memory orders."""
    generator = torch.Generator().manual_seed(case.number)
    made = [values_of(case.sequence(s)) for s in range(len(case.rows))]
    given, descales = [], []
    for axis, (order, heads) in enumerate(zip(case.orders, (case.heads, case.kv_heads, case.kv_heads), strict=True)):
        lengths = case.rows if axis == 0 else case.keys
        begins = case.begins(lengths)
        whole = torch.full((begins[-1] + case.behind, heads, case.head_dim), torch.nan).to(SOURCES[case.source])
        parts = [x[axis][0].transpose(0, 1) for x in made]  # (tokens that count, heads, D)
        if not case.half:
            parts, descale = _quantised(parts, case, heads, generator)
            descales.append(descale)
        for s, (begin, part) in enumerate(zip(begins, parts, strict=False)):
            if s != case.poisoned:
                whole[begin : begin + len(part)] = part.to(whole.dtype)
        given.append(laid_out(whole.transpose(0, 1)[None], order)[0].transpose(0, 1))
    if descales and case.descales == "(sequences, kv heads)":  # of Q, shared by the heads that share K and V
        descales[0] = descales[0][:, :: case.heads // case.kv_heads].contiguous()
    return RaggedInputs(given, descales or None)


def _quantised(
    parts: list[torch.Tensor], case: RaggedCase, heads: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """FP8 tokens of each sequence, and descales that differ from sequence to sequence and head to head, or one."""
    if case.descales == "(1,)":
        x8, descale = quantize(torch.cat(parts)[None], granularity="tensor")
        return list(x8[0].split([len(x) for x in parts])), descale
    pairs = [quantize(x[None], granularity="tensor") for x in parts]
    own = torch.stack([descale.expand(heads) for _, descale in pairs])
    return [x8[0] for x8, _ in pairs], own * 2.0 ** (2 * torch.rand(own.shape, generator=generator) - 1)


def descale_of(case: RaggedCase, descale: torch.Tensor, s: int, heads: int) -> torch.Tensor:
    """What multiplies back the heads of sequence ``s``, () or (1, heads, 1, 1)."""
    if descale.dim() == 1:
        return descale[0]
    return descale[s].repeat_interleave(heads // descale.shape[1])[None, :, None, None]


def ragged_sinks(case: RaggedCase) -> torch.Tensor | None:
    """A logit for each head, from far below to above those of most rows."""
    r = random.Random(f"sinks of varlen {case.seed}/{case.number}")
    return torch.tensor([r.uniform(-3, 6) for _ in range(case.heads)]) if case.sinks else None


def unpoisoned(case: RaggedCase) -> RaggedCase:
    """The same call without a sequence of NaN."""
    return replace(case, poisoned=-1)
