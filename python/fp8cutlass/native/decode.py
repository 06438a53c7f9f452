"""The kernels of decode: which one serves a call, its work, its launch. Lengths stay on the device: no number is waited
for, and what is launched can be captured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import NoKernelError
from ..manifest import Decode, load_manifest
from . import extension

FAR = 1 << 30  # a window's end that no length reaches
OVERHEAD = 4  # what a unit costs beside its tiles, in tiles; a guess that no card has judged
CUT_WORDS = 12  # of decode::Cut


@lru_cache(maxsize=1024)
def kernel_for(directory: Path, arch: str, head_dim: int, rows: int) -> tuple[Decode, int]:
    """The kernel with the fewest rows a unit that holds ``rows``, else the one with the most, and its number.

    NoKernelError lists the head_dims of the architecture.
    """
    manifest = load_manifest(directory)
    there = [
        (d.rows, number)
        for number, d in enumerate(manifest.decodes)
        if (arch, head_dim) == (d.arch, d.head_dim) and not d.candidate
    ]
    if not there:
        served = sorted({d.head_dim for d in manifest.decodes if d.arch == arch})
        raise NoKernelError(
            f"decode on {arch} in profile {manifest.profile!r} has head_dim {', '.join(map(str, served)) or 'none'}, "
            f"got {head_dim}"
        )
    enough = [x for x in there if x[0] >= rows]
    number = min(enough)[1] if enough else max(there)[1]
    return manifest.decodes[number], number


@dataclass(frozen=True)
class Work:
    """How the units of a batch are cut into shares, one a CTA. Good for every layer of a step whose calls have the same
    lengths, heads, window and page size. Calls that share it must not run at the same time."""

    kernel: Decode
    number: int
    cuts: torch.Tensor  # (CTAs + 1, 8) int32
    arrived: torch.Tensor  # (CTAs,) int32, zero between calls
    parts: torch.Tensor  # (CTAs, 2, part_floats) float32
    routed: bool = False  # sequences of negative length are another kernel's


def cut(
    kernel: Decode,
    number: int,
    sm_count: int,
    lengths: torch.Tensor,
    cu_q: torch.Tensor,
    *,
    tokens: int,
    most_keys: int,
    heads: int,
    kv_heads: int,
    left: int,
    right: int,
    share: bool,
    routed: bool = False,
) -> Work:
    """Launch the kernel that cuts the work. ``share``: whether CTAs may share a unit; else results of a sequence do not
    depend on the others. ``routed``: sequences of negative length are another kernel's."""
    extension.load()
    ctas, device = sm_count * kernel.ctas_per_sm, lengths.device
    cuts = torch.empty(ctas + 1, CUT_WORDS, dtype=torch.int32, device=device)
    arrived = torch.empty(ctas, dtype=torch.int32, device=device)
    parts = torch.empty(ctas, 2, kernel.part_floats, device=device)
    torch.ops.fp8cutlass_C.cut(
        number,
        lengths,
        cu_q,
        tokens,
        most_keys,
        heads,
        kv_heads,
        window_end(left),
        window_end(right),
        OVERHEAD,
        share,
        cuts,
        arrived,
        routed,
    )
    return Work(kernel, number, cuts, arrived, parts, routed)


def window_end(keys: int) -> int:
    """Of keys before or after a row's own, -1 for all: the kernels' number."""
    return FAR if keys < 0 else min(keys, FAR)


@dataclass(frozen=True)
class Caches:
    """K and V as they lie, and their descales."""

    k: torch.Tensor  # (pages, page_size, Hkv, D) uint8, the bytes of e4m3, strides of whole 16 bytes
    v: torch.Tensor
    k_descale: torch.Tensor  # (1,), (Hkv,) or (sequences, Hkv) float32
    v_descale: torch.Tensor
    k_token: torch.Tensor | None  # (pages, page_size, Hkv) float32, any strides: of each token and head
    v_page: torch.Tensor | None  # (pages, Hkv) float32, any strides: of each page and head


def attend(
    work: Work,
    q: torch.Tensor,
    caches: Caches,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_q: torch.Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    into: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel: out (tokens, H, D) of q's dtype, and the natural LSE (H, tokens).

    ``work`` was cut for these lengths, heads, window and page table. ``sinks``: (H,) or (H, tokens) float32. ``into``:
    what is written and returned, by :func:`empty` where there is none.
    """
    out, lse = empty(q, return_lse) if into is None else into
    torch.ops.fp8cutlass_C.decode(
        work.number, q, caches.k, caches.v, caches.k_token, caches.v_page, caches.k_descale, caches.v_descale,
        page_table, lengths, cu_q, sinks, out, lse, work.cuts, work.arrived, work.parts, scale, softcap,
        window_end(left), window_end(right), work.routed,
    )  # fmt: skip
    return out, lse


def empty(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for the results of q (tokens, H, D): out of its dtype, and the LSE (H, tokens) float32 where wanted."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[1], q.shape[0], device=q.device) if return_lse else None
