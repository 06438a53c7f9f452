"""The forward kernels' arithmetic in torch, tile by tile: what CPU tensors run and what every kernel is held to.

The specification is docs/design/numerics.md ("From tile to tile"), which the families share. Not modelled: the order
and width of the tensor core's accumulator inside one product, the last bits of the card's exp2, and the merge of a
cluster that splits the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch

from ..dtypes import OPERANDS, OUT_DTYPES, widened
from ..manifest import Variant, generated_dir, load_manifest
from .scores import add_sinks, capped, lse_of_all, of_rows, unit_slope
from .softmax import E4M3_MAX
from .tile import scores_of, slope_of, tile_of
from .visible import Heads, Mask, Visible

# A tile that outweighs the reference by more than 2^16 becomes the reference. O holds up to V * 2^16 * P * keys, with P
# up to 2^8.3: the more a tile may rise, the sooner a large V overflows where its descale is applied tile by tile.
MAX_RISE = 16.0
CHUNK_BYTES = 1 << 30
BYTES_PER_SCORE = 48  # float32 and float64 temporaries of one tile, measured peak
LN2 = math.log(2.0)


@dataclass
class Diagnostics:
    """The intermediate values that a diagnostic variant writes (DiagnosticOutputs in params.h).

    ``tiles = ceil(Sk / tile_n)``, ``keys = tiles * tile_n``. Unlike the kernel, the emulator also fills in the tiles
    that the mask hides entirely: score -inf, P 0, weight -1e30.
    """

    scores: torch.Tensor  # (B, H, Sq, keys) float32, masked, before the softmax scale
    p: torch.Tensor  # (B, H, Sq, keys) uint8
    weight: torch.Tensor  # (B, H, Sq, tiles) float32
    tile_o: torch.Tensor  # (B, H, tiles, Sq, D) float32, P V before promotion


@dataclass
class Emulation:
    """``out`` (B, H, Sq, D) contiguous in the variant's output type, ``lse`` (B, H, Sq) float32, ``amax`` (1,)
    float32: the largest |o| before the output scale, NaN passed over."""

    out: torch.Tensor
    lse: torch.Tensor
    amax: torch.Tensor
    diagnostics: Diagnostics | None = None


@dataclass
class _Chunk:
    """KV heads flattened with the batch to G groups; the R = H / Hkv * Sq query rows that share one are its rows."""

    q: torch.Tensor  # (G, R, D) float32
    k: torch.Tensor  # (G, Sk, D) float32
    v: torch.Tensor  # (G, Sk, D) float32
    q_slope: torch.Tensor  # (G, R, 1): q_descale * scale * log2(e); with a cap q_descale * scale / softcap
    k_descale: torch.Tensor  # (G, tiles), or (G, Sk) where each token has its own, or (G, 4 blocks) of groups
    v_tile: torch.Tensor | None  # (G, tiles), of a kernel of scaling `block`
    v_token: torch.Tensor | None  # (G, Sk)
    v_column: torch.Tensor  # (G, 1, 1) or (G, 1, D)
    shared_by: dict[str, str]  # granularity of the descales of q, k and v
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # (G, R, 1), in octaves


def emulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    *,
    variant: Variant,
    scale: float,
    scaling: str | None = None,
    causal_offset: int = 0,
    window_offset: int | None = None,
    mask: Mask | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out_descale: torch.Tensor | None = None,
    emulated_mma: bool = False,
    return_lse: bool = True,
    merge_lse: bool = False,
    diagnostics: bool = False,
) -> Emulation:
    """Run one variant.

    Args:
        q: (B, H, Sq, D), of the variant's operands, any strides, any device; k and v: (B, Hkv, Sk, D), not packed.
            Nothing is empty.
        q_descale, k_descale, v_descale: float32, the canonical shapes of the scaling mode, blocks of
            ``variant.key_block`` keys.
        variant: gives tile sizes, softmax, causal and output type.
        scale: softmax scale, >= 0.
        scaling: one of the modes that the variant serves; None is its own.
        causal_offset: key j is visible to row i when ``j <= i + causal_offset``; read by causal variants, and with a
            window.
        window_offset: where there is a window, whatever the variant's mask: ``j >= i + window_offset``, too.
        mask: which keys rows see and which tiles they visit, whatever the variant's mask, beside the band.
        bias: (B, H, Sq, Sk) or sizes of 1, floating point: added to the scaled score; for variants with f32 scores.
        softcap: a logit x becomes ``softcap * tanh(x / softcap)``; 0 leaves it. For float32 scores.
        sinks: (H,) float32: a logit of each head without a value, which joins the sum of exponentials once.
        out_descale: (1,), e4m3 output only: stored = o / out_descale.
        emulated_mma: round f16 scores as the compiler's emulation of FP8 ``mma.sync`` does (sm_90a).
        return_lse: False saves the sum of unquantised exponentials; ``lse`` is then meaningless.
        merge_lse: ``lse`` is that of the quantised exponentials.
        diagnostics: also return the intermediate values; they take several times the memory of the scores.

    The KV tiles of one chunk of heads are visited in order; a chunk is bounded to about 1 GiB of temporaries.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = heads // kv_heads * seqlen_q
    per_group = rows * (variant.tile_n * BYTES_PER_SCORE + 16 * head_dim) + 8 * k.shape[2] * head_dim
    step = max(1, CHUNK_BYTES // per_group)
    groups = batch * kv_heads
    parts = []
    offsets = causal_offset if variant.causal or window_offset is not None else None, window_offset
    for start in range(0, groups, step):
        part = slice(start, min(start + step, groups))
        tensors = (q, k, v, q_descale, k_descale, v_descale)
        chunk = _chunk(tensors, variant, scaling or variant.scaling, unit_slope(scale, softcap, q.device), part)
        chunk.softcap = softcap
        chunk.sinks = None if sinks is None else of_rows(sinks, batch, kv_heads, seqlen_q)[part]
        sizes = Heads(batch, heads, kv_heads, seqlen_q, k.shape[2], part)
        seen = Visible(sizes, variant.tile_m, variant.tile_n, offsets, mask, bias, q.device)
        parts.append(_attend(chunk, variant, seen, emulated_mma, return_lse, merge_lse, diagnostics))
    o, lse, *extra = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    o = o.view(batch, heads, seqlen_q, head_dim)
    amax = o.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax().reshape(1)
    if variant.out == "e4m3":
        # The kernel multiplies by the inverse; NaN passes through clamp.
        o = (o * (1.0 / cast(torch.Tensor, out_descale))).clamp(-E4M3_MAX, E4M3_MAX)
    lse = lse_of_all(lse.view(batch, heads, seqlen_q), sinks)
    result = Emulation(o.to(OUT_DTYPES[variant.out]), lse, amax)
    if diagnostics:
        scores, p, weight, tile_o = extra
        result.diagnostics = Diagnostics(
            scores=scores.view(batch, heads, seqlen_q, -1),
            p=p.view(batch, heads, seqlen_q, -1),
            weight=weight.view(batch, heads, seqlen_q, -1),
            tile_o=tile_o.view(batch, heads, seqlen_q, -1, head_dim).transpose(2, 3).contiguous(),
        )
    return result


def _chunk(
    tensors: tuple[torch.Tensor, ...], variant: Variant, scaling: str, unit: torch.Tensor, part: slice
) -> _Chunk:
    q, k, v, q_descale, k_descale, v_descale = tensors
    # Held below 2^80, an infinite descale would give a plausible result.
    q_descale, k_descale = (x.masked_fill(x.isinf(), torch.nan) for x in (q_descale, k_descale))
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    group, groups, device = heads // kv_heads, batch * kv_heads, q.device
    tile_start = torch.arange(0, seqlen_k, variant.tile_n, device=device)

    shared_by = OPERANDS[variant.dtype].granularity(load_manifest(generated_dir()).scaling[scaling])

    def per_tile(descale: torch.Tensor, granularity: str) -> torch.Tensor:  # (G, tiles)
        if granularity == "tensor":
            return descale.view(1, 1).expand(groups, len(tile_start))
        if granularity == "head":
            return descale.reshape(groups, 1).expand(groups, len(tile_start))
        return descale.reshape(groups, -1)[:, tile_start // variant.key_block]

    if shared_by["q"] == "tensor":
        q_rows = q_descale.view(1, 1, 1).expand(groups, group * seqlen_q, 1)
    elif shared_by["q"] == "head":
        q_rows = q_descale.reshape(groups, group, 1, 1).expand(-1, -1, seqlen_q, 1).reshape(groups, -1, 1)
    else:
        q_rows = q_descale.reshape(groups, -1, 1)
    as_given = shared_by["k"] in ("token", "group")
    k_tiles = k_descale.reshape(groups, -1) if as_given else per_tile(k_descale, shared_by["k"])
    v_tile, v_column, v_token = None, torch.ones(groups, 1, 1, device=device), None
    if shared_by["v"] == "token":
        v_token = v_descale.reshape(groups, -1)[part]
    elif shared_by["v"] == "channel":
        v_column = v_descale.reshape(groups, 1, head_dim)
    elif variant.family == "sm90a" or v_descale.numel() > groups:  # applied tile by tile; by sm89 where tiles differ
        v_tile = per_tile(v_descale, shared_by["v"])[part]
    else:
        v_column = per_tile(v_descale, shared_by["v"])[:, :1, None]
    return _Chunk(
        q=widened(q.reshape(groups, group * seqlen_q, head_dim)[part]),
        k=widened(k.reshape(groups, seqlen_k, head_dim)[part]),
        v=widened(v.reshape(groups, seqlen_k, head_dim)[part]),
        q_slope=(q_rows * unit)[part],
        k_descale=k_tiles[part],
        v_tile=v_tile,
        v_token=v_token,
        v_column=v_column[part],
        shared_by=shared_by,
    )


def _attend(
    chunk: _Chunk,
    variant: Variant,
    seen: Visible,
    emulated_mma: bool,
    return_lse: bool,
    merge_lse: bool,
    diagnostics: bool,
) -> tuple[torch.Tensor, ...]:
    """Return o (G, R, D) float32 and lse (G, R), then with ``diagnostics`` scores and p (G, R, keys), weight
    (G, R, tiles) and tile_o (G, R, tiles, D)."""
    tile_n = variant.tile_n
    k_per_token = chunk.shared_by["k"] == "token"
    v_per_channel = chunk.shared_by["v"] == "channel"
    o = torch.zeros_like(chunk.q)
    row_sum = torch.zeros_like(chunk.q_slope)
    exact_sum, ref = torch.zeros_like(row_sum), torch.zeros_like(row_sum)
    keys = chunk.k.shape[1] if diagnostics else seen.end
    kept: list[tuple[torch.Tensor, ...]] = []
    for tile, start in enumerate(range(0, keys, tile_n)):
        part = slice(start, start + tile_n)
        s = scores_of(chunk.q, chunk.k[:, part], variant.score, emulated_mma)
        if k_per_token:
            s = s * chunk.k_descale[:, None, part]
        slope = slope_of(s, chunk.q_slope, chunk.k_descale, chunk.shared_by["k"], variant, tile)
        s, slope = capped(s, slope, chunk.softcap)
        s, slope = seen.biased(s, slope, start)
        s = seen.hide(s, start)
        v_token = None if chunk.v_token is None else chunk.v_token[:, part]
        made = tile_of(s, slope, chunk.v[:, part], v_token, variant.softmax, return_lse and not merge_lse)
        tile_o, weight = made.product, made.weight
        if diagnostics:
            kept.append((s, made.p, weight, tile_o[:, :, None]))
        ref = torch.where(seen.begin == tile, weight, ref)
        rise = weight - ref
        shrink = torch.where(rise > MAX_RISE, torch.exp2(-rise), 1.0)
        ref = torch.where(rise > MAX_RISE, weight, ref)
        beta = torch.exp2(weight - ref)
        factor = beta if chunk.v_tile is None else beta * chunk.v_tile[:, tile, None, None]
        visited = seen.visited(tile)
        o = o * shrink + torch.where(visited, factor * tile_o, 0.0)
        row_sum = row_sum * shrink + torch.where(visited, beta * made.total, 0.0)
        exact_sum = exact_sum * shrink + torch.where(visited, beta * made.exact, 0.0)
    total = row_sum if merge_lse else exact_sum
    lse = torch.where(total == 0, -torch.inf, LN2 * (ref + torch.log2(total)))
    if chunk.sinks is not None:
        row_sum = add_sinks(row_sum, ref, chunk.sinks, variant.softmax)
    # A row that saw no key is 0, even where a NaN in V met its zeros.
    o = torch.where(row_sum == 0, 0.0, o * ((1.0 if v_per_channel else chunk.v_column) / row_sum))
    if v_per_channel:
        o = o * chunk.v_column
    return o, lse.squeeze(-1), *_joined(kept, tile_n)


def _joined(kept: list[tuple[torch.Tensor, ...]], tile_n: int) -> tuple[torch.Tensor, ...]:
    if not kept:
        return ()
    scores, p, weight, tile_o = (list(column) for column in zip(*kept, strict=True))
    missing = tile_n - scores[-1].shape[-1]
    scores[-1] = torch.nn.functional.pad(scores[-1], (0, missing), value=-torch.inf)
    p[-1] = torch.nn.functional.pad(p[-1], (0, missing))
    return torch.cat(scores, -1), torch.cat(p, -1), torch.cat(weight, -1), torch.cat(tile_o, 2)
