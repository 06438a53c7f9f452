"""Writing tokens and pages by numbers that only the device knows: nothing here waits for it.

A number that is out of range is ignored. Where two writes meet, the last one in the batch wins. Both hold because a
write that must not happen is replaced by a copy of one that does, or by what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quant.descale import SMALLEST
from ..quant.quantize import quantize
from .pages import Pages

CHUNK = 256  # pages that are rewritten at a time
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Writes:
    """Where each row of a batch of T > 0 goes, and which row is written there."""

    place: torch.Tensor  # (T,) int64, in range
    source: torch.Tensor  # (T,) int64, rows of the batch
    there: torch.Tensor  # () bool, whether anything is to be written


def plan(wanted: torch.Tensor, limit: int) -> Writes:
    """Of rows that want to go to ``wanted`` (T,) int32 or int64; those outside 0 to ``limit`` - 1 go nowhere."""
    wanted = wanted.long()
    valid = (wanted >= 0) & (wanted < limit)
    key = torch.where(valid, wanted, limit)
    ordered, order = torch.sort(key, stable=True)
    last = torch.searchsorted(ordered, key, right=True) - 1  # of the rows that want the same place
    some = (valid.sum() - 1).clamp(min=0)  # a valid row's position, if there is one
    source = order[torch.where(valid, last, some)]
    place = wanted[source].clamp(0, limit - 1)
    return Writes(place, source, valid.any())


def put(room: torch.Tensor, at: tuple[torch.Tensor, ...], rows: torch.Tensor, writes: Writes) -> None:
    """``room[at] = rows`` of a batch whose rows are chosen already, or nothing where nothing is to be written."""
    room[at] = torch.where(writes.there, rows, room[at])


def append(
    pages: Pages,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    descales: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Quantise and write tokens.

    Args:
        k, v: (T, Hkv, D), bf16, fp16 or float32; or e4m3, which is copied, to pages without descales.
        slots: (T,) int32 or int64, ``page * page_size + position``.
        descales: of K and of V, each float32 (Hkv,) or (T, Hkv). K's is not read where the pages hold it. Without
            one of V it grows in the pages.
    """
    if not k.shape[0]:
        return
    k, v = (x.view(torch.uint8) if x.dtype == E4M3 else x for x in (k, v))
    page_size = pages.k.shape[1]
    writes = plan(slots, pages.k.shape[0] * page_size)
    at = (writes.place // page_size, writes.place % page_size)
    k, v = k[writes.source], v[writes.source]
    given = [None if d is None else d[writes.source] if d.dim() == 2 else d.expand(len(k), -1) for d in descales]
    if pages.k_descale is None:
        k8, _ = by_token(k, given[0])
    else:
        k8, k_descale = by_token(k, None)
        put(pages.k_descale, at, k_descale, writes)
    v_descale = given[1]
    if pages.v_descale is not None:
        v_descale = grown(pages, v, writes) if v_descale is None else v_descale
        put(pages.v_descale, at[:1], v_descale, writes)
    put(pages.k, at, k8.view(torch.uint8), writes)
    put(pages.v, at, by_token(v, v_descale)[0].view(torch.uint8), writes)


def by_token(x: torch.Tensor, descale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of x (T, Hkv, D), and its descales (T, Hkv): found in each token and head, or given. The bytes of e4m3 are
    what they were."""
    if x.dtype == torch.uint8 and descale is not None:
        return x, descale
    given = None if descale is None else descale.t()[None].contiguous()
    x8, made = quantize(x.transpose(0, 1)[None], granularity="token", descale=given)
    return x8[0].transpose(0, 1), made[0].t()


def power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """The least power of two, 2^-126 or more, that takes float32 ``magnitude`` into e4m3; 0 for 0."""
    mantissa, exponent = torch.frexp(magnitude)  # mantissa in [0.5, 1); 448 = 0.875 * 2^9
    octaves = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    return torch.where(magnitude > 0, torch.exp2(octaves.float()).clamp_min(SMALLEST), 0.0)


def grown(pages: Pages, v: torch.Tensor, writes: Writes) -> torch.Tensor:
    """The V descales (T, Hkv) of the pages that v goes to, of powers of two; the pages' older tokens are rewritten by
    them.

    A page that gets its first slot begins anew. Any other keeps its descale, or gets the larger one that v needs. To
    divide an e4m3 number by a power of two is exact but where the result is subnormal.
    """
    if pages.v_descale is None:
        raise RuntimeError("the pages hold no descale of V")
    count, page_size = pages.v.shape[:2]
    page, tokens, heads = writes.place // page_size, *v.shape[:2]
    index = torch.arange(tokens, device=v.device)
    need = power_of_two(torch.where(v.isfinite(), v.abs(), 0).float().amax(-1))
    most = need.new_zeros((count, heads)).scatter_reduce(0, page[:, None].expand(-1, heads), need, "amax")[page]
    opened = (writes.place % page_size == 0).int()
    anew = opened.new_zeros(count).scatter_reduce(0, page, opened, "amax")[page].bool()
    old = torch.where(anew[:, None], 0.0, pages.v_descale[page])
    new = torch.maximum(old, most).clamp_min(SMALLEST)
    shrink = torch.where(old > 0, old / new, 1.0)
    shrink = torch.where(writes.there, shrink, 1.0)
    # One row of the batch rewrites a page, its leader. The others repeat what the first row of their chunk does.
    leads = index.new_full((count,), tokens).scatter_reduce(0, page, index, "amin")[page] == index
    order = torch.sort((~leads).int(), stable=True).indices[: min(tokens, count)]
    for rows in order.split(CHUNK):
        rows = torch.where(leads[rows], rows, rows[0])
        factor = torch.where(leads[rows, None], shrink[rows], 1.0)[:, None, :, None]
        there = pages.v[page[rows]]
        moved = (there.view(E4M3).float() * factor).to(E4M3).view(torch.uint8)
        pages.v[page[rows]] = torch.where(factor == 1.0, there, moved)
    return new
