"""Attention over a paged cache on a card: where there may be long chunks, the kernels that take these; then the kernel
of decode that cuts the work, and the one that does it. No number of the device is waited for."""

from __future__ import annotations

import torch

from ..choose.target import Target, device_of, target
from ..dtypes import OUT_NAMES
from ..errors import NoKernelError
from ..native.decode import Caches, attend, cut, empty, kernel_for
from ..native.prefill import prefill
from ..tracing import constant
from .kvprefill import LEAST, Chunks, prefill_for
from .launch import score_amax

ROW_BYTES = 16  # to which rows of Q are aligned


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


def launch(
    at: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    used: torch.Tensor,
    cu_q: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    most_q: int | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    share: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out (T, H, D) and the LSE (H, T). Tensors are those of ``KVCall``; ``sinks`` are (H,) or (H, T). T, the sequences
    and the table are not empty."""
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[2]
    most_keys = page_table.shape[1] * k.shape[1]
    chunks = Chunks(
        tokens, used.shape[0], most_q, most_keys, kv_heads, head_dim, OUT_NAMES[q.dtype], left, right, softcap > 0,
        sinks is not None, 0 if share else 1,
    )  # fmt: skip
    part, _ = prefill_for(at, chunks)
    rows = rows_of(tokens, used.shape[0], heads // kv_heads, most_q, part is not None)
    kernel, number = kernel_for(at.directory, at.arch, head_dim, rows)
    used, cu_q, page_table = used.contiguous(), cu_q.contiguous(), page_table.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    q = q.contiguous()
    q = q if q.data_ptr() % ROW_BYTES == 0 else q.clone()
    if descales[0].dim() == 3:
        one = descales[0].new_ones(1)
        caches = Caches(k, v, one, one, *descales)
    else:
        caches = Caches(k, v, descales[0].contiguous(), descales[1].contiguous(), None, None)
    into = empty(q, return_lse)
    if part is not None:
        used = prefill(
            part.number, q, caches, page_table, used, cu_q, *into, score_amax=score_amax(part.kernel), scale=scale,
            left=left, right=right, least=LEAST, most=part.most, capacity=part.capacity,
        )  # fmt: skip
    # Nothing between the two launches, so that the second begins while the first ends.
    work = cut(
        kernel, number, at.sm_count, used, cu_q, tokens=tokens, most_keys=most_keys, heads=heads, kv_heads=kv_heads,
        left=left, right=right, share=share, routed=part is not None,
    )  # fmt: skip
    return attend(
        work, q, caches, page_table, used, cu_q, scale=scale, left=left, right=right, softcap=softcap, sinks=sinks,
        into=into,
    )  # fmt: skip
