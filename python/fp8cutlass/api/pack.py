"""``pack_kv``: choose the kernel that later queries will run, and make what it reads of K and V."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.packed import PackedKV
from ..call.launch import score_amax
from ..call.operators import HALF_DTYPES, OUT_NAMES
from ..call.packed import pack_kv as pack_kv_operator
from ..call.plan import make_plan
from ..call.request import Request
from ..choose.dispatch import decide
from ..choose.problem import Problem
from ..choose.target import device_of, target
from ..errors import UnsupportedError


def pack_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: str = "bhsd",
    scaling: str = "block",
    precision: str = "fast",
    smooth_k: bool = False,
    hadamard: bool = False,
    query_shape: Sequence[int] | None = None,
    is_causal: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> PackedKV:
    """Quantise and pack key and value once, for many queries: cross-attention, a prefix that requests share.

    ``attention(query, packed)`` then takes the place of ``attention(query, key, value)`` and gives the same bits where
    the same kernel runs. In each call only query is quantised::

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

    Under torch.compile the sizes are built into the graph: another length compiles again. ``attention(query, packed)``
    has no such limit.

    Raises:
        UnsupportedError: with every reason, before anything is launched.
    """
    _check_tensors(key, value)
    if query_shape is None:
        query_shape = key.shape
    if len(query_shape) != 4 or any(not isinstance(size, (int, torch.SymInt)) or size < 0 for size in query_shape):
        raise UnsupportedError(f"query_shape must be the 4 sizes of a query, got {tuple(query_shape)}")
    request = Request(
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
    plan = make_plan(request)
    # A range's length is a plain number where torch.compile traces: the shape of descales depends on the choice.
    sizes = tuple(len(range(size)) for size in (*plan.q.shape, plan.k.shape[2]))
    out = OUT_NAMES[plan.out_dtype]
    chosen = _choose(plan.q.device.type, plan.q.device.index, sizes, out, scaling, is_causal, precision, kernel or "")
    variant_id, key_block, amax = chosen
    k, v, k_descale, v_descale, k_mean = pack_kv_operator(plan.k, plan.v, variant_id, scaling, smooth_k, hadamard)
    return PackedKV(
        k=k,
        v=v,
        k_descale=k_descale,
        v_descale=v_descale,
        k_mean=k_mean if smooth_k else None,
        like=key.new_empty(()).expand(plan.k.shape),
        kernel=variant_id,
        key_block=key_block,
        amax=amax,
        scaling=scaling,
        precision=precision,
        smooth_k=smooth_k,
        hadamard=hadamard,
    )


def _check_tensors(key: object, value: object) -> None:
    """What the checks of ``attention`` would say of a query that there is none of yet."""
    wrong = []
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            wrong.append(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        elif x.dim() != 4:
            wrong.append(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
        elif x.dtype not in HALF_DTYPES:
            wrong.append(f"{name} must be one of {', '.join(map(str, HALF_DTYPES))}, got {x.dtype}")
    if wrong:
        raise UnsupportedError(*wrong)


@torch.compiler.assume_constant_result
def _choose(
    kind: str,
    index: int | None,
    sizes: tuple[int, ...],
    out: str,
    scaling: str,
    causal: bool,
    precision: str,
    kernel: str,
) -> tuple[str, int, float]:
    """The variant for a query (B, H, Sq, D) and Sk keys, its key block, and what it has K quantised to."""
    at = target(device_of(kind, index))
    batch, heads, seqlen_q, head_dim, seqlen_k = sizes
    problem = Problem(
        arch=at.arch,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        heads=heads,
        dtype="e4m3",
        out=out,
        scaling=scaling,
        causal=causal,
        precision=precision,
        sm_count=at.sm_count,
    )
    variant, _, _ = decide(at.directory, problem, kernel)
    if kind == "cuda" and at.arch not in variant.targets:
        raise UnsupportedError(f"kernel={kernel!r} is built for {', '.join(variant.targets)}, key is on {at.arch}")
    return variant.id, variant.key_block, score_amax(variant)
