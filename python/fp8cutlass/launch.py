"""From operands and a chosen kernel to its outputs: quantise for the kernel, pad to its head_dim, then emulate on the
CPU or launch on CUDA. On CUDA one kernel quantises, pads and packs bf16 and fp16 operands (:mod:`fp8cutlass.fused`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F

from . import extension
from .attend import Attend, Way, faster_way, prepare
from .emulator import emulate
from .fused import Operands, quantise_and_pack, readable
from .manifest import SCORE_AMAX, Variant
from .memory import aligned, as_bytes, empty_rows, is_seq_major
from .pack import pack_v, pad_token_descale, unpack_v
from .prepare import prepared
from .quantize import FP8_MAX, V_AMAX, quantize
from .smooth import key_mean, restore_lse

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """The operators' arguments, in the order of the schema of attention_fp8, then those that attention_half adds.

    q is (B, H, Sq, D), k and v are (B, Hkv, Sk, D), of one type, any strides: FP8 with a descale each, or bf16 or fp16
    without. ``precision`` "fast" and "balanced" assert of FP8 operands that the scores fit f16, which holds when Q
    and K were quantised with amax 14. ``kernel`` pins a variant by its id; "" leaves the choice to the table.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out_descale: torch.Tensor | None
    out_dtype: torch.dtype
    scaling: str
    precision: str
    causal: bool
    causal_offset: int
    scale: float
    return_lse: bool
    return_amax: bool
    kernel: str
    smooth_k: bool = False  # of bf16 and fp16 operands only, like the next
    hadamard: bool = False


def empty_outputs(call: Call) -> Outputs:
    """Allocate the outputs: ``out`` (B, H, Sq, D), dense in q's memory order; ``lse`` (B, H, Sq) and ``amax`` (1,)
    float32, or (0,) where not wanted."""
    q = call.q
    lse = q.new_empty(q.shape[:3] if call.return_lse else (0,), dtype=torch.float32)
    amax = q.new_empty((1 if call.return_amax else 0,), dtype=torch.float32)
    return empty_rows(q, q.shape[3], call.out_dtype), lse, amax


def wanted_outputs(call: Call) -> Outputs:
    """:func:`empty_outputs` for a caller that looks at what it asked for alone: the rest is not allocated, but ``out``
    once more."""
    q = call.q
    out = empty_rows(q, q.shape[3], call.out_dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if call.return_lse else out
    return out, lse, q.new_empty((1,), dtype=torch.float32) if call.return_amax else out


def score_amax(variant: Variant) -> float:
    """What bf16 and fp16 Q and K are quantised to for a kernel: its scores must fit their accumulator."""
    return SCORE_AMAX if variant.score == "f16" else FP8_MAX[torch.float8_e4m3fn]


def quantised(call: Call, variant: Variant, granularity: Mapping[str, str]) -> Call:
    """The call on bf16 or fp16 operands as one on the e4m3 operands and descales that the kernel reads."""
    block, amax = variant.key_block, score_amax(variant)
    mean = key_mean(call.k) if call.smooth_k else None
    q, k = prepared(call.q, call.k, mean, head_dim=variant.head_dim, hadamard=call.hadamard)
    q, q_descale = quantize(q, granularity=granularity["q"], amax=amax)
    k, k_descale = quantize(k, granularity=granularity["k"], amax=amax, block=block)
    v, v_descale = quantize(call.v, granularity=granularity["v"], amax=V_AMAX, block=block)
    call = replace(call, q=q, k=k, v=v, smooth_k=False, hadamard=False)
    return replace(call, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def run_half(call: Call, variant: Variant, number: int, granularity: Mapping[str, str]) -> Outputs:
    """Run one kernel on bf16 or fp16 operands, no dimension empty; see :func:`empty_outputs` for what comes back."""
    if call.q.is_cuda:
        attend = prepared_call(call, variant, number, granularity)
        out, lse, amax = attend(readable(call.q), readable(call.k), readable(call.v), call.out_descale)
        lse, amax = (call.q.new_empty((0,), dtype=torch.float32) if x is None else x for x in (lse, amax))
        return out, lse, amax
    outputs = empty_outputs(call)
    run(quantised(call, variant, granularity), variant, number, outputs)
    if call.smooth_k and call.return_lse:
        restore_lse(outputs[1], call.q, key_mean(call.k), call.scale)
    return outputs


def prepared_call(
    call: Call, variant: Variant, number: int, granularity: Mapping[str, str], *, way: Way | None = None
) -> Attend:
    """A call on bf16 or fp16 operands on a card, less its tensors, by ``way`` as far as it is open; None takes the
    fastest."""
    changed = {"smooth_k": call.smooth_k, "hadamard": call.hadamard}
    if way is None:
        way = faster_way(variant, granularity, call.q.shape, call.k.shape, **changed)
    extension.load_kernels(number, call.q.get_device(), call.q.dtype)
    return prepare(
        variant,
        number,
        granularity,
        head_dim=call.q.shape[3],
        amax=score_amax(variant),
        seq_major=is_seq_major(call.q),
        scale=call.scale,
        causal_offset=call.causal_offset,
        return_lse=call.return_lse,
        return_amax=call.return_amax,
        way=way,
        **changed,
    )


def run(call: Call, variant: Variant, number: int, outputs: Outputs) -> None:
    """Run one kernel and fill ``outputs``.

    The operands are FP8, with descales of one of the modes that the variant serves, in blocks of its ``key_block``; no
    dimension is empty. ``number`` is the variant's in the extension.
    """
    operands, descales = _fitted(call, variant)
    if call.q.is_cuda:
        _launch(call, number, variant.head_dim, operands, descales, outputs)
    else:
        _emulate(call, variant, operands, descales, outputs)


def run_made(call: Call, variant: Variant, number: int, made: Operands, outputs: Outputs) -> None:
    """Run one kernel on operands in the form that it reads, and fill ``outputs``; ``call`` gives the options."""
    if call.q.is_cuda:
        _forward(call, number, variant.head_dim, made, outputs)
        return
    q, k, v, q_descale, k_descale, v_descale = (
        cast(torch.Tensor, x) for x in (made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale)
    )
    if call.scaling == "token":
        k_descale = k_descale[:, :, : k.shape[2]]
    e4m3 = torch.float8_e4m3fn
    fp8 = (q.view(e4m3), k.view(e4m3), unpack_v(v.view(e4m3), k.shape[2]))
    _emulate(call, variant, fp8, [q_descale, k_descale, v_descale], outputs)


def kernel_operands(call: Call, variant: Variant, granularity: Mapping[str, str]) -> Operands:
    """What the compiled kernel reads for a call on bf16 or fp16 operands."""
    if not call.q.is_cuda:
        return _packed(call.scaling, *_fitted(quantised(call, variant, granularity), variant))
    return quantise_and_pack(
        call.q,
        call.k,
        call.v,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        amax=score_amax(variant),
        granularity=granularity,
        negate_q=call.scale < 0,
        smooth_k=call.smooth_k,
        hadamard=call.hadamard,
    )


def _fitted(call: Call, variant: Variant) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """FP8 operands and descales padded to the kernel's head_dim, the sign of a negative scale moved into Q."""
    q, k, v = (_padded(x, variant.head_dim - x.shape[3]) for x in (call.q, call.k, call.v))
    if call.scale < 0:  # the sign bit of FP8, exact
        q = (q.view(torch.uint8) ^ 0x80).view(q.dtype)
    # Only attention_half leaves descales out, and it quantises before it comes here.
    descales = [cast(torch.Tensor, d) for d in (call.q_descale, call.k_descale, call.v_descale)]
    if call.scaling == "token":  # a descale for each channel of V
        descales[2] = F.pad(descales[2], (0, variant.head_dim - call.v.shape[3]), value=1.0)
    return (q, k, v), descales


def _packed(scaling: str, operands: tuple[torch.Tensor, ...], descales: list[torch.Tensor]) -> Operands:
    """FP8 operands of the kernel's head_dim in the form that it reads."""
    q, k, v = operands
    q_descale, k_descale, v_descale = descales
    if scaling == "token":
        k_descale = pad_token_descale(k_descale)
    q, k, v = (x.view(torch.uint8) for x in (aligned(q), aligned(k), pack_v(v)))
    return Operands(q, k, v, q_descale, k_descale, v_descale)


def _padded(x: torch.Tensor, missing: int) -> torch.Tensor:
    """Append ``missing`` zero columns, keep the memory order (B, S, H, D) or (B, H, S, D), and make the last dimension
    contiguous by a copy where it is not."""
    if missing:
        raw = x.view(torch.uint8)
        if is_seq_major(x):
            return F.pad(raw.transpose(1, 2), (0, missing)).transpose(1, 2).view(x.dtype)
        return F.pad(raw, (0, missing)).view(x.dtype)
    return x if x.stride(3) == 1 else x.contiguous()


def _emulate(
    call: Call,
    variant: Variant,
    operands: tuple[torch.Tensor, ...],
    descales: list[torch.Tensor],
    outputs: Outputs,
) -> None:
    result = emulate(
        *operands,
        *descales,
        variant=variant,
        scale=abs(call.scale),
        scaling=call.scaling,
        causal_offset=call.causal_offset,
        out_descale=call.out_descale,
        return_lse=call.return_lse,
    )
    out, lse, amax = outputs
    out.copy_(result.out[..., : out.shape[3]])
    if call.return_lse:
        lse.copy_(result.lse)
    if call.return_amax:
        amax.copy_(result.amax)


def _launch(
    call: Call,
    number: int,
    head_dim: int,
    operands: tuple[torch.Tensor, ...],
    descales: list[torch.Tensor],
    outputs: Outputs,
) -> None:
    _forward(call, number, head_dim, _packed(call.scaling, operands, descales), outputs)


def _forward(call: Call, number: int, head_dim: int, o: Operands, outputs: Outputs) -> None:
    out, lse, amax = outputs
    wide = out if out.shape[3] == head_dim else empty_rows(out, head_dim, out.dtype)
    extension.load()
    torch.ops.fp8cutlass_C.forward(
        number,
        o.q,
        o.k,
        o.v,
        o.q_descale,
        o.k_descale,
        o.v_descale,
        call.out_descale,
        as_bytes(wide),
        lse if call.return_lse else None,
        amax.zero_() if call.return_amax else None,
        abs(call.scale),
        call.causal_offset,
    )
    if wide is not out:
        as_bytes(out).copy_(as_bytes(wide)[..., : out.shape[3]])
