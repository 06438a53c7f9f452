"""Attention over a paged cache in torch: the specification of the decode kernels.
docs/design/numerics.md has it in words.

Q is kept in f16 relative to a power of two of its row. K and V are e4m3, which f16 holds exactly. Scores, softmax and O
are float32. P is rounded to f16. A split makes a :class:`Part`, and :func:`merge` adds parts in their order.

Not modelled: tiles of another size than TILE, the last bits of the card's exp2, and where its CTAs cut the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .softmax import row_max

TILE = 64  # keys; the running maximum rises from tile to tile
P_BIAS = 15.0  # P is 2^15 in a row's maximum: in f16, what is 2^-39 of it still counts
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence that share K and V: R = T * H / Hkv of them for each of Hkv heads."""

    q: torch.Tensor  # (Hkv, R, D) float32 that f16 holds
    slope: torch.Tensor  # (Hkv, R, 1): q_descale * scale
    first: torch.Tensor  # (R, 1): the first key that each row sees, and the last; the row sees none if they cross
    last: torch.Tensor
    softcap: float  # 0 for none


@dataclass(frozen=True)
class Keys:
    """What the rows attend, float32 that e4m3 holds, and its descales."""

    k: torch.Tensor  # (Hkv, N, D)
    v: torch.Tensor  # (Hkv, N, D)
    k_descale: torch.Tensor  # (Hkv, N), or (Hkv, 1) where all keys share it
    v_descale: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Attention over some keys, not normalised: ``2^(top - P_BIAS)`` times ``out`` and ``total``; top is -inf where a
    row saw no key."""

    out: torch.Tensor  # (Hkv, R, D)
    top: torch.Tensor  # (Hkv, R, 1), octaves
    total: torch.Tensor  # (Hkv, R, 1)


def queries(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q (..., D) as values of f16 in float32, and the float32 descale of each row (..., 1): the power of two of its
    largest magnitude, 2^-126 to 2^126."""
    x = q.float()
    most = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1, keepdim=True)
    descale = torch.exp2(torch.frexp(most).exponent.float() - 1).clamp(2.0**-126, 2.0**126)
    descale = torch.where(most > 0, descale, 2.0**-126)
    return (x / descale).half().float(), descale


def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(T, H, C) to (Hkv, T * H / Hkv, C): the row of a token and a head of the group."""
    tokens, heads, columns = x.shape
    return x.view(tokens, kv_heads, heads // kv_heads, columns).transpose(0, 1).reshape(kv_heads, -1, columns)


def ungrouped(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Undo :func:`grouped`."""
    kv_heads, rows, columns = x.shape
    return x.view(kv_heads, tokens, rows // max(tokens, 1), columns).transpose(0, 1).reshape(tokens, -1, columns)


def logits(scores: torch.Tensor, slope: torch.Tensor, softcap: float) -> torch.Tensor:
    """Exponents of 2: scaled scores, capped where there is a cap."""
    if not softcap:
        return scores * (slope * LOG2E)
    return (softcap * LOG2E) * torch.tanh(scores * (slope / softcap))


def values(p: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """P V, where a NaN in V reaches the rows that see its key and no others."""
    broken = v.isnan()
    out = p @ v.masked_fill(broken, 0.0)
    if bool(broken.any()):
        out = out.masked_fill(seen.to(out.dtype) @ broken.to(out.dtype) > 0, torch.nan)
    return out


def attend(rows: Rows, keys: Keys, begin: int, end: int) -> Part:
    """One split: the tiles ``begin`` to ``end`` of TILE keys, in order."""
    out = torch.zeros_like(rows.q)
    total = torch.zeros_like(rows.slope)
    top = torch.full_like(rows.slope, -torch.inf)
    largest = torch.zeros_like(keys.v_descale[:, :1, None])  # descale of V so far, which O lacks
    for tile in range(begin, end):
        of = slice(tile * TILE, (tile + 1) * TILE)
        k, v = keys.k[:, of], keys.v[:, of]
        k_descale, v_descale = (d if d.shape[1] == 1 else d[:, of] for d in (keys.k_descale, keys.v_descale))
        key = torch.arange(of.start, of.start + k.shape[1], device=k.device)
        seen = (key >= rows.first) & (key <= rows.last)
        x = logits((rows.q @ k.transpose(1, 2)) * k_descale[:, None], rows.slope, rows.softcap)
        x = x.masked_fill(~seen, -torch.inf)
        most, dead = row_max(x)
        risen = torch.maximum(top, most.masked_fill(dead, -torch.inf))
        base = risen.masked_fill(risen == -torch.inf, 0.0)
        p = torch.exp2((x - base) + P_BIAS)
        shrink = torch.exp2(top - base)
        if v_descale.shape[1] > 1:  # those of keys that no row sees do not count
            v_descale = v_descale.masked_fill(~seen.any(0), 0.0)
        larger = torch.maximum(largest, v_descale.amax(1)[:, None, None])
        share = torch.where(larger > 0, v_descale[:, None] / larger, 0.0)
        shrunk = torch.where(larger > 0, largest / larger, 0.0)
        out = out * (shrink * shrunk) + values((p * share).half().float(), v, seen)
        total = total * shrink + p.sum(-1, keepdim=True)
        top, largest = risen, larger
    return Part(out * largest, top, total)


def merge(parts: list[Part]) -> Part:
    """Add the parts of a row, in the order of the list, in float32."""
    top = torch.stack([part.top for part in parts]).amax(0)
    base = top.masked_fill(top == -torch.inf, 0.0)
    out, total = torch.zeros_like(parts[0].out), torch.zeros_like(parts[0].total)
    for part in parts:
        weight = torch.exp2(part.top - base)
        out = out + weight * part.out
        total = total + weight * part.total
    return Part(out, top, total)


def finish(part: Part, sinks: torch.Tensor | None, shift: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (Hkv, R, D) and LSE (Hkv, R, 1), natural: 0 and -inf for a row that saw no key.

    ``sinks`` (Hkv, R, 1) are logits without a value, which join the sum once. ``shift`` (Hkv, R, 1) is what every
    logit of a row lacks, because a vector was subtracted from all keys.
    """
    out, top, total = part.out, part.top, part.total
    dead = total == 0
    if sinks is not None:
        sink = (sinks if shift is None else sinks - shift) * LOG2E
        higher = torch.maximum(top, sink).masked_fill(dead, 0.0)
        shrink = torch.exp2(top - higher)
        out, total = out * shrink, total * shrink + torch.exp2(sink - higher + P_BIAS)
        top = higher
    lse = LN2 * (top - P_BIAS + torch.log2(total))
    lse = lse if shift is None else lse + shift
    return (out / total).masked_fill(dead, 0.0), lse.masked_fill(dead, -torch.inf)


def ranges(rows: Rows, keys: int, splits: int) -> list[tuple[int, int]]:
    """The tiles of each split: those that any row sees, cut into ``splits`` runs of equal length but for the last."""
    begin = min(max(int(rows.first.min()), 0), keys) // TILE
    end = -(-min(max(int(rows.last.max()) + 1, 0), keys) // TILE)
    length = -(-max(end - begin, 0) // splits)
    return [(min(begin + i * length, end), min(begin + (i + 1) * length, end)) for i in range(splits)]


def decode(
    q: torch.Tensor,
    keys: Keys,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The T query tokens of one sequence over its N keys.

    Args:
        q: (T, H, D), bf16 or fp16, T > 0; the last token stands at the last key.
        left, right: row i sees that many keys before and after ``i + N - T``, its own; -1 for all.
        softcap: logits x become ``softcap * tanh(x / softcap)``; 0 leaves them.
        sinks: (H,) float32; shift: (T, H) float32 (see :func:`finish`).
        splits: parts that the keys are cut into.

    Returns:
        (T, H, D) float32 and the natural LSE (T, H).
    """
    tokens, heads, _ = q.shape
    kv_heads, count = keys.k.shape[:2]
    q16, descale = queries(q)
    own = torch.arange(tokens, device=q.device).repeat_interleave(heads // kv_heads)[:, None] + (count - tokens)
    rows = Rows(
        grouped(q16, kv_heads),
        grouped(descale, kv_heads) * scale,
        own - left if left >= 0 else torch.zeros_like(own),
        own + right if right >= 0 else torch.full_like(own, count),
        softcap,
    )
    whole = merge([attend(rows, keys, *of) for of in ranges(rows, count, splits)])
    logit = None if sinks is None else grouped(sinks.expand(tokens, heads)[..., None], kv_heads)
    moved = None if shift is None else grouped(shift[..., None], kv_heads)
    out, lse = finish(whole, logit, moved)
    return ungrouped(out, tokens), ungrouped(lse, tokens)[..., 0]
