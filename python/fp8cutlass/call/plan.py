"""From a request to the operator's arguments: check, bring descales into canonical form, call."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..cache.packed import PackedKV
from ..choose.dispatch import padded_head_dim
from ..choose.problem import Decision
from ..choose.target import granularities, head_dims, target, unserved
from ..emulator.emulate import OUT_DTYPES
from ..errors import NoKernelError, UnsupportedError
from ..manifest import KEY_BLOCK, Variant
from ..native.attend import faster_way
from ..quant.descale import all_canonical, to_canonical
from . import checks as validate
from .launch import Outputs, score_amax
from .operators import DTYPE_NAMES, OUT_NAMES, attention_fp8, attention_half
from .operators import choose as choose_kernel
from .packed import attention_packed
from .request import Plan, Request, open_packed


def make_plan(request: Request, *, shipped: bool = False) -> Plan:
    """Check a request; UnsupportedError says what is wrong with it or which kernel is missing.

    With ``shipped`` the shipped table answers even if nothing is built for the device.
    """
    if isinstance(request.key, PackedKV):
        open_packed(request, request.key)
    validate.check_options(request)
    validate.check_shapes(request)
    validate.check_types(request)
    granularity = granularities(request.scaling)
    validate.check_descales(request, granularity)
    q, k, v = request.bhsd()
    half = q.dtype not in DTYPE_NAMES
    out_dtype = request.out_dtype or (q.dtype if half else torch.bfloat16)
    validate.check_out(request, out_dtype)
    validate.check_features(request)
    # FP8 operands may hold anything up to 448, which f16 scores do not: whoever pins a kernel has seen to it.
    fits = half or request.kernel or request.precision not in validate.F16_SCORES
    precision = request.precision if fits else "accurate"
    device = (q.device.type, q.device.index, shipped)
    available, refusals = head_dims(*device)
    if not refusals:
        head_dim = padded_head_dim(q.shape[3], available)
        if request.kernel is None:
            dtype = "e4m3" if half else DTYPE_NAMES[q.dtype]
            axes = (head_dim, dtype, OUT_NAMES[out_dtype], request.scaling, request.is_causal, precision)
            refusals = unserved(*device, *axes)
    if refusals:
        raise NoKernelError(*refusals)
    bottom_right = request.is_causal and request.causal_alignment == "bottom_right"
    return Plan(
        q=q,
        k=k,
        v=v,
        half=half,
        granularity=granularity,
        precision=precision,
        scale=1.0 / math.sqrt(q.shape[3]) if request.scale is None else float(request.scale),
        causal_offset=k.shape[2] - q.shape[2] if bottom_right else 0,
        out_dtype=out_dtype,
    )


def choose(request: Request, plan: Plan, *, shipped: bool = False) -> tuple[Variant, int, Decision]:
    """The table's choice for a plan, as the operator will make it."""
    return choose_kernel(
        target(plan.q.device, shipped=shipped),
        plan.q,
        plan.k,
        out_dtype=plan.out_dtype,
        scaling=request.scaling,
        causal=request.is_causal,
        precision=plan.precision,
        kernel=request.kernel or "",
        form=None if request.packed is None else request.packed.form,
    )


def options_of(request: Request, plan: Plan) -> tuple[Any, ...]:
    """What every operator takes behind its operands, in the order of their schemas."""
    out_descale = None
    if request.out_descale is not None:
        out_descale = to_canonical(request.out_descale, "tensor", (1, 1, 1, 1), plan.q.device)
    return (
        out_descale,
        plan.out_dtype,
        request.scaling,
        plan.precision,
        request.is_causal,
        plan.causal_offset,
        plan.scale,
        request.return_lse,
        request.return_amax,
        request.kernel or "",
    )


def execute(request: Request, plan: Plan) -> Outputs:
    """Run the operator: out (B, H, Sq, D), lse and amax, empty if not wanted."""
    options = options_of(request, plan)
    packed = request.packed
    if packed is not None:
        held = (packed.k, packed.v, packed.k_descale, packed.v_descale, packed.k_mean)
        return attention_packed(plan.q, *held, *options, packed.key_block, packed.amax, packed.hadamard)
    operands = (plan.q, plan.k, plan.v)
    if plan.half:
        return attention_half(*operands, *options, request.smooth_k, request.hadamard)
    given = (request.q_descale, request.k_descale, request.v_descale)
    return attention_fp8(*operands, *all_canonical(given, plan.granularity, operands), *options)


def describe(request: Request) -> str:
    """The text of ``explain``."""
    try:
        plan = make_plan(request)
        chosen = choose(request, plan)
        built = "runs: the emulator, for CPU tensors" if plan.q.device.type == "cpu" else "built: yes"
        shipped = False
    except UnsupportedError as error:
        try:
            plan = make_plan(request, shipped=True)
            chosen = choose(request, plan, shipped=True)
        except UnsupportedError as refused:  # the table's reasons beside what is not built
            return "no kernel: " + "\n           ".join(dict.fromkeys((*error.reasons, *refused.reasons)))
        built = "built: no; " + "; ".join(error.reasons)
        shipped = True
    variant, _, decision = chosen
    at = target(plan.q.device, shipped=shipped)
    foreign = plan.q.is_cuda and variant.family != at.arch
    emulated = f" (which emulate the instructions of {variant.family})" if foreign else ""
    cost = "" if decision.cost_us is None else f", {decision.cost_us:g} us"
    lines = [
        f"kernel:    {variant.id}",
        f"for:       {at.arch}, {at.sm_count} SMs{emulated}, table in {at.directory}",
        f"why:       {decision.criterion}",
        f"evidence:  {decision.evidence}{cost}",
    ]
    if decision.runner_up is not None:
        lines.append(f"runner-up: {decision.runner_up}, {decision.runner_up_cost_us:g} us")
    precision = f"softmax {variant.softmax}, scores {variant.score}, output {OUT_DTYPES[variant.out]}"
    what = "Q and K" if request.packed is None else "Q"
    quantised = f", {what} quantised to amax {score_amax(variant):g}" if plan.half else ""
    if plan.half and request.scaling == "block" and variant.key_block != KEY_BLOCK:
        quantised += f", a descale per {variant.key_block} keys"
    lines.append(f"numerics:  {precision}{quantised}")
    if plan.half and plan.q.is_cuda and request.packed is None:
        granularity = dict(zip("qkv", plan.granularity, strict=True))
        shapes = plan.q.shape, plan.k.shape
        way = faster_way(variant, granularity, *shapes, smooth_k=request.smooth_k, hadamard=request.hadamard)
        lines.append(f"query:     quantised {'by the attention kernel' if way.leave_q else 'and packed with K and V'}")
        if way.hand_over:
            lines.append("keys:      packed while the attention kernel runs, and handed over head by head")
    changed = [text for name, text in validate.TRANSFORMS.items() if getattr(request, name)]
    if changed:
        lines.append(f"before:    {', then '.join(changed)}")
    if request.packed is not None:
        lines.append(f"keys:      packed with amax {request.packed.amax:g} for {request.packed.kernel}")
    if variant.schedule != "multistage":
        form = variant.unrolled_for(plan.k.shape[2])
        tiles = "" if form is None else f"; tiles unrolled for {form[0]} to {form[1]} keys"
        lines.append(f"schedule:  {variant.schedule}, cluster {variant.cluster}{tiles}")
    if variant.head_dim != plan.q.shape[3]:
        lines.append(f"padding:   head_dim {plan.q.shape[3]} to {variant.head_dim}")
    return "\n".join([*lines, built])
