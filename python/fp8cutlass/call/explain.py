"""The text of ``explain``."""

from __future__ import annotations

import torch

from ..choose.target import target
from ..errors import UnsupportedError
from ..manifest import KEY_BLOCK
from ..masks.bits import TILE
from ..native.attend import faster_way
from ..quant.lower import MEAN
from .backward import asked
from .call import Call, Tensors
from .masks import packed
from .options import TRANSFORMS
from .plan import Plan, kernel_scaling, lowers, resolve, score_amax
from .request import Request
from .settle import settle


def describe(request: Request) -> str:
    """Which kernel serves a request, why, and how its operands come to it; or every reason why there is none."""
    shipped = False
    try:
        call, tensors = settle(request)
        plan = resolve(call, tensors.q, tensors.k)
        built = "runs: the emulator, for CPU tensors" if tensors.q.device.type == "cpu" else "built: yes"
    except UnsupportedError as error:
        shipped = True
        try:
            call, tensors = settle(request, shipped=True)
            plan = resolve(call, tensors.q, tensors.k, shipped=True)
        except UnsupportedError as refused:  # the table's reasons beside what is not built
            return "no kernel: " + "\n           ".join(dict.fromkeys((*error.reasons, *refused.reasons)))
        built = "built: no; " + "; ".join(error.reasons)
    lines = [*_choice(plan, tensors, shipped), *_operands(call, tensors, plan)]
    variant, keys = plan.variant, tensors.k.shape[2]
    if call.kind == "packed":
        holder = "" if request.key is None else f" for {request.key.kernel}"
        lines.append(f"keys:      packed with amax {call.amax:g}{holder}")
    lines += _mask(call, tensors)
    if call.mask == "window":
        lines.append(f"window:    {_end(call.left)} keys before and {_end(call.right)} after a row's own")
    if call.softcap:
        lines.append(f"softcap:   {call.softcap:g}")
    if tensors.sinks is not None:
        lines.append("sinks:     one a head, added by the attention kernel")
    if asked(request.options.backward, tensors):
        lines.append("gradient:  torch's flash attention, from the result and the LSE of this call")
    if variant.schedule != "multistage":
        more = call.return_lse, call.return_amax, tensors.sinks is not None, asked(request.options.backward, tensors)
        form = variant.unrolled_for(keys, plain=not any(more))
        tiles = "" if form is None else f"; tiles unrolled for {form[0]} to {form[1]} keys"
        lines.append(f"schedule:  {variant.schedule}, cluster {variant.cluster}{tiles}")
    if variant.head_dim != tensors.q.shape[3]:
        lines.append(f"padding:   head_dim {tensors.q.shape[3]} to {variant.head_dim}")
    return "\n".join([*lines, built])


def _mask(call: Call, t: Tensors) -> list[str]:
    lines = []
    if call.masked and not t.empty:
        text, given, mask = "known when it runs", t.seen if t.tiles is None else t.tiles, None
        if type(given) is torch.Tensor and not given.is_meta:  # the others have no values
            mask = packed(t.seen, {"tiles": t.tiles, "counts": t.counts, "bits": t.bits}, t.q.shape[2], t.k.shape[2])
        if mask is not None:
            skipped, part, whole = mask.counted()
            text = f"{skipped} skipped, {part} seen in part, {whole} whole"
            shared = "" if mask.rows == t.q.shape[2] else " for all rows"
            text += f", of {skipped + part + whole}{shared} (batches x heads {mask.shape[0]} x {mask.shape[1]})"
        lines.append(f"mask:      tiles of {TILE} rows and keys: {text}")
    if call.biased and t.bias is not None:
        lines.append(f"bias:      {tuple(t.bias.shape)} {t.bias.dtype}, added to the scaled scores in float32")
    return lines


def _end(keys: int | None) -> str:
    return "all" if keys is None else str(keys)


def _choice(plan: Plan, tensors: Tensors, shipped: bool) -> list[str]:
    variant, decision = plan.variant, plan.decision
    at = target(tensors.q.device, shipped=shipped)
    foreign = tensors.q.is_cuda and variant.family != at.arch
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
    return lines


def _operands(call: Call, tensors: Tensors, plan: Plan) -> list[str]:
    variant, half = plan.variant, call.kind != "fp8"
    precision = f"softmax {variant.softmax}, scores {variant.score}, output {call.out_dtype}"
    what = "Q" if call.kind == "packed" else "Q and K"
    quantised = f", {what} quantised to amax {score_amax(variant):g}" if half else ""
    if lowers(call, variant):
        quantised = f", rows of Q divided by powers of two to at most {MEAN:g} on average"
    if (half or lowers(call, variant)) and kernel_scaling(call, variant) == "block" and variant.key_block != KEY_BLOCK:
        quantised += f", a descale per {variant.key_block} keys"
    lines = [f"numerics:  {precision}{quantised}"]
    if plan.resident is not None:
        lines.append(f"one kernel: {plan.resident.id}, K and V kept in shared memory; nothing is packed")
    elif call.kind == "half" and tensors.q.is_cuda:
        shapes = tensors.q.shape, tensors.k.shape
        way = faster_way(variant, plan.granularity, *shapes, smooth_k=call.smooth_k, hadamard=call.hadamard)
        lines.append(f"query:     quantised {'by the attention kernel' if way.leave_q else 'and packed with K and V'}")
        if way.hand_over:
            lines.append("keys:      packed head by head while the attention kernel runs")
    changed = [text for name, text in TRANSFORMS.items() if getattr(call, name)]
    if changed:
        lines.append(f"before:    {', then '.join(changed)}")
    return lines
