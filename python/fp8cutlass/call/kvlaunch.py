"""Attention over a paged cache on a card: where there may be long chunks, the kernels that take these; then the kernel
of decode that cuts the work, and the one that does it. No number of the device is waited for, and no operation of torch
is between a call's arguments and its launches."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..choose.target import Target, device_of, target
from ..dtypes import OUT_NAMES
from ..errors import NoKernelError
from ..manifest import Decode
from ..native.decode import Caches, attend, kernel_for, prefill, uncut
from ..tracing import constant
from .kvprefill import LEAST, Chunks, prefill_for
from .launch import score_amax

ROW_BYTES = 8  # to which rows of Q are aligned
CHUNK_BYTES = 16  # the same where the copy engine reads them


@constant
def unserved(kind: str, index: int | None, head_dim: int) -> tuple[str, ...]:
    """The reasons why no kernel serves a device, none if one does. The CPU runs the emulator."""
    if kind == "cpu":
        return ()
    if kind != "cuda":
        return (f"attention_with_kvcache has no kernel for {kind}",)
    try:
        at = target(device_of(kind, index))
        kernel_for(at.directory, at.arch, head_dim, 1)
    except NoKernelError as error:
        return error.reasons
    return ()


def rows_of(tokens: int, sequences: int, group: int, most: int | None, routed: bool = False) -> int:
    """Rows of a unit that the call has use for: ``most`` tokens of a sequence, or the mean. Where long chunks are
    ``routed`` to other kernels, what is left are mostly steps of one token."""
    if routed:
        return group
    mean = -(-tokens // max(sequences, 1))
    return group * max(1, min(tokens, mean if most is None else most))


def kernel_of(
    at: Target,
    head_dim: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    sequences: int,
    most_q: int | None,
    routed: bool = False,
) -> tuple[Decode, int]:
    """The kernel of decode that a call gets, and its number. NoKernelError where there is none."""
    rows = rows_of(tokens, sequences, heads // kv_heads, most_q, routed)
    return kernel_for(at.directory, at.arch, head_dim, rows, few=sequences * kv_heads < at.sm_count)


def launch(
    at: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor | float, torch.Tensor | float],
    page_table: torch.Tensor | None,
    used: torch.Tensor,
    cu_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    most_q: int | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    share: bool,
    return_lse: bool,
    work: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out (T, H, D) and the LSE (H, T). Tensors are those of ``KVCall``; ``sinks`` are (H,) or (H, T). T, the sequences
    and the table are not empty. ``work``: of a plan for such a call; else the work is cut first, and so it is of what
    long chunks leave."""
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[2]
    room = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    chunks = Chunks(
        tokens, used.shape[0], most_q, room, kv_heads, head_dim, OUT_NAMES[q.dtype], left, right, softcap > 0,
        sinks is not None, 0 if share else 1,
    )  # fmt: skip
    part, _ = prefill_for(at, chunks)
    kernel, number = kernel_of(at, head_dim, heads, kv_heads, tokens, used.shape[0], most_q, part is not None)
    # What kernels cannot read as it lies is copied: nothing, where tensors come from a projection or from torch.
    used, cu_q = used.contiguous(), None if cu_q is None else cu_q.contiguous()
    if page_table is not None and page_table.stride(1) != 1 and page_table.shape[1] > 1:
        page_table = page_table.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    shares, held = uncut(kernel, number, at.sm_count, share=share), caches(k, v, *descales)
    if part is None:
        return attend(
            replace(shares, memory=work), readable(q), held, page_table, used, cu_q, scale=scale, left=left,
            right=right, softcap=softcap, sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
    q, shares = readable(q, CHUNK_BYTES), replace(shares, routed=True)
    out, lse, rest = prefill(
        shares, part.number, q, held, page_table, used, cu_q, scale=scale, left=left, right=right,
        return_lse=return_lse, score_amax=score_amax(part.kernel), least=LEAST, most=part.most, capacity=part.capacity,
    )  # fmt: skip
    return attend(
        shares, q, held, page_table, rest, cu_q, scale=scale, left=left, right=right, softcap=softcap, sinks=sinks,
        into=(out, lse),
    )  # fmt: skip


def caches(
    k: torch.Tensor, v: torch.Tensor, k_descale: torch.Tensor | float, v_descale: torch.Tensor | float
) -> Caches:
    """By where the descales are: in the pages, or beside them."""
    if isinstance(k_descale, torch.Tensor) and isinstance(v_descale, torch.Tensor) and k_descale.dim() == 3:
        return Caches(k, v, 1.0, 1.0, k_descale, v_descale)
    return Caches(k, v, k_descale, v_descale, None, None)


def readable(q: torch.Tensor, alignment: int = ROW_BYTES) -> torch.Tensor:
    """(T, H, D) with rows that kernels can read."""
    steps = [step * q.element_size() for step, size in zip(q.stride()[:2], q.shape, strict=False) if size > 1]
    if q.stride(2) == 1 and not any(step % alignment for step in (*steps, q.data_ptr())):
        return q
    return q.clone(memory_format=torch.contiguous_format)
