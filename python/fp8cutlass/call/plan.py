"""Which kernel runs a call, and why. Target, table, measurements and the form of packed keys are asked here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..choose.dispatch import decide, refusal
from ..choose.problem import Decision, Problem
from ..choose.reuse import KVForm
from ..choose.special import no_mask_kernel
from ..choose.target import Target, target
from ..dtypes import DTYPE_NAMES, OUT_NAMES
from ..errors import NoKernelError, UnsupportedError
from ..manifest import SCORE_AMAX, Variant, load_manifest
from ..quant.quantize import FP8_MAX
from .call import Call


@dataclass(frozen=True)
class Plan:
    """A call with its kernel; ``number`` is that of the variant in the extension."""

    call: Call
    variant: Variant
    number: int
    decision: Decision
    granularity: Mapping[str, str]  # what shares a descale in "q", "k" and "v"


def score_amax(variant: Variant) -> float:
    """What bf16 and fp16 Q and K are quantised to for a kernel: its scores must fit their accumulator."""
    return SCORE_AMAX if variant.score == "f16" else FP8_MAX[torch.float8_e4m3fn]


def resolve(call: Call, q: torch.Tensor, k: torch.Tensor, *, shipped: bool = False) -> Plan:
    """Choose the kernel for q (B, H, Sq, D) and k (B, Hkv, Sk, D), or packed k, whatever they hold.

    UnsupportedError where there is none. With ``shipped`` the shipped table answers for a card.
    """
    return resolve_for(call, q.device, q.shape, k.shape, DTYPE_NAMES.get(q.dtype, "e4m3"), shipped=shipped)


def resolve_for(
    call: Call,
    device: torch.device,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: str = "e4m3",
    *,
    shipped: bool = False,
) -> Plan:
    """:func:`resolve` of sizes, and the name of the dtype that the kernel reads."""
    at = target(device, shipped=shipped)
    if device.type == "cuda" and (call.masked or call.biased):
        reason = no_mask_kernel("blocks" if call.masked else "bias")
        raise NoKernelError(refusal(at.arch, load_manifest(at.directory).profile, reason))
    form = KVForm(k_shape[3], call.key_block, call.amax) if call.kind == "packed" else None
    problem = problem_of(call, at, device, q_shape, k_shape, dtype)
    variant, number, decision = decide(at.directory, problem, call.kernel, form)
    if device.type == "cuda" and at.arch not in variant.targets:  # only a pinned one; the emulator runs them all
        raise UnsupportedError(
            f"kernel={call.kernel!r} is built for {', '.join(variant.targets)}, {device} is {at.arch}"
        )
    return Plan(call, variant, number, decision, load_manifest(at.directory).scaling[call.scaling])


def problem_of(
    call: Call, at: Target, device: torch.device, q_shape: Sequence[int], k_shape: Sequence[int], dtype: str
) -> Problem:
    """What the choice depends on."""
    batch, heads, seqlen_q, head_dim = q_shape
    # On the CPU any kernel stands for a window: the emulator masks what it is told to.
    window = call.mask == "window" and (device.type == "cuda" or bool(call.kernel))
    return Problem(
        arch=at.arch,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=k_shape[2],
        batch=batch,
        heads=heads,
        dtype=dtype,
        out=OUT_NAMES[call.out_dtype],
        scaling=call.scaling,
        causal=call.mask == "causal",
        precision=call.precision,
        quantised=call.kind == "fp8",
        sm_count=at.sm_count,
        kv_heads=k_shape[1],
        card=at.card,
        window=window,
    )
