"""What a known call of ``attention_with_kvcache`` does first where it appends: one launch, of which everything but
tensors is known. Tokens go to a ``PagedKVCache`` in 16 bits. That launch turns keys, torch operations queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..cache.held import Held
from ..cache.paged import PagedKVCache
from ..dtypes import HALF_DTYPES
from ..native import append as kernel
from ..native import extension
from .kvlaunch import ROW_BYTES

MOST, MOST_NEW = 4096, 128  # sequences whose ends are kept, and new tokens of each
# Held, page_table, lengths, cu_q, k, v, cu_new, cos, sin, interleaved -> the lengths with the new tokens
Append = Callable[..., torch.Tensor]

_Tensor = torch.Tensor


def signature(
    q: torch.Tensor,
    cache: Any,
    page_table: Any,
    lengths: torch.Tensor,
    cu_q: Any,
    sinks: Any,
    out: Any,
    new: tuple[Any, ...],
) -> Any:
    """What the checks of ``new``, which are k, v, cu_seqlens_k_new and the arguments of a turn, depend on, and of what
    is given to the kernel of decode once they are written; None where a call is never kept."""
    try:
        if not _fit(q, cu_q, sinks, out):
            return None
        of_new, of_turn = _of_new(q, cache, page_table, lengths, cu_q, new[:3]), _of_turn(q, *new[3:])
        return None if of_new is None or of_turn is None else (of_new, of_turn)
    except (RuntimeError, IndexError):  # a layout without strides or data, too few dimensions
        return None


def _fit(q: torch.Tensor, cu_q: Any, sinks: Any, out: Any) -> bool:
    """Whether the kernel of decode takes them: it must not refuse what is written already."""
    at, heads, step = q.get_device(), q.shape[-2], ROW_BYTES // q.element_size()
    apart = [stride for stride, size in zip(q.stride()[:-1], q.shape[:-1], strict=True) if size > 1]
    if q.data_ptr() % ROW_BYTES or q.stride(-1) != 1 or any(stride % step for stride in apart) or not _is_dense(q):
        return False
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous() or sinks.get_device() != at):
        return False
    if out is not None and (out.dtype is not q.dtype or not out.is_contiguous() or out.get_device() != at):
        return False
    if out is not None and out.data_ptr() % kernel.ALIGNMENT:
        return False
    if cu_q is None:
        return True
    return type(cu_q) is _Tensor and cu_q.dtype is torch.int32 and cu_q.is_contiguous() and cu_q.get_device() == at


def _of_new(
    q: torch.Tensor, cache: Any, page_table: Any, lengths: torch.Tensor, cu_q: Any, new: tuple[Any, ...]
) -> Any:
    k, v, cu_new = new
    if type(k) is not _Tensor or type(v) is not _Tensor or type(cache) is not PagedKVCache:
        return None
    if k.dtype not in HALF_DTYPES or (k.data_ptr() | v.data_ptr()) % kernel.ALIGNMENT or not k.numel():
        return None
    if k.get_device() != q.get_device() or (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
        return None
    if type(page_table) is not _Tensor or page_table.stride(-1) != 1 or not lengths.is_contiguous():
        return None
    if k.dim() == 4:
        if lengths.shape[0] > MOST or k.shape[1] > MOST_NEW or cu_new is not None:
            return None
    else:
        cu = cu_q if cu_new is None else cu_new
        if type(cu) is not _Tensor or not cu.is_contiguous():
            return None
        cu_new = None if cu_new is None else (cu.shape, cu.dtype)
    return (
        k.shape, v.shape, k.stride(), v.stride(), k.dtype, v.dtype, v.get_device(), cu_new, page_table.dtype,
        lengths.dtype, None if cu_q is None else cu_q.shape,
    )  # fmt: skip


def _of_turn(q: torch.Tensor, cos: Any, sin: Any, interleaved: Any) -> tuple[Any, ...] | None:
    if type(interleaved) is not bool:
        return None
    if cos is None and sin is None:
        return (interleaved,)
    if (
        type(cos) is not _Tensor
        or type(sin) is not _Tensor
        or cos.dtype is not sin.dtype
        or cos.dtype not in kernel.ANGLES
    ):
        return None
    if (cos.data_ptr() | sin.data_ptr()) % kernel.ALIGNMENT or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    if cos.get_device() != q.get_device() or sin.get_device() != q.get_device():
        return None
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    return interleaved, cos.shape, sin.shape, cos.dtype


def prepared(k: torch.Tensor, v: torch.Tensor) -> Append | None:
    """How further calls append tokens like these; None where each is copied first, or where the ends of their sequences
    would be made inside of a graph."""
    if not all(_is_dense(x) and kernel.is_aligned(x) for x in (k, v)):
        return None
    ends = None
    if k.dim() == 4:
        if torch.cuda.is_current_stream_capturing():
            return None
        ends = _ends(k.shape[1], k.device)
    operator = extension.compiled().append.default._op  # the overload's own frame costs 0.2 us

    def run(
        at: Held, table: Any, lengths: torch.Tensor, cu_q: Any, k: torch.Tensor, v: torch.Tensor, cu_new: Any, cos: Any,
        sin: Any, interleaved: bool,
    ) -> torch.Tensor:  # fmt: skip
        used = torch.empty_like(lengths)
        cu = (cu_q if cu_new is None else cu_new) if ends is None else ends[: lengths.shape[0] + 1]
        operator(
            tokens_of(k), tokens_of(v), at.k, at.v, at.k_token, at.v_page, at.k_descale, at.v_written, None, None, cu,
            lengths, table, used, cos, sin, interleaved and cos is not None, None, False,
        )  # fmt: skip
        return used

    return run


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """(T, Hkv, D)."""
    return x if x.dim() == 3 else x.flatten(0, 1)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether ``tokens_of`` gives a view."""
    return x.dim() == 3 or 1 in x.shape[:2] or x.stride(0) == x.stride(1) * x.shape[1]


@cache  # a captured graph reads them for as long as it is replayed
def _ends(step: int, device: torch.device) -> torch.Tensor:
    """Where sequences of so many tokens begin, 16 KB. Copied from the host, which waits: any stream may read it."""
    return (torch.arange(MOST + 1, dtype=torch.int32, device="cpu") * step).to(device)
