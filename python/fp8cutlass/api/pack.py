"""``pack_kv``: choose the kernel that later queries will run, and make what it reads of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..autocast import under_autocast
from ..cache.packed import PackedKV
from ..call.call import parse
from ..call.operators import pack_kv as pack_kv_operator
from ..call.plan import resolve_for, score_amax
from ..call.reasons import BHSD, wrong_dtypes, wrong_tensors
from ..call.request import request_of
from ..call.settle import settle
from ..choose.dispatch import padded_head_dim
from ..choose.stand_in import NO_NUMBER
from ..choose.target import device_of, head_dims
from ..dtypes import HALF_DTYPES, operand_name
from ..errors import NoKernelError, UnsupportedError
from ..manifest import SCORE_AMAX
from ..tracing import constant


def pack_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: str = "bhsd",
    scaling: str = "block",
    precision: str = "fast",
    smooth_k: bool | None = None,
    hadamard: bool | None = None,
    query_shape: Sequence[int] | None = None,
    is_causal: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    keys: int | None = None,
    key_block: int | None = None,
) -> PackedKV:
    """Quantise and pack key and value once, for many queries: cross-attention, a prefix that requests share.

    ``attention(query, packed)`` then takes the place of ``attention(query, key, value)`` and gives the same bits where
    the same kernel runs. In each call only query is quantised:

        packed = fp8cutlass.pack_kv(key, value, query_shape=query.shape)
        for query in queries:
            out = fp8cutlass.attention(query, packed)

    What is packed depends on the kernel: on Hopper ``scaling="block"`` has a descale for 128, 192 or 256 keys, by the
    kernel's tile. The table chooses it for a query of ``query_shape``. A later query gets the kernel that the table has
    for it if that one reads what was packed, else the nearest in the table that does, else any other that does; if
    there is none, it is refused.

    Args:
        key, value: (B, Hkv, Sk, D), or (B, Sk, Hkv, D) with ``layout="bshd"``, bf16 or fp16, as in ``attention``.
            Nothing of them is kept.
        scaling, precision, smooth_k, hadamard: as in ``attention``, where they need not be given again; a value other
            than the default that differs is refused there.
        query_shape: the shape of a query in ``layout``, to choose the kernel for: the load of the card depends on it.
            By default the shape of key.
        is_causal, out_dtype, kernel: as in the calls to come, for the same reason. They may differ.
        keys: how many keys the calls to come have, where key and value are a shard of them: the choice then does not
            depend on the length of the shard.
        key_block: keys that share a descale: the choice is among the kernels that read such blocks. Shards that are to
            be joined end on multiples of it and of 128.

    Under torch.compile the sizes are built into the graph: another length compiles again. ``attention(query, packed)``
    has no such limit.

    Raises:
        UnsupportedError: with every reason, before anything is launched.
    """
    key, value = under_autocast((key, value))
    named = (("key", key), ("value", value))
    wrong = wrong_tensors(named, BHSD if layout == "bhsd" else ("batch", "tokens", "heads", "head_dim"))
    wrong = wrong or wrong_dtypes(
        named, HALF_DTYPES
    )  # what the checks would say of a query, which there is none of yet
    if wrong:
        raise UnsupportedError(*wrong)
    if query_shape is None:
        query_shape = key.shape
    wrong = [
        f"{name} must be an integer from {least} up or None, got {given!r}"
        for name, given, least in (("keys", keys, 0), ("key_block", key_block, 1))
        if given is not None
        and (isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)) or given < least)
    ]
    if key_block is not None and kernel is not None:
        wrong.append(f"key_block={key_block} excludes kernel={kernel!r}, which has one")
    if wrong:
        raise UnsupportedError(*wrong)
    if len(query_shape) != 4 or any(not isinstance(size, (int, torch.SymInt)) or size < 0 for size in query_shape):
        raise UnsupportedError(f"query_shape must be the 4 sizes of a query, got {tuple(query_shape)}")
    request = request_of(
        key.new_empty(()).expand(tuple(query_shape)),
        key,
        value,
        is_causal=is_causal,
        enable_gqa=True,
        layout=layout,
        scaling=scaling,
        precision=precision,
        smooth_k=smooth_k,
        hadamard=hadamard,
        out_dtype=out_dtype,
        out_descale=1.0 if out_dtype == torch.float8_e4m3fn else None,
        kernel=kernel,
    )
    call, t = settle(request, reshape=False)
    # A range's length is a plain number where torch.compile traces: the shape of descales depends on the choice.
    q_shape, k_shape = (tuple(len(range(size)) for size in x.shape) for x in (t.q, t.k))
    device = t.q.device
    if keys is not None:
        k_shape = (*k_shape[:2], len(range(keys)), k_shape[3])
    block = 0 if key_block is None else len(range(key_block))
    variant_id, found, amax = chosen_kernel(device.type, device.index, q_shape, k_shape, call.text(), call.right, block)
    k, v, k_descale, v_descale, k_mean = pack_kv_operator(t.k, t.v, variant_id, scaling, call.smooth_k, call.hadamard)
    return PackedKV(
        k=k,
        v=v,
        k_descale=k_descale,
        v_descale=v_descale,
        k_mean=k_mean if call.smooth_k else None,
        head_dim=t.k.shape[3],
        dtype=key.dtype,
        kernel=variant_id,
        key_block=found,
        amax=amax,
        scaling=scaling,
        precision=precision,
        smooth_k=call.smooth_k,
        hadamard=call.hadamard,
    )


def packed_alike(like: PackedKV, key: torch.Tensor, value: torch.Tensor) -> PackedKV:
    """Key and value (B, Hkv, Sk, D) packed as those of ``like`` were, which passed the checks; nothing is checked."""
    made = pack_kv_operator(key, value, like.kernel, like.scaling, like.smooth_k, like.hadamard)
    k, v, k_descale, v_descale, k_mean = made
    mean = k_mean if like.smooth_k else None
    return replace(like, k=k, v=v, k_descale=k_descale, v_descale=v_descale, k_mean=mean)


@constant
def chosen_kernel(
    kind: str,
    index: int | None,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    text: str,
    right: int | None,
    key_block: int,
) -> tuple[str, int, float]:
    """The variant for a query and keys of these sizes, its key block, and what it has K quantised to. ``key_block`` is
    the one that it is to have; 0 for any. NoKernelError where only the emulator has the precision."""
    call, device = replace(parse(text), right=right), device_of(kind, index)
    dtype = operand_name(torch.bfloat16, call.precision)
    if key_block:  # as if they were there, of magnitudes that every kernel takes
        call = replace(call, kind="packed", key_block=key_block, amax=SCORE_AMAX)
        columns = padded_head_dim(k_shape[3], head_dims(device.type, device.index, False, dtype)[0])
        k_shape = (*k_shape[:3], columns)
    plan = resolve_for(call, device, q_shape, k_shape, dtype)
    if plan.number == NO_NUMBER:
        raise NoKernelError(f"precision={call.precision!r} has no kernel here that reads packed keys and values")
    variant = plan.variant
    return variant.id, variant.key_block, score_amax(variant)
