"""``fp8cutlass explain --pages``: the kernel of decode for keys and values in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

VECTOR = 16


def told(
    shape: tuple[int, ...],
    kv_heads: int | None,
    causal: bool,
    page_size: int,
    splits: int,
    dtype: str,
    device: torch.device,
) -> tuple[str, bool]:
    """The text of ``explain_kvcache`` for sizes alone, and whether some kernel serves them, built or not."""
    from ..call.kvexplain import KVProblem, describe

    sequences, heads, tokens, head_dim = shape
    kv_heads = kv_heads or heads
    if dtype not in ("bf16", "fp16"):
        raise click.UsageError(f"--pages takes q in bf16 or fp16, got --dtype {dtype}: the cache is e4m3, q is not")
    if not heads or heads % kv_heads:
        raise click.UsageError(f"query heads must be a multiple of --kv-heads, got {heads} and {kv_heads}")
    if head_dim % VECTOR or not head_dim:
        raise click.UsageError(f"head_dim of a cache must be a multiple of {VECTOR}, got {head_dim}")
    problem = KVProblem(
        sequences, sequences * tokens, heads, kv_heads, head_dim, page_size, tokens, -1, 0 if causal else -1, splits,
        dtype=dtype,
    )  # fmt: skip
    served, text = describe(problem, device)
    return text, served
