"""From a plan and its tensors to outputs.

On the CPU operands are quantised for the kernel and padded to its head_dim by torch operations, and the emulator runs.
On CUDA :mod:`.card` passes them to an operator of the extension."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ..dtypes import OPERANDS
from ..emulator.emulate import emulate
from ..manifest import Variant
from ..memory import aligned, as_bytes, empty_rows, is_seq_major
from ..native import extension
from ..native.fused import Operands, quantise_and_pack
from ..quant.descale import to_canonical
from ..quant.lower import lowered
from ..quant.prepare import prepared
from ..quant.quantize import quantize
from ..quant.sinks import join_lse
from ..quant.smooth import key_mean, restore_lse
from ..quant.v_layout import pack_v, pad_token_descale, unpack_v, without_zeros
from .call import Call, Outputs, Tensors
from .card import run_on_card
from .masks import for_emulator, packed
from .plan import Plan, kernel_scaling, lowers, score_amax, value_amax


def empty_outputs(call: Call, q: torch.Tensor) -> Outputs:
    """Allocate what was asked for; ``out`` is dense in q's memory order."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if call.return_lse else None
    amax = q.new_empty((1,), dtype=torch.float32) if call.return_amax else None
    return Outputs(empty_rows(q, q.shape[3], call.out_dtype), lse, amax)


def run(plan: Plan, t: Tensors) -> Outputs:
    """Run a call of any kind."""
    call = plan.call
    if t.empty:
        return _nothing(call, t.q)
    if t.q.is_cuda:
        return run_on_card(plan, t)
    if call.kind == "half":
        return _run_half(plan, t)
    if call.kind == "packed":
        return _run_packed(plan, t)
    return run_operands(plan, t, fp8_operands(call, plan.variant, t))


def _nothing(call: Call, q: torch.Tensor) -> Outputs:
    """Nothing to write, or no key to look at: zeros, and an LSE of -inf."""
    outputs = empty_outputs(call, q)
    as_bytes(outputs.out).zero_()
    if outputs.lse is not None:
        outputs.lse.fill_(-torch.inf)
    if outputs.amax is not None:
        outputs.amax.zero_()
    return outputs


def _run_half(plan: Plan, t: Tensors) -> Outputs:
    call, variant = plan.call, plan.variant
    outputs = run_operands(plan, t, fp8_operands(call, variant, quantised(call, variant, plan.granularity, t)))
    if call.smooth_k and outputs.lse is not None:
        restore_lse(outputs.lse, t.q, key_mean(t.k), call.scale)
    return outputs


def _run_packed(plan: Plan, t: Tensors) -> Outputs:
    """Of Q alone what a call on tensors does."""
    call, variant = plan.call, plan.variant
    fp8, q_descale = quantised_query(call, variant, plan.granularity, t.q)
    q = _query(fp8, variant, call.scale).view(torch.uint8)
    outputs = run_operands(plan, t, Operands(q, t.k, t.v, q_descale, t.k_descale, t.v_descale))
    if t.k_mean is not None and outputs.lse is not None:
        restore_lse(outputs.lse, t.q, t.k_mean[..., : t.q.shape[3]], call.scale)
    return outputs


def _quantise_and_pack(
    call: Call,
    variant: Variant,
    granularity: Mapping[str, str],
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
) -> Operands:
    return quantise_and_pack(
        q,
        k,
        v,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        amax=score_amax(variant),
        granularity=granularity,
        negate_q=call.scale < 0,
        smooth_k=call.smooth_k and k is not None,
        hadamard=call.hadamard,
    )


def kernel_operands(call: Call, variant: Variant, granularity: Mapping[str, str], t: Tensors) -> Operands:
    """What the kernel reads for a call on bf16 or fp16 operands, no dimension empty."""
    if t.q.is_cuda:
        return _quantise_and_pack(call, variant, granularity, t.q, t.k, t.v)
    return fp8_operands(call, variant, quantised(call, variant, granularity, t))


def packed_keys(
    call: Call, variant: Variant, granularity: Mapping[str, str], k: torch.Tensor, v: torch.Tensor
) -> Operands:
    """K and V in the form that a kernel reads, of bf16 or fp16 ones on the CPU."""
    k8, v8, k_descale, v_descale = quantised_keys(call, variant, granularity, k, v)
    return _keys(call.scaling, variant, k8, v8, k_descale, v_descale)


def quantised(call: Call, variant: Variant, granularity: Mapping[str, str], t: Tensors) -> Tensors:
    """bf16 or fp16 operands as the e4m3 operands and descales that the kernel reads."""
    q, q_descale = quantised_query(call, variant, granularity, t.q)
    k, v, k_descale, v_descale = quantised_keys(call, variant, granularity, t.k, t.v)
    return Tensors(q, k, v, q_descale, k_descale, v_descale, t.out_descale, sinks=t.sinks)


def quantised_query(
    call: Call, variant: Variant, granularity: Mapping[str, str], q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and its descale."""
    rotated = prepared(q, None, head_dim=variant.head_dim, hadamard=call.hadamard)
    dtype = OPERANDS[variant.dtype].qk
    return quantize(rotated, granularity=granularity["q"], dtype=dtype, amax=score_amax(variant))


def quantised_keys(
    call: Call, variant: Variant, granularity: Mapping[str, str], k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """K, V, and their descales."""
    block, mean = variant.key_block, key_mean(k) if call.smooth_k else None
    changed = prepared(k, mean, head_dim=variant.head_dim, hadamard=call.hadamard)
    operand = OPERANDS[variant.dtype]
    k8, k_descale = quantize(
        changed, granularity=granularity["k"], dtype=operand.qk, amax=score_amax(variant), block=block
    )
    v8, v_descale = quantize(v, granularity=granularity["v"], dtype=operand.v, amax=value_amax(variant), block=block)
    if operand.v == torch.int8:
        v_descale = without_zeros(v_descale, v)
    return k8, v8, k_descale, v_descale


def fp8_operands(call: Call, variant: Variant, t: Tensors) -> Operands:
    """FP8 operands in the form that a kernel reads: padded to its head_dim, the sign of a negative scale in Q."""
    if lowers(call, variant):
        t = lowered_operands(variant, t)
    q_descale, k_descale, v_descale = _descales(t)
    made = _keys(kernel_scaling(call, variant), variant, t.k, t.v, k_descale, v_descale)
    q = aligned(_query(t.q, variant, call.scale)).view(torch.uint8)
    return Operands(q, made.k, made.v, q_descale, made.k_descale, made.v_descale)


def _descales(t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of FP8 operands, which have all three."""
    if t.q_descale is None or t.k_descale is None or t.v_descale is None:
        raise ValueError("FP8 operands need q_descale, k_descale and v_descale")
    return t.q_descale, t.k_descale, t.v_descale


def lowered_operands(variant: Variant, t: Tensors) -> Tensors:
    """FP8 operands with descales of tensors or heads as ones with descales of rows and blocks, Q in the range of the
    kernel's scores."""
    block = variant.key_block
    q_descale, k_descale, v_descale = _descales(t)
    q, q_descale = lowered(t.q, q_descale, variant.head_dim)
    k_descale = to_canonical(k_descale, "block", t.k.shape, t.k.device, block)
    v_descale = to_canonical(v_descale, "block", t.v.shape, t.v.device, block)
    return t._replace(q=q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def _query(q: torch.Tensor, variant: Variant, scale: float) -> torch.Tensor:
    q = _padded(q, variant.head_dim - q.shape[3])
    if scale >= 0:
        return q
    return -q if q.dtype == torch.int8 else (q.view(torch.uint8) ^ 0x80).view(q.dtype)  # the sign bit of FP8; exact


def _keys(
    scaling: str,
    variant: Variant,
    k: torch.Tensor,
    v: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
) -> Operands:
    missing = variant.head_dim - v.shape[3]  # a rotated K has all columns
    if scaling == "token":  # a descale for each channel of V
        k_descale, v_descale = pad_token_descale(k_descale), F.pad(v_descale, (0, missing), value=1.0)
    if OPERANDS[variant.dtype].v == torch.int8:
        v_descale = pad_token_descale(v_descale, 0.0)
    k, v = _padded(k, variant.head_dim - k.shape[3]), _padded(v, missing)
    k8, v8 = aligned(k).view(torch.uint8), pack_v(v).view(torch.uint8)
    return Operands(None, k8, v8, None, k_descale, v_descale)


def _padded(x: torch.Tensor, missing: int) -> torch.Tensor:
    """Append ``missing`` zero columns, keep the memory order (B, S, H, D) or (B, H, S, D), and make the last dimension
    contiguous by a copy where it is not."""
    if missing:
        raw = x.view(torch.uint8)
        if is_seq_major(x):
            return F.pad(raw.transpose(1, 2), (0, missing)).transpose(1, 2).view(x.dtype)
        return F.pad(raw, (0, missing)).view(x.dtype)
    return x if x.stride(3) == 1 else x.contiguous()


def run_operands(plan: Plan, t: Tensors, made: Operands, outputs: Outputs | None = None) -> Outputs:
    """Run one kernel on operands in the form that it reads; q of ``t`` gives the shape and order of the result, which
    goes to ``outputs`` where there are some."""
    if outputs is None:
        outputs = empty_outputs(plan.call, t.q)
    if t.q.is_cuda:
        _forward(plan, t, made, outputs)
    else:
        _emulate(plan, t, made, outputs)
    return outputs


def _emulate(plan: Plan, t: Tensors, o: Operands, outputs: Outputs) -> None:
    call, variant = plan.call, plan.variant
    if o.q is None or o.k is None or o.v is None or o.q_descale is None or o.k_descale is None or o.v_descale is None:
        raise ValueError("an operand or a descale is missing")
    keys, operand = o.k.shape[2], OPERANDS[variant.dtype]
    k_descale = o.k_descale[:, :, :keys] if call.scaling == "token" else o.k_descale
    v_descale = o.v_descale[:, :, :keys] if operand.v == torch.int8 else o.v_descale
    banded = variant.mask == "window"
    causal_offset, window_offset = call.offsets(o.q.shape[2], keys, both=banded)
    mask = packed(t.seen, {"tiles": t.tiles, "counts": t.counts, "bits": t.bits}, o.q.shape[2], keys)
    result = emulate(
        o.q.view(operand.qk),
        o.k.view(operand.qk),
        unpack_v(o.v.view(operand.v), keys),
        o.q_descale,
        k_descale,
        v_descale,
        variant=variant,
        scale=abs(call.scale),
        scaling=kernel_scaling(call, variant),
        causal_offset=causal_offset,
        window_offset=window_offset if banded or call.mask == "window" else None,
        mask=for_emulator(mask),
        bias=t.bias,
        out_descale=t.out_descale,
        softcap=call.softcap,
        sinks=t.sinks,
        return_lse=call.return_lse,
        merge_lse=call.merge_lse,
    )
    outputs.out.copy_(result.out[..., : outputs.out.shape[3]])
    if outputs.lse is not None:
        outputs.lse.copy_(result.lse)
    if outputs.amax is not None:
        outputs.amax.copy_(result.amax)


def _forward(plan: Plan, t: Tensors, o: Operands, outputs: Outputs) -> None:
    out, lse, amax = outputs
    wide = out if out.shape[3] == plan.variant.head_dim else empty_rows(out, plan.variant.head_dim, out.dtype)
    causal_offset, window_offset = plan.call.offsets(out.shape[2], t.k.shape[2])
    extension.load()
    extension.compiled().forward(
        plan.number,
        o.q,
        o.k,
        o.v,
        o.q_descale,
        o.k_descale,
        o.v_descale,
        t.out_descale,
        as_bytes(wide),
        lse,
        None if amax is None else amax.zero_(),
        abs(plan.call.scale),
        causal_offset,
        window_offset,
        plan.call.merge_lse,
        plan.call.softcap,
        t.sinks,
    )
    if lse is not None and t.sinks is not None:
        join_lse(lse, t.sinks)
    if wide is not out:
        as_bytes(out).copy_(as_bytes(wide)[..., : out.shape[3]])
