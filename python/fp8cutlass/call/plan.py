"""Which kernel runs a call, and why. Target, table, measurements and the form of packed keys are asked here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..choose import resident, tuned
from ..choose.dispatch import decide
from ..choose.lowering import stays
from ..choose.problem import Decision, Problem
from ..choose.reuse import KVForm
from ..choose.special import LISTED
from ..choose.target import Target, target
from ..dtypes import OPERANDS, OUT_NAMES, operand_name
from ..errors import UnsupportedError
from ..manifest import INTEGER, SCORE_AMAX, Resident, Variant, load_manifest
from ..quant.quantize import LIMITS, V_AMAX
from .call import Call


@dataclass(frozen=True)
class Plan:
    """A call with its kernel; ``number`` is that of the variant in the extension."""

    call: Call
    variant: Variant
    number: int
    decision: Decision
    granularity: Mapping[str, str]  # what shares a descale in "q", "k" and "v"
    resident: Resident | None = None  # what runs instead on a card: a kernel that keeps K and V in shared memory


def score_amax(variant: Variant) -> float:
    """What bf16 and fp16 Q and K are quantised to for a kernel: its scores must fit their accumulator."""
    dtype = OPERANDS[variant.dtype].qk
    return SCORE_AMAX if variant.score == "f16" else LIMITS[dtype if dtype == torch.int8 else torch.float8_e4m3fn]


def value_amax(variant: Variant) -> float:
    """What bf16 and fp16 V are quantised to."""
    return LIMITS[torch.int8] if OPERANDS[variant.dtype].v == torch.int8 else V_AMAX


def kernel_scaling(call: Call, variant: Variant) -> str:
    """The scaling mode in which a kernel runs a call."""
    return "block" if lowers(call, variant) else call.scaling


def lowers(call: Call, variant: Variant) -> bool:
    """Whether Q is lowered for a kernel."""
    return call.lowered and variant.score == "f16"


def resolve(call: Call, q: torch.Tensor, k: torch.Tensor, *, shipped: bool = False) -> Plan:
    """Choose the kernel for q (B, H, Sq, D) and k (B, Hkv, Sk, D), or packed k, whatever they hold.

    UnsupportedError where there is none. With ``shipped`` the shipped table answers for a card.
    """
    plan = resolve_for(call, q.device, q.shape, k.shape, operand_name(q.dtype, call.precision), shipped=shipped)
    return _kept(plan, q, k, shipped=shipped)


def _kept(plan: Plan, q: torch.Tensor, k: torch.Tensor, *, shipped: bool) -> Plan:
    """The plan with a kernel that keeps K and V in shared memory, where that is faster, nobody asked for another, and
    ``tune`` has found none for the problem."""
    call, source = plan.call, OUT_NAMES.get(q.dtype, "")
    if call.kind != "half" or call.kernel or call.smooth_k or call.hadamard or not q.is_cuda:
        return plan
    if call.precision in INTEGER:
        return plan
    at = target(q.device, shipped=shipped)
    manifest = load_manifest(at.directory)
    problem = problem_of(call, at, q.device, q.shape, k.shape, "e4m3")
    found = resident.chosen(manifest, problem, source, plan.variant)
    if found is None or (problem.card and tuned.find(manifest.directory, vars(problem)) is not None):
        return plan
    variant, kernel = found
    decision = Decision(
        variant.id,
        criterion=f"{kernel.id} computes the same in one kernel, for few keys",
        evidence=f"measured: at most {resident.MOST_KEYS[variant.head_dim, problem.causal]} keys (docs/lab/short.md)",
    )
    return replace(plan, variant=variant, number=manifest.index[variant.id], decision=decision, resident=kernel)


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
    form = KVForm(k_shape[3], call.key_block, call.amax) if call.kind == "packed" else None
    problem = problem_of(call, at, device, q_shape, k_shape, dtype)
    variant, number, decision = decide(at.directory, problem, call.kernel, form)
    if device.type == "cuda" and at.arch not in variant.targets:  # only a pinned one; the emulator runs them all
        raise UnsupportedError(
            f"kernel={call.kernel!r} is built for {', '.join(variant.targets)}, {device} is {at.arch}"
        )
    mode = load_manifest(at.directory).scaling[kernel_scaling(call, variant)]
    return Plan(call, variant, number, decision, OPERANDS[variant.dtype].granularity(mode))


def problem_of(
    call: Call, at: Target, device: torch.device, q_shape: Sequence[int], k_shape: Sequence[int], dtype: str
) -> Problem:
    """What the choice depends on."""
    batch, heads, seqlen_q, head_dim = q_shape
    # On the CPU the emulator does what it is told: any kernel stands for a window, one of exponentials for a cap, and a
    # pinned one of no mask for a mask or a bias.
    on_card = device.type == "cuda"
    on_kernel = on_card or bool(call.kernel)
    pinned = None if on_card else load_manifest(at.directory).known(call.kernel)
    listed = call.masked and (on_card or (pinned is not None and pinned.mask == LISTED))
    biased = call.biased and (on_card or (pinned is not None and pinned.kind == "biased"))
    window = call.mask == "window" and on_kernel
    lowered = call.lowered and (bool(call.kernel) or not stays(head_dim, k_shape[2]))
    return Problem(
        arch=at.arch,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=k_shape[2],
        batch=batch,
        heads=heads,
        dtype=dtype,
        out=OUT_NAMES[call.out_dtype],
        scaling="block" if lowered else call.scaling,
        causal=call.mask == "causal",
        precision=call.precision if lowered or not call.lowered else "accurate",
        quantised=call.kind == "fp8",
        lowered=lowered,
        sm_count=at.sm_count,
        kv_heads=k_shape[1],
        card=at.card,
        window=window,
        capped=bool(call.softcap) and on_kernel,
        biased=biased,
        listed=listed,
        whole=listed and call.whole,
    )
