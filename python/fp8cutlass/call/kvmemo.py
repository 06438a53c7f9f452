"""Calls of ``attention_with_kvcache`` that were made before, on a card in eager mode: a step then launches at once.

What is checked and chosen depends on metadata and options alone. The operator checks what tensors a kernel may be
given; what it refuses takes the long way, which says why or copies. As :mod:`.memo` has it for dense calls, these are
never kept: tensors with a gradient, subclasses, modes and transforms, and under torch.compile. Nor are calls that
append to anything but a ``PagedKVCache``, caches with a mean or a rotation, calls that may have long chunks, and calls
while ``FP8CUTLASS_CHECK`` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cache.held import held
from ..cache.paged import PagedKVCache
from ..checking import checked
from ..choose.target import target
from ..native.decode import launch_of, uncut
from . import kvmemo_append
from .kept import Kept, Signature
from .kvappend import turned
from .kvlaunch import kernel_of
from .kvmemo_append import Append
from .kvplan import AttentionPlan

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# q, cache, layer, page_table, lengths, cu_q, k_descale, v_descale, sinks, plan, out, and what is appended: k, v,
# cu_new, cos, sin, interleaved
Known = Callable[..., Result]

_known: Kept[Known] = Kept()
look_up = _known.look_up
_Tensor = torch.Tensor
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def signature(
    q: Any,
    cache: Any,
    layer: Any,
    page_table: Any,
    lengths: Any,
    cu_q: Any,
    k_descale: Any,
    v_descale: Any,
    sinks: Any,
    plan: Any,
    out: Any,
    new: tuple[Any, ...],
    options: tuple[Any, ...],
) -> Signature | None:
    """What the checks and choices of a call depend on, or None where it is never kept. ``new`` are k, v,
    cu_seqlens_k_new, and the arguments of a turn. ``options`` are the other arguments that are no tensors; the last one
    is the window."""
    if type(q) is not _Tensor or not q.is_cuda or _modes() or _transforms() or checked():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or type(lengths) is not _Tensor or type(layer) is not int:
        return None
    window, grad = options[-1], torch.is_grad_enabled()
    if type(window) is not tuple or (plan is not None and type(plan) is not AttentionPlan):
        return None
    if grad and q.requires_grad:
        return None
    for x in (sinks, out):
        if x is not None and (type(x) is not _Tensor or (grad and x.requires_grad)):
            return None
    if out is not None and out.shape != q.shape:
        return None
    if type(cache) is PagedKVCache:
        if cache.k_mean is not None or cache.hadamard or k_descale is not None or v_descale is not None:
            return None
        if not 0 <= layer < cache.layers:
            return None
        kind: tuple[Any, ...] = (cache.format, cache.kv_heads, cache.num_pages, cache.page_size)
    elif type(cache) in (tuple, list) and len(cache) == 2 and layer == 0:
        k, v = cache
        if type(k) is not _Tensor or type(v) is not _Tensor:
            return None
        kind = (k.dtype, v.dtype, k.shape, v.shape, k.stride(), v.stride())
        for x in (k_descale, v_descale):
            kind += (x.shape,) if type(x) is _Tensor else (type(x), x)
    else:
        return None
    appended = None
    if new[0] is new[1] is new[2] is new[3] is new[4] is None:  # tuples are not compared: that compares tensors
        if new[5] is not True:
            return None
    else:
        appended = kvmemo_append.signature(q, cache, page_table, lengths, cu_q, sinks, out, new)
        if appended is None:
            return None
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.get_device(),
        kind,
        lengths.shape,
        None if page_table is None else page_table.shape,
        cu_q is None,
        None if sinks is None else sinks.dtype,
        None if plan is None else (plan.form, plan.max_seqlen_q),
        appended,
        options,
        *map(type, options),
        *map(type, window),
    )


def forget() -> None:
    """Forget all calls, as what they would choose has changed."""
    _known.clear()


def remember(
    signed: Signature,
    q: torch.Tensor,
    cache: Any,
    kv_heads: int,
    sequences: int,
    descales: tuple[Any, Any],
    new: tuple[Any, ...],
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    splits: int,
    return_lse: bool,
    most_q: int | None,
) -> None:
    """Keep a call that has succeeded, if what it appends can be read as it lies. ``descales``: of K and V, as they were
    given with a pair of caches."""
    append = None
    if new[0] is not None and (append := kvmemo_append.prepared(*new[:2])) is None:
        return
    heads, head_dim = q.shape[-2:]
    tokens = q.numel() // (heads * head_dim)
    at = target(q.device)
    kernel, number = kernel_of(at, head_dim, heads, kv_heads, tokens, sequences, most_q)
    numbers = [1.0 if x is None or isinstance(x, torch.Tensor) else x for x in descales]
    launch = launch_of(
        uncut(kernel, number, at.sm_count, share=splits != 1), scale=scale, left=left, right=right, softcap=softcap,
        k_descale=numbers[0], v_descale=numbers[1],
    )  # fmt: skip
    tensors = tuple(isinstance(x, torch.Tensor) for x in descales)
    sums = (heads, tokens) if return_lse else None
    paged, window = type(cache) is PagedKVCache, None if new[3] is None else (left, right)
    run = _of_paged(launch, sums, append, window) if paged else _of_pair(launch, tensors, sums)
    _known.keep(signed, run)


def _of_paged(
    launch: Callable[..., torch.Tensor],
    sums: tuple[int, int] | None,
    append: Append | None,
    window: tuple[int, int] | None,
) -> Known:
    """``window``: of calls that turn queries; else None."""

    def run(
        q: Any, cache: Any, layer: Any, table: Any, lengths: Any, cu_q: Any, _k: Any, _v: Any, sinks: Any, plan: Any,
        out: Any, *new: Any,
    ) -> Result:  # fmt: skip
        at = held(cache, layer)
        if window is not None:
            q = turned(q.reshape(-1, *q.shape[-2:]), cu_q, lengths, window, new[3:]).view(q.shape)
        if append is not None:
            lengths = append(at, table, lengths, cu_q, *new)
        lse = None if sums is None else q.new_empty(sums, dtype=torch.float32)
        result = launch(
            q, at.k, at.v, table, lengths, cu_q, at.k_descale, at.v_descale, at.k_token, at.v_page, sinks,
            None if plan is None else plan.work, out, lse,
        )  # fmt: skip
        return _delivered(q, result if out is None else out, lse)

    return run


def _of_pair(launch: Callable[..., torch.Tensor], tensors: tuple[bool, ...], sums: tuple[int, int] | None) -> Known:
    of_k, of_v = tensors

    def run(
        q: Any, cache: Any, _layer: Any, table: Any, lengths: Any, cu_q: Any, k_descale: Any, v_descale: Any,
        sinks: Any, plan: Any, out: Any, *_new: Any,
    ) -> Result:  # fmt: skip
        lse = None if sums is None else q.new_empty(sums, dtype=torch.float32)
        result = launch(
            q, *cache, table, lengths, cu_q, k_descale if of_k else None, v_descale if of_v else None, None, None,
            sinks, None if plan is None else plan.work, out, lse,
        )  # fmt: skip
        return _delivered(q, result if out is None else out, lse)

    return run


def _delivered(q: torch.Tensor, result: torch.Tensor, lse: torch.Tensor | None) -> Result:
    if lse is None:
        return result
    return result, lse if q.dim() == 3 else lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
