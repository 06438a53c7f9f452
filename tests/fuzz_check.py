"""One random call of ``attention``: run, and held to float64 and, on a card, to the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_cases import Case, Inputs, arguments, inputs_of, sinks_of, spread
from fuzz_judge import Expected, Verdict, judge, raised
from gpu import is_emulated
from layouts import on_card
from reference import (
    Operands,
    masked64,
    operands_of,
)
from tensor_core import cut_products

import fp8cutlass
from fp8cutlass import UnsupportedError
from fp8cutlass.call.call import FAR, Tensors
from fp8cutlass.call.launch import lowered_operands
from fp8cutlass.call.options import F16_SCORES
from fp8cutlass.choose.target import granularities, target
from fp8cutlass.dtypes import DTYPE_NAMES, OUT_NAMES
from fp8cutlass.emulator.emulate import Emulation, emulate
from fp8cutlass.manifest import INTEGER, Variant, load_manifest
from fp8cutlass.quant.descale import to_canonical
from fp8cutlass.quant.prepare import prepared
from fp8cutlass.quant.smooth import key_mean

# Of 448, what the largest result becomes in an e4m3 output: a code. A tie, such as 100 is, would round equal results
# (constant V) either way, and 5% more would not show.
OUT_CODE = 104.0


def run_case(case: Case, device: str) -> Verdict:
    """Run and judge one case; an error that is not documented is a failure."""
    try:
        return _run(case, device)
    except Exception as error:  # whatever it is, it belongs into the report with the case's number
        return raised(error, device)


def _run(case: Case, device: str) -> Verdict:
    inputs = inputs_of(case)
    tensors = [on_card(x) if device == "cuda" else x for x in inputs.tensors]
    options = arguments(case, inputs, device)
    if case.out == "e4m3":
        options["out_descale"] = 1.0
    if case.pick is not None:
        options["kernel"] = _pinned(case, tensors, options)
    served, text = fp8cutlass.supports(*tensors, **options)
    if not served:
        return _refused(tensors, options, text)
    variant = load_manifest(target(tensors[0].device).directory).find(text.split()[0])

    operands, mean = operands_for(case, inputs, variant)
    real = [x.to(device) for x in operands.real]
    reference = masked64(*real, case.softmax_scale, case.seen.to(device), case.softcap, sinks_of(case))
    if case.out == "e4m3":
        options["out_descale"] = float(reference.out.abs().amax() / OUT_CODE) or 1.0

    results = fp8cutlass.attention(*tensors, **options, return_lse=case.lse, return_amax=True)
    out, lse, amax = results[0], results[1] if case.lse else None, results[-1]
    missed = [] if _same_bits(results, _again(tensors, options, case.lse)) else ["a second call gives other bits"]
    if not _same_bits((out,), (fp8cutlass.attention(*tensors, **options),)):
        missed.append("a call without LSE and amax gives other bits")
    out = out if case.layout == "bhsd" else out.transpose(1, 2)
    real_out = out.float() * options.get("out_descale", 1.0)
    if mean is not None and lse is not None:  # the LSE is that of the keys as they were given
        q = inputs.tensors[0] if case.layout == "bhsd" else inputs.tensors[0].transpose(1, 2)
        shared = mean.repeat_interleave(case.heads // case.kv_heads, 1)[:, :, None].double()
        shift = case.softmax_scale * (q.double() * shared).sum(-1)
        lse = lse - shift.to(device)
        reference.max_score = max(reference.max_score, float(shift.abs().max()))  # of the logits that the LSE is of
    emulated = None
    if device == "cuda":
        exact = is_emulated(variant) or case.precision in INTEGER  # no product of integers is cut
        with nullcontext() if exact else cut_products(two_terms=variant.softmax == "exp2x2"):
            emulated = _emulated(case, operands, variant, options, device)
    seen = case.seen.any(-1)
    v_descale = operands.descales[2]
    missed += judge(case, variant, reference, real_out, lse, amax, out.dtype, emulated, options, seen, v_descale)
    return Verdict("failed" if missed else "passed", variant.id, tuple(missed))


def _pinned(case: Case, tensors: list[torch.Tensor], options: dict[str, Any]) -> str | None:
    """One of the kernels that serve a call, by the case's draw; None where there is none."""
    at = target(tensors[0].device)
    wanted: dict[str, Any] = {"dtype": INTEGER.get(case.precision) or DTYPE_NAMES.get(tensors[0].dtype, "e4m3")}
    if case.softcap:
        mask = "window" if case.window_offset is not None else "full" if case.causal_offset is None else "causal"
        wanted |= {"kind": "capped", "walk": "dense", "mask": mask}
    elif case.window_offset is None:
        wanted |= {"kind": "fwd", "causal": case.causal_offset is not None}
    else:
        wanted["kind"] = "window"
    wanted["out"] = OUT_NAMES[options.get("out_dtype", tensors[0].dtype if case.half else torch.bfloat16)]
    fitting = [
        v.id
        for v in load_manifest(at.directory).variants
        if all(getattr(v, name) == value for name, value in wanted.items())
        and v.head_dim >= case.head_dim
        and (case.half or v.softmax == "exp2")  # the scores of other FP8 operands may not fit f16
        and fp8cutlass.supports(*tensors, **options, kernel=v.id)[0]
    ]
    return fitting[int((case.pick or 0.0) * len(fitting))] if fitting else None


def _refused(tensors: list[torch.Tensor], options: dict[str, Any], text: str) -> Verdict:
    """``attention`` must refuse what ``supports`` says is not served, with the same words."""
    try:
        fp8cutlass.attention(*tensors, **options)
    except UnsupportedError as error:
        if str(error) == text:
            return Verdict("unserved", details=(text,))
        return Verdict("failed", details=(f"supports says {text!r}, attention raises {str(error)!r}",))
    return Verdict("failed", details=(f"supports says {text!r}, attention serves it",))


def _again(tensors: list[torch.Tensor], options: dict[str, Any], lse: bool) -> tuple[torch.Tensor, ...]:
    """The same call where torch fills what it allocates with NaN: every element has to be written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return fp8cutlass.attention(*tensors, **options, return_lse=lse, return_amax=True)
    finally:
        torch.use_deterministic_algorithms(False)


def _same_bits(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(some, others, strict=True)
    )


def operands_for(case: Case, inputs: Inputs, variant: Variant) -> tuple[Operands, torch.Tensor | None]:
    """The FP8 operands that a kernel has to be given, and what they stand for, on the CPU; the mean that was taken off
    the keys."""
    q, k, v = inputs.tensors if case.layout == "bhsd" else (x.transpose(1, 2) for x in inputs.tensors)
    if case.half:
        mean = key_mean(k) if case.smooth_k else None
        changes = {"head_dim": variant.head_dim, "hadamard": case.hadamard}
        changed = prepared(q, None, **changes), prepared(k, mean, **changes)
        return operands_of(variant, *changed, v, case.scaling), mean
    if variant.score == "f16":  # never chosen for finer descales
        heads = [
            to_canonical(d, "head", x.shape, x.device) for x, d in zip((q, k, v), inputs.descales or (), strict=True)
        ]
        return lowered_for(variant, (q, k, v), heads), None
    modes = granularities(_mode(case, inputs))
    pairs = list(zip((q, k, v), inputs.descales or (), modes, strict=True))
    canonical = tuple(to_canonical(d, g, x.shape, x.device) for x, d, g in pairs)
    real = tuple(x.double() * spread(d, g, tuple(x.shape)).double() for x, d, g in pairs)
    return Operands((q, k, v), canonical, real), None  # type: ignore[arg-type]


def _mode(case: Case, inputs: Inputs) -> str:
    """The scaling mode in which an FP8 call is made: one that could be lowered has descales of heads."""
    coarse = all(not isinstance(d, torch.Tensor) or d.dim() < 3 for d in inputs.descales or ())
    could = coarse and case.source == "e4m3" and case.precision in F16_SCORES and case.scaling == "block"
    return "head" if could and not case.softcap and case.pick is None else case.scaling


def lowered_for(variant: Variant, qkv: Sequence[torch.Tensor], descales: Sequence[torch.Tensor]) -> Operands:
    """What e4m3 operands with descales of heads become for a kernel with f16 scores, and what that stands for."""
    q, k, v, *made = lowered_operands(variant, Tensors(*qkv, *descales))[:6]
    spread = [d.repeat_interleave(variant.key_block, 2)[:, :, : k.shape[2]] for d in made[1:]]
    real = (x.double() * d[..., None].double() for x, d in zip((q, k, v), (made[0], *spread), strict=True))
    return Operands((q, k, v), tuple(made), tuple(real))  # type: ignore[arg-type]


def _emulated(case: Case, operands: Operands, variant: Variant, options: dict[str, Any], device: str) -> Expected:
    """The emulator of the kernel on the same operands, padded to its head_dim."""

    def wide(x: torch.Tensor, negate: bool = False) -> torch.Tensor:
        raw = F.pad(x.contiguous().view(torch.uint8), (0, variant.head_dim - x.shape[3]))
        if negate:  # an integer, which is never -128, or the sign bit of FP8
            raw = -raw if x.dtype == torch.int8 else raw ^ 0x80
        return raw.view(x.dtype).to(device)

    q, k, v = operands.fp8
    mode = case.scaling if case.half else _mode(case, inputs_of(case))
    descales = [d.to(device) for d in operands.descales]
    if case.scaling == "token":
        descales[2] = F.pad(descales[2], (0, variant.head_dim - v.shape[3]), value=1.0)
    out_descale = torch.full((1,), options["out_descale"], device=device) if variant.out == "e4m3" else None

    def run(variant: Variant) -> Emulation:
        result = emulate(
            wide(q, negate=case.softmax_scale < 0),
            wide(k),
            wide(v),
            *descales,
            variant=variant,
            scale=abs(case.softmax_scale),
            scaling="block" if variant.score == "f16" and not case.half else mode,
            causal_offset=FAR if case.causal_offset is None else case.causal_offset,
            window_offset=case.window_offset,
            softcap=case.softcap,
            sinks=options.get("sinks"),
            out_descale=out_descale if variant.out == "e4m3" else None,
            emulated_mma=is_emulated(variant),
        )
        result.out = result.out[..., : case.head_dim].float()
        return result

    result = run(variant)
    if variant.out != "e4m3":
        return Expected(result.out, result.lse, result.amax)
    unrounded = run(replace(variant, out="bf16")).out
    return Expected(result.out * options["out_descale"], result.lse, result.amax, unrounded=unrounded)
