"""``backward="flash"``: the forward in FP8, the gradient by the backward pass of torch's flash attention.

That pass computes P once more from the 16-bit operands and the LSE of the forward. The forward's rounding enters by its
output and its LSE alone. The gradient of rounding is taken as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..dtypes import HALF_DTYPES
from ..quant.smooth import key_mean, restore_lse
from .call import Call, Outputs, Tensors
from .operators import execute
from .options import visible
from .request import Request

MULTIPLE = 8  # of columns, in the kernels of flash attention
WIDE, WIDEST = 192, 256  # between these some cards have a kernel for the second alone

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def refused(request: Request) -> list[str]:
    """Why a well-formed request has no such gradient; nothing if it has one."""
    options, q, wrong = request.options, request.query, []
    if request.packed is not None:
        wrong.append("a PackedKV, which does not hold key and value any more")
    elif q.dtype not in HALF_DTYPES:
        wrong.append(f"operands of {q.dtype}")
    left, right = visible(options)
    if left is not None or right:
        wrong.append(f"window_size={options.window_size}" + _own(options.causal_offset))
    if options.softcap:
        wrong.append(f"softcap={options.softcap}")
    if request.sinks is not None:
        wrong.append("sinks")
    rows, keys = (x.shape[1 if options.layout == "bshd" else 2] for x in (q, request.key))
    if right == 0 and rows != keys:  # flash attention aligns the end, its emulation on the CPU the beginning
        wrong.append(f"is_causal=True with {rows} rows and {keys} keys")
    wrong += [name for name in ("return_lse", "return_amax") if getattr(options, name)]
    if request.attn_mask is not None:
        wrong.append("attn_mask")
    if request.out is not None:
        wrong.append("out")
    if options.out_dtype not in (None, q.dtype):
        wrong.append(f"out_dtype={options.out_dtype} for operands of {q.dtype}")
    return [f"backward='flash' cannot serve {what}" for what in wrong]


def _own(causal_offset: int | None) -> str:
    return "" if causal_offset is None else f", causal_offset={causal_offset}"


def asked(backward: str, t: Tensors) -> bool:
    """Whether a call is to be differentiated."""
    return backward == "flash" and torch.is_grad_enabled() and any(x.requires_grad for x in t[:3])


def differentiable(call: Call, t: Tensors) -> Outputs:
    """Run a call on bf16 or fp16 operands that :func:`refused` has nothing against, for autograd."""
    k = t.k.view_as(t.k) if t.k is t.q else t.k  # torch.compile takes no tensor twice
    v = t.v.view_as(t.v) if t.v is t.q or t.v is t.k else t.v
    return Outputs(_Flash.apply(t.q, k, v, call)[0])


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = execute(replace(call, return_lse=True), Tensors(q, k, v))
        if lse is None:
            raise RuntimeError("the LSE was asked for and not given")
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        *operands, ctx.call = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*operands, *output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients(ctx.call, grad, *ctx.saved_tensors), None)


def gradients(
    call: Call,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Gradients:
    """Those of q (B, H, Sq, D), k and v (B, Hkv, Sk, D), where ``grad`` is that of ``out``."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if call.smooth_k:  # as the forward saw them: what keys share would multiply the difference of the two softmaxes
        mean, lse = key_mean(k), lse.clone()
        restore_lse(lse, q, mean, -call.scale)
        k = (k.float() - mean[:, :, None]).to(k.dtype)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    given = [x if x.stride(3) == 1 else x.contiguous() for x in (grad, q, wide_k, wide_v, out)]
    causal = call.mask == "causal"
    if q.is_cuda:
        dq, dk, dv = _on_a_card(given, lse, call.scale, causal)
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse, 0.0, causal, scale=call.scale
        )
    if group > 1:
        dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _on_a_card(given: list[torch.Tensor], lse: torch.Tensor, scale: float, causal: bool) -> Gradients:
    head_dim, rows, keys = given[1].shape[3], given[1].shape[2], given[2].shape[2]
    columns = WIDEST if head_dim > WIDE else head_dim + -head_dim % MULTIPLE
    if columns > head_dim:
        given = [F.pad(x, (0, columns - head_dim)) for x in given]
    no_dropout = lse.new_zeros((2,), dtype=torch.int64)  # the state of a generator that nobody asks
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *given, lse, None, None, rows, keys, 0.0, causal, no_dropout, no_dropout[:0], scale=scale
    )
    dq, dk, dv = (x[..., :head_dim] for x in found)
    return dq, dk, dv
