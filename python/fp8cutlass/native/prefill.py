"""The launch of what serves long chunks of queries over a paged cache: the kernel that chooses sequences, the one that
copies their keys, the plan of a ragged batch, and attention. No number is waited for, and all can be captured."""

from __future__ import annotations

import torch

from . import extension
from .decode import Caches, window_end


def prefill(
    number: int,
    q: torch.Tensor,
    caches: Caches,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    cu_q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    score_amax: float,
    scale: float,
    left: int,
    right: int,
    least: int,
    most: int,
    capacity: int,
) -> torch.Tensor:
    """Write the rows of ``out`` (tokens, H, D) and ``lse`` (H, tokens) of the sequences that are chosen, by variant
    ``number``. Q's rows begin at multiples of 16 bytes.

    Returns the lengths for the kernels of decode, (sequences,) int32: negative where a sequence is none of theirs.
    """
    extension.load()
    rest = torch.empty_like(lengths)
    torch.ops.fp8cutlass_C.prefill(
        number, q, caches.k, caches.v, caches.k_token, caches.v_page, caches.k_descale, caches.v_descale, page_table,
        lengths, cu_q, out, lse, rest, score_amax, scale, window_end(left), window_end(right), least, most, capacity,
    )  # fmt: skip
    return rest
