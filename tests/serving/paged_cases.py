"""Batches in a poisoned paged cache, and attention over them in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8cutlass import PagedKVCache, attention_with_kvcache
from fp8cutlass.accuracy.reference import Reference
from fp8cutlass.accuracy.ztest import z_scores
from fp8cutlass.emulator.decode import queries

POISON = 0xFF  # as e4m3 and as float32 a NaN
# Relative L2 against float64 of an output in its dtype: rounding it costs 2^-9 / sqrt(3) or 2^-12 / sqrt(3) on average
# over an octave times 1.5, rounding P 0.0002.
ROUNDING = {torch.bfloat16: 0.0020, torch.float16: 0.0006}


def rope64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (T, H, D) turned by a matrix product of complex numbers, rounded to the dtype of x."""
    half = cos.shape[1]
    angle = torch.complex(cos.double(), sin.double())[at][:, None]
    y = x.double().clone()
    one, two = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    turned = torch.complex(y[..., one], y[..., two]) * angle
    y[..., one], y[..., two] = turned.real, turned.imag
    return y.to(x.dtype)


def attention64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Reference:
    """One sequence in float64: q (S, H, D), k and v (N, Hkv, D), row i at key ``i + N - S``."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q64 = q.double().transpose(0, 1)[None] * scale
    k64, v64 = (x.double().transpose(0, 1).repeat_interleave(group, 0)[None] for x in (k, v))
    logits = q64 @ k64.transpose(-1, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    own, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if right >= 0:
        seen &= key <= own + right
    if left >= 0:
        seen &= key >= own - left
    logits = logits.masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1) if keys else torch.full(q64.shape[:3], -math.inf, dtype=torch.float64)
    if sinks is not None:
        lse = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks.double()[None, :, None]))
    probabilities = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return Reference(probabilities @ v64, lse, probabilities, v64, 0.0, q64, k64)


@dataclass
class Batch:
    """Sequences in a cache. ``k`` and ``v`` are what was appended, (keys, Hkv, D) of each; ``rows`` query tokens."""

    cache: PagedKVCache
    table: torch.Tensor
    keys: list[int]
    rows: list[int]
    q: torch.Tensor  # (sum of rows, H, D)
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.keys, dtype=torch.int32)

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(self.rows).cumsum(0).tolist()], dtype=torch.int32)

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Out (T, H, D) and LSE (H, T)."""
        given = {"page_table": self.table, "cache_seqlens": self.lengths, "cu_seqlens_q": self.ends, **options}
        out, lse = attention_with_kvcache(self.q, self.cache, return_lse=True, **self.options, **given)
        return out, lse

    def references(self, **options: Any) -> list[Reference]:
        """Of each sequence, from the dequantised cache and Q as the kernel holds it."""
        options = self.options | options
        left, right = options.pop("window_size", (-1, -1))
        right = 0 if options.pop("causal", True) else right
        options.pop("num_splits", None)
        scale = options.pop("softmax_scale", self.q.shape[2] ** -0.5)
        q16, descale = queries(self.q)
        q = q16.double() * descale.double()
        k, v = self.cache.dequantise(self.table, self.lengths, options.pop("layer", 0))
        found, begin = [], 0
        for s, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
            one = (x[s, :, :keys].transpose(0, 1) for x in (k, v))
            found.append(attention64(q[begin : begin + rows], *one, scale, left, right, **options))
            begin += rows
        return found


def make(
    keys: list[int],
    rows: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    *,
    dtype: torch.dtype = torch.float16,
    page_size: int = 64,
    spare: int = 3,
    seed: int = 0,
    deviation: float = 1.0,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Batch:
    """A cache whose pages are poisoned, then filled in a random order of pages, and queries."""
    random = torch.Generator().manual_seed(seed)

    def draw(tokens: int, count: int, size: float = 1.0) -> torch.Tensor:
        return (size * torch.randn(tokens, count, head_dim, generator=random)).to(dtype)

    most = max([-(-n // page_size) for n in keys] or [0]) + 1  # of each row of the table; the last is never read
    needed = sum(-(-n // page_size) for n in keys)
    if arguments.get("format", "native") != "native":
        arguments.setdefault("k_descale", torch.linspace(0.01, 0.02, heads[1]))
        arguments.setdefault("v_descale", torch.linspace(0.02, 0.01, heads[1]))
    elif arguments.get("v_scale") != "pow2":
        arguments.setdefault("v_descale", torch.linspace(0.02, 0.01, heads[1]))
    cache = PagedKVCache(needed + spare, heads[1], head_dim, page_size, **arguments)
    assert cache.pages is not None
    cache.pages.fill_(POISON)
    order = torch.randperm(needed + spare, generator=random).tolist()
    table = torch.full((len(keys), most), 2**30, dtype=torch.int32)
    for s, n in enumerate(keys):
        for i in range(-(-n // page_size)):
            table[s, i] = order.pop()
    k, v = [draw(n, heads[1], deviation) for n in keys], [draw(n, heads[1], deviation) for n in keys]
    batch = Batch(cache, table, keys, rows, draw(sum(rows), heads[0]), k, v, options or {})
    cache.append(torch.cat(k), torch.cat(v), torch.cat([slots(batch, s) for s in range(len(keys))]))
    return batch


def slots(batch: Batch, s: int, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Of keys ``first`` to ``last`` of sequence s."""
    size, key = batch.cache.page_size, torch.arange(first, batch.keys[s] if last is None else last)
    return batch.table[s].long()[key // size] * size + key % size


def refusals(out: torch.Tensor, lse: torch.Tensor, references: list[Reference], rows: list[int]) -> list[str]:
    """Everything in which an output (T, H, D) and its LSE (H, T) miss their gates."""
    missed, scores, begin = [], [], 0
    for s, (reference, count) in enumerate(zip(references, rows, strict=True)):
        one, log_sum = out[begin : begin + count].transpose(0, 1)[None], lse[None, :, begin : begin + count]
        begin += count
        dead = reference.lse == -math.inf
        if not torch.equal(log_sum == -math.inf, dead):
            missed.append(f"sequence {s}: the LSE is -inf elsewhere")
        elif not bool(((log_sum - reference.lse).abs()[~dead] < 2e-3).all()):
            missed.append(f"sequence {s}: LSE off by {float((log_sum - reference.lse).abs()[~dead].max()):.3g}")
        if not bool((one[dead] == 0).all()):
            missed.append(f"sequence {s}: a row that sees nothing is not 0")
        if dead.all():
            continue
        z = z_scores(one, reference, "f16")[~dead]
        scores.append(z.flatten())
        error = float((one.double() - reference.out).norm() / reference.out.norm())
        if not error <= ROUNDING[out.dtype]:
            missed.append(f"sequence {s}: relative L2 {error:.3g} > {ROUNDING[out.dtype]}")
    z = torch.cat(scores) if scores else torch.zeros(1)
    # One draw of many elements: its rms and mean scatter, too.
    rms, most, mean = float(z.square().mean().sqrt()), float(z.abs().max()), float(z.mean())
    free = 4 / math.sqrt(z.numel())
    for name, value, limit in (("rms", rms, 1.1 + free), ("max", most, 7.0), ("mean", abs(mean), max(0.03, free))):
        if not value <= limit:
            missed.append(f"z {name} {value:.3g} > {limit:.3g}")
    return missed


def check(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run, and hold the outputs to the gates."""
    out, lse = batch.run(**options)
    assert refusals(out, lse, batch.references(**options), batch.rows) == []
    return out, lse
