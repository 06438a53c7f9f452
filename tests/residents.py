"""Launches of kernels that keep a head's K and V in shared memory, for tests on a card and for sanitizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from calls import plan_of
from gpu import built_manifest
from reference import randn

from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.card import prepared_call
from fp8cutlass.call.ragged_call import RaggedCall
from fp8cutlass.call.ragged_launch import launch
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.manifest import Resident, Variant
from fp8cutlass.native.fused import readable


def kept(
    resident: Resident, variant: Variant, operands: list[torch.Tensor], *, return_lse: bool = True, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Out, LSE if asked for, and amax, by the kernel that keeps K and V."""
    values = {"scale": 0.125, "causal_offset": 0} | options
    offset = values["causal_offset"] if variant.causal else None
    call = Call(
        "half",
        OUT_DTYPES[variant.out],
        values["scale"],
        scaling="block",
        right=offset,
        return_lse=return_lse,
        return_amax=True,
        kernel=variant.id,
    )
    plan = replace(plan_of(call, variant, built_manifest()), resident=resident)
    outputs = prepared_call(plan, Tensors(*operands))(*map(readable, operands))
    return tuple(x for x in outputs if x is not None)


def kept_of_lengths(
    resident: Resident,
    variant: Variant,
    operands: list[torch.Tensor],
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used_q: torch.Tensor | None = None,
    used_k: torch.Tensor | None = None,
    *,
    scale: float = 0.125,
    bottom_right: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (tokens, H, the kernel's head_dim) and LSE (H, tokens) of a ragged batch, by a kernel that keeps K and V."""
    q, k, v = operands
    call = RaggedCall(
        q, k, v, cu_q, cu_k, used_q, used_k, q.shape[0], resident.keys, (), scale, -1, 0 if variant.causal else -1,
        bottom_right, q.dtype, "fast", True, "",
    )  # fmt: skip
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device=q.device)
    manifest = built_manifest()
    numbers = manifest.index[variant.id], manifest.residents.index(resident)
    out = launch(call, variant, numbers[0], lse, resident=numbers[1])
    return out, lse


def made(
    resident: Resident, batch: int, heads: int, kv_heads: int, rows: int, keys: int, width: int = 0
) -> list[torch.Tensor]:
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    width, dtype = width or resident.head_dim, OUT_DTYPES[resident.source]
    return [randn(batch, *x, width, seed=s, device="cuda").to(dtype) for s, x in enumerate(shapes)]
