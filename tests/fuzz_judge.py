"""The gates that a random call is held to.

A gate applies where it was stated: the z-test up to the logits of the accuracy table, the emulator's and those of randn
up to the logits of randn, what says something of the mean of many rows to many rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_cases import Case
from gpu import is_emulated
from kernel_gates import AMAX, ROW_COSINE, beyond_rounding, dequantised_limit, emulator_limit, lse_limit
from reference import FLOOR, Reference, ZTest, min_row_cosine, relative_l2, visible, z_test

from fp8cutlass.accuracy.ztest import LIMITS, P_OFFSET, byte_deviation, summarise
from fp8cutlass.emulator.emulate import Emulation
from fp8cutlass.manifest import Variant

TABLE_LOGITS = 50.0  # the K bias of the accuracy table has logits up to 45
RANDN_LOGITS = 8.0
MANY = 64  # rows, keys: a figure that is a mean of fewer scatters by itself
FLOOR_KEYS = 256  # the least rms is that of rows with many keys


@dataclass(frozen=True)
class Verdict:
    """``status``: passed, failed, or unserved where no kernel serves the call and it is refused. ``details``: the gates
    that were missed, or the refusal. ``lost``: the device is in an error state and the process of no further use."""

    status: str
    kernel: str = ""
    details: tuple[str, ...] = ()
    lost: bool = False


def raised(error: Exception, device: str) -> Verdict:
    """Of a case that raised what is not documented; ``lost`` where nothing more runs on the card."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Verdict("failed", details=(f"raised {text}",), lost=device == "cuda" and "CUDA error" in str(error))


@dataclass
class Expected(Emulation):
    """The emulator's, ``out`` in float32 with its descale applied; ``unrounded``: the same from before an e4m3 output
    was rounded (bf16), None of other outputs."""

    unrounded: torch.Tensor | None = None


def judge(
    case: Case,
    variant: Variant,
    reference: Reference,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    amax: torch.Tensor | None,
    stored: torch.dtype,
    emulated: Expected | None,
    options: dict[str, Any],
    seen: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> list[str]:
    """The gates that a result misses: ``out`` is (B, H, Sq, D) with its descale applied, ``stored`` its type. ``seen``
    (Sq,): which rows see a key, where the case does not say it. ``v_descale``: (B, Hkv, Sk), which P in u8 needs."""
    missed = []

    def hold(name: str, figure: float, limit: float) -> None:
        if not figure <= limit:  # a NaN misses
            missed.append(f"{name} {figure:.4g} > {limit:.4g}")

    # A card's tanh is good to 2^-11 of a logit.
    tanh = 2.0**-11 * min(case.softcap, reference.max_score) if emulated is not None else 0.0
    hold("elements that are no number", float((~out.isfinite()).sum()), 0)
    if seen is None:
        seen = visible(case.seqlen_q, case.seqlen_k, case.causal_offset).any(-1)
    seen = seen.to(out.device)
    hold("largest of the rows without keys", float(out[:, :, ~seen].abs().sum()), 0)
    if amax is not None:  # rounding is monotonic: the largest result is the rounded largest
        largest, half_step = float(out.abs().max()), torch.finfo(stored).eps / 2
        hold("amax against the output", abs(float(amax) - largest), 1.001 * half_step * largest)
    if lse is not None:
        # On a card the emulator has cut its scores as the tensor core does; a cut that it misses costs a unit a step.
        limit = lse_limit(variant, reference.max_partial, emulated=emulated is None or is_emulated(variant))
        if case.smooth_k:  # what smoothing took from the logits is added again: a sum, a product and a sum in float32
            limit += 3 * 2.0**-24 * reference.max_score
        limit += tanh
        expected = reference.lse if emulated is None else emulated.lse.double()
        hold("rows that wrongly have keys, or none", float(((lse == -torch.inf) != ~seen).sum()), 0)
        error = (lse.double() - expected)[:, :, seen].abs()
        hold("LSE", float(error.max()) if error.numel() else 0.0, limit)
    if reference.max_score <= TABLE_LOGITS:
        normal = case.values == "normal" and case.scale is None and case.alignment is None
        floor = FLOOR if normal and case.seqlen_k >= FLOOR_KEYS else 0.0
        step = float(options.get("out_descale", 0.0)) * float(torch.finfo(stored).smallest_normal)
        z = _z_test(out, reference, variant, stored, step, v_descale)
        excused = _excused(case, variant, case.batch * case.heads * int(seen.sum()))
        if emulated is not None:  # what the emulator misses as well is the algorithm's, not the kernel's
            e = _z_test(emulated.out, reference, variant, stored, step, v_descale)
            excused |= {n for n in LIMITS if abs(getattr(z, n)) <= 1.02 * abs(getattr(e, n))}
        missed += [f"z: {x}" for x in z.refusals(floor=floor) if x.split()[0] not in excused]
    many = case.batch * case.heads * int(seen.sum()) >= MANY
    if emulated is not None and many and reference.max_score <= RANDN_LOGITS and float(emulated.amax) > 0:
        if emulated.unrounded is None:
            away, limit = relative_l2(out, emulated.out), emulator_limit(variant) + tanh
        else:  # before the rounding the limit is that of a 16-bit output
            away = beyond_rounding(out, emulated.unrounded, float(options["out_descale"]))
            limit = emulator_limit(replace(variant, out="bf16"))
        hold("relative L2 to the emulator", away, limit)
        if case.seqlen_k >= MANY:
            found = out.abs().max() if amax is None else amax
            hold("amax to the emulator", abs(float(found) / float(emulated.amax) - 1), AMAX)
            if case.values == "normal" and case.head_dim >= 32:
                hold("relative L2 to float64", relative_l2(out, reference.out), dequantised_limit(variant))
                cosine = min_row_cosine(out[:, :, seen], reference.out[:, :, seen])
                hold("1 - cosine of the worst row", 1 - cosine, 1 - ROW_COSINE)
    return missed


def _excused(case: Case, variant: Variant, rows: int) -> set[str]:
    """Figures of the z-test that say nothing of a case, as the theory takes the roundings of many P as independent."""
    if case.values == "constant":  # one number, and one rounding of it
        return {"rms", "row_rms", "mean"}
    excused = {"rms"} if rows < MANY else set()
    coarse = variant.softmax in ("linear", "codes", "bytes")
    equal = case.values in ("zeros", "tiny") or (case.scale is not None and abs(case.scale) < 0.1)
    if equal or case.seqlen_k < MANY or case.alignment is not None:  # equal P err alike, few P do not average
        excused |= {"row_rms", "mean"} | ({"rms"} if coarse else set())
    if coarse:  # the worst row of its interpolation, or of P below a step
        excused.add("row_rms")
    return excused


def _z_test(
    out: torch.Tensor,
    reference: Reference,
    variant: Variant,
    stored: torch.dtype,
    smallest: float,
    v_descale: torch.Tensor | None = None,
) -> ZTest:
    """The z-test, whose theory has relative roundings of the output only: what is below ``smallest``, the smallest
    normal number of an e4m3 output, counts as right."""
    held = torch.where(reference.out.abs() < smallest, reference.out.float(), out)
    if variant.softmax == "bytes":
        assert v_descale is not None
        group = out.shape[1] // v_descale.shape[1]
        v_descale = v_descale.to(out.device).repeat_interleave(group, 1)
        sigma = byte_deviation(reference, v_descale, variant.tile_n, stored)
        z = summarise((held.double() - reference.out) / sigma, held)
        # A P below one half becomes 0 in every row, so it is keys and columns that err independently, not rows; of
        # the keys those that get more than a 0 in some row.
        share = reference.probabilities * v_descale[:, :, None].double()
        keys = int((share > share.amax(-1, keepdim=True) / (2 * 255)).any(2).sum()) // group
        return replace(z, elements=min(z.elements, keys * z.columns))
    if variant.softmax in ("linear", "codes"):
        held = _without_least(held, reference, variant.softmax)
    return z_test(held, reference, variant.softmax, stored)


def _without_least(out: torch.Tensor, reference: Reference, softmax: str) -> torch.Tensor:
    """``out`` as if the least P were right: a code below 8 is a subnormal e4m3, whose P may be lost whole. A normal one
    is 2^-6 and more."""
    p = reference.probabilities
    least = p < p.amax(-1, keepdim=True) * 2.0 ** (-6 - P_OFFSET[softmax])
    lost = (p * least) @ reference.values.abs()
    away = out.double() - reference.out
    return reference.out + away.sign() * (away.abs() - lost).clamp(min=0)
