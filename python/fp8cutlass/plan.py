"""From a request to the operator's arguments: check, quantise, pad, call."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from . import validate
from .descale import to_canonical
from .dispatch import Decision, Problem, decide
from .emulator import OUT_DTYPES
from .errors import NoKernelError, UnsupportedError
from .manifest import Variant
from .operator import DTYPE_NAMES, OUT_NAMES, attention_fp8, is_seq_major
from .quantize import FP8_MAX, SCORE_AMAX, V_AMAX, quantize
from .request import Plan, Request
from .target import granularities, head_dims, linear_softmax, target

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_plan(request: Request, *, shipped: bool = False) -> Plan:
    """Check a request; UnsupportedError says what is wrong with it or which kernel is missing.

    With ``shipped`` the shipped table answers even if nothing is built for the device.
    """
    validate.check_options(request)
    validate.check_shapes(request)
    validate.check_types(request)
    granularity = granularities(request.scaling)
    validate.check_descales(request, granularity)
    q, k, v = request.bhsd()
    quantise = q.dtype not in DTYPE_NAMES
    out_dtype = request.out_dtype or (q.dtype if quantise else torch.bfloat16)
    validate.check_out(request, out_dtype)
    validate.check_features(request)
    device = (q.device.type, q.device.index, shipped)
    available, refusals = head_dims(*device)
    if refusals:
        raise NoKernelError(*refusals)
    validate.check_head_dim(q.shape[3], available)
    head_dim = next(d for d in available if d >= q.shape[3])
    dtype = torch.float8_e4m3fn if quantise else q.dtype
    kernel = request.kernel or ""
    # FP8 operands may hold anything up to 448, which f16 scores do not: only what is quantised here is "fast".
    precision = request.precision if quantise else "accurate"
    problem = (head_dim, DTYPE_NAMES[dtype], OUT_NAMES[out_dtype], request.scaling, request.is_causal)
    linear, refusals = linear_softmax(*device, *problem, precision, kernel)
    if kernel and linear and request.precision == "accurate":
        raise UnsupportedError(
            f"kernel={kernel!r} has softmax='linear', which precision='accurate' excludes: "
            "pin a kernel with softmax 'exp2' or ask for precision='fast'"
        )
    if precision == "fast" and not linear:
        precision = "accurate"
        _, refusals = linear_softmax(*device, *problem, precision, kernel)
    if refusals:
        raise NoKernelError(*refusals)
    scale = 1.0 / math.sqrt(q.shape[3]) if request.scale is None else request.scale
    bottom_right = request.is_causal and request.causal_alignment == "bottom_right"
    return Plan(
        q=q,
        k=k,
        v=v,
        head_dim=head_dim,
        quantise=quantise,
        score_amax=SCORE_AMAX if linear else FP8_MAX[dtype],
        granularity=granularity,
        precision=precision,
        scale=abs(scale),
        flip_q=scale < 0,
        causal_offset=k.shape[2] - q.shape[2] if bottom_right else 0,
        out_dtype=out_dtype,
    )


def choose(request: Request, plan: Plan, *, shipped: bool = False) -> tuple[Variant, int, Decision]:
    """The table's choice for a plan, as the operator will make it."""
    at = target(plan.q.device, shipped=shipped)
    problem = Problem(
        arch=at.arch,
        head_dim=plan.head_dim,
        seqlen_q=plan.q.shape[2],
        seqlen_k=plan.k.shape[2],
        batch=plan.q.shape[0],
        heads=plan.q.shape[1],
        dtype="e4m3" if plan.quantise else DTYPE_NAMES[plan.q.dtype],
        out=OUT_NAMES[plan.out_dtype],
        scaling=request.scaling,
        causal=request.is_causal,
        precision=plan.precision,
        sm_count=at.sm_count,
    )
    return decide(at.directory, problem, request.kernel or "")


def execute(request: Request, plan: Plan) -> Results:
    """Quantise where needed and run; out (B, H, Sq, D) of the user's head_dim, lse and amax, empty if not wanted."""
    operands = []
    descales = []
    names = ("q_descale", "k_descale", "v_descale")
    amaxes = (plan.score_amax, plan.score_amax, V_AMAX)
    for x, name, granularity, amax in zip((plan.q, plan.k, plan.v), names, plan.granularity, amaxes, strict=True):
        if plan.quantise:
            x8, descale = quantize(x, granularity=granularity, amax=amax)
        else:
            x8, descale = x, to_canonical(getattr(request, name), granularity, x.shape, x.device)
        missing = plan.head_dim - x.shape[3]
        if granularity == "channel" and missing:
            descale = F.pad(descale, (0, missing), value=1.0)
        operands.append(_pad_head_dim(x8, missing))
        descales.append(descale)
    if plan.flip_q:  # the sign bit of FP8, exact
        operands[0] = (operands[0].view(torch.uint8) ^ 0x80).view(operands[0].dtype)
    out_descale = None
    if request.out_descale is not None:
        out_descale = to_canonical(request.out_descale, "tensor", (1, 1, 1, 1), plan.q.device)
    out, lse, amax_out = attention_fp8(
        *operands,
        *descales,
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
    return out[..., : plan.q.shape[3]], lse, amax_out


def _pad_head_dim(x: torch.Tensor, missing: int) -> torch.Tensor:
    """Append ``missing`` zero columns, keep the memory order (B, S, H, D) or (B, H, S, D), and make the last dimension
    contiguous by a copy where it is not."""
    if missing:
        raw = x.view(torch.uint8)
        if is_seq_major(x):
            return F.pad(raw.transpose(1, 2), (0, missing)).transpose(1, 2).view(x.dtype)
        return F.pad(raw, (0, missing)).view(x.dtype)
    return x if x.stride(3) == 1 else x.contiguous()


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
        except UnsupportedError:
            return "no kernel: " + "\n           ".join(error.reasons)
        built = "built: no; " + "; ".join(error.reasons)
        shipped = True
    variant, _, decision = chosen
    at = target(plan.q.device, shipped=shipped)
    cost = "" if decision.cost_us is None else f", {decision.cost_us:g} us"
    lines = [
        f"kernel:    {variant.id}",
        f"for:       {at.arch}, {at.sm_count} SMs, table in {at.directory}",
        f"why:       {decision.criterion}",
        f"evidence:  {decision.evidence}{cost}",
    ]
    if decision.runner_up is not None:
        lines.append(f"runner-up: {decision.runner_up}, {decision.runner_up_cost_us:g} us")
    precision = f"softmax {variant.softmax}, scores {variant.score}, output {OUT_DTYPES[variant.out]}"
    quantised = f", Q and K quantised to amax {plan.score_amax:g}" if plan.quantise else ""
    lines.append(f"numerics:  {precision}{quantised}")
    if plan.head_dim != plan.q.shape[3]:
        lines.append(f"padding:   head_dim {plan.q.shape[3]} to {plan.head_dim}")
    return "\n".join([*lines, built])
