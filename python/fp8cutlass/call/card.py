"""Calls on a card: each is one operator of the extension, which :func:`known` keeps for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..manifest import load_manifest
from ..memory import is_seq_major
from ..native import extension
from ..native.attend import PACKED_BEFORE, Attend, Way, faster_way, prepare
from ..native.fused import readable
from ..native.masks import NO_MASK, MaskParts, pack_mask
from ..quant.quantize import LIMITS
from ..quant.smooth import restore_lse
from .call import Outputs, Tensors
from .masks import packed, parts
from .plan import Plan, score_amax

# Query, key and value in layout bhsd, or a PackedKV and None, if FP8 the descales: tensors or numbers, and sinks. A
# PackedKV without sinks takes ``out``, as ``Attend.run`` does.
Known = Callable[..., Outputs]


def prepared_call(plan: Plan, t: Tensors, *, way: Way | None = None, numbers: Sequence[float] = (0.0,) * 3) -> Attend:
    """A call on a card, less its tensors.

    ``way`` is for bf16 and fp16 operands, and is taken as far as it is open; None takes the fastest. ``numbers`` are
    the descales of FP8 operands that are no tensors.
    """
    call, variant = plan.call, plan.variant
    changed = {"smooth_k": call.smooth_k and call.kind == "half", "hadamard": call.hadamard}
    if call.kind != "half":
        way = PACKED_BEFORE
    elif way is None:
        way = faster_way(variant, plan.granularity, t.q.shape, t.k.shape, **changed)
    resident = -1
    if plan.resident is None:
        extension.load_kernels(plan.number, t.q.get_device(), t.q.dtype)
    else:
        resident = load_manifest(extension.built_dir()).residents.index(plan.resident)
        extension.load_resident(resident, t.q.get_device())
    banded = variant.mask == "window"
    causal_offset, window_offset = call.offsets(t.q.shape[2], t.k.shape[2], both=banded)
    return prepare(
        call.kind,
        variant,
        plan.number,
        plan.granularity,
        head_dim=t.q.shape[3],
        amax=LIMITS[torch.float8_e4m3fn] if call.kind == "fp8" and not call.lowered else score_amax(variant),
        seq_major=is_seq_major(t.q),
        scale=call.scale,
        causal_offset=causal_offset,
        window_offset=window_offset,
        return_lse=call.return_lse,
        merge_lse=call.merge_lse,
        return_amax=call.return_amax,
        softcap=call.softcap,
        way=way,
        resident=resident,
        descales=numbers,
        **changed,
    )


def run_on_card(plan: Plan, t: Tensors) -> Outputs:
    """Run a call of any kind, no dimension empty. What kernels cannot read is copied first."""
    attend, kind = prepared_call(plan, t), plan.call.kind
    mask = _mask_of(plan, t)
    if kind == "packed":
        return _packed(attend, readable(t.q), t, mask)
    q, k, v = (readable(x) for x in t[:3])
    if kind == "half":
        return Outputs(*attend(q, k, v, t.out_descale, t.sinks, mask))
    return Outputs(*attend.run((q, k, v, t.q_descale, t.k_descale, t.v_descale), t.out_descale, t.sinks, mask))


def _mask_of(plan: Plan, t: Tensors) -> MaskParts:
    """The mask of a call as kernels read it. A boolean one is packed; nothing is waited for."""
    if plan.call.biased:
        return MaskParts(bias=t.bias)
    if not plan.call.masked:
        return NO_MASK
    if t.seen is not None:
        return MaskParts(*pack_mask(t.seen, t.k.shape[2]))
    mask = packed(None, {"tiles": t.tiles, "counts": t.counts, "bits": t.bits}, t.q.shape[2], t.k.shape[2])
    if mask is None:
        return NO_MASK
    bits = None if mask.bits is None else mask.bits.contiguous()
    return MaskParts(mask.tiles.contiguous(), mask.counts.contiguous(), bits)


def _packed(
    attend: Attend, q: torch.Tensor, t: Tensors, mask: MaskParts = NO_MASK, out: torch.Tensor | None = None
) -> Outputs:
    outputs = Outputs(*attend.run((q, t.k, t.v, t.k_descale, t.v_descale), t.out_descale, t.sinks, mask, out=out))
    if t.k_mean is not None and outputs.lse is not None:
        restore_lse(outputs.lse, t.q, t.k_mean[..., : t.q.shape[3]], attend.scale)
    return outputs


def known(plan: Plan, t: Tensors, descales: Sequence[Any] = ()) -> Known | None:
    """What runs further calls of this plan, on arguments that agree with these in all metadata; None where each of them
    takes the long way. ``descales`` are those of FP8 operands as they were given: numbers stay what they are."""
    kind = plan.call.kind
    if t.empty:
        return None
    copied = any(readable(x) is not x for x in (t[:1] if kind == "packed" else t[:3]))
    if plan.call.masked or plan.call.biased:
        return None if copied or kind == "packed" or plan.call.smooth_k else _with_mask(plan, t, descales)
    if t.sinks is not None:
        return None if copied and kind == "half" else _with_sinks(plan, t, descales)
    if kind == "half":
        if copied:
            return None
        attend = prepared_call(plan, t)
        if attend.smooth_k:
            return lambda q, k, v: Outputs(*attend(q, k, v))
        run = attend.run
        return lambda *inputs: Outputs(*run(inputs))
    if kind == "fp8":
        tensors = [isinstance(x, torch.Tensor) for x in descales]
        run = prepared_call(plan, t, numbers=_numbers(descales)).run
        if copied:
            return lambda q, k, v, *given: Outputs(*run((readable(q), readable(k), readable(v), *_tensors(given))))
        if all(tensors):
            return lambda *inputs: Outputs(*run(inputs))
        if not any(tensors):
            return lambda q, k, v, *_: Outputs(*run((q, k, v, None, None, None)))
        return lambda q, k, v, *given: Outputs(*run((q, k, v, *_tensors(given))))
    attend = prepared_call(plan, t)
    run = attend.run
    if copied or (t.k_mean is not None and plan.call.return_lse):
        return lambda q, kv, _, out=None: _packed(
            attend, readable(q), Tensors(q, kv.k, kv.v, None, kv.k_descale, kv.v_descale, None, kv.k_mean), out=out
        )
    return lambda q, kv, _, out=None: Outputs(*run((q, kv.k, kv.v, kv.k_descale, kv.v_descale), out=out))


def _with_sinks(plan: Plan, t: Tensors, descales: Sequence[Any]) -> Known:
    """The same of a call with sinks, which come last. They are float32 or become it."""
    kind = plan.call.kind
    run = prepared_call(plan, t, numbers=_numbers(descales) if kind == "fp8" else (0.0,) * 3).run
    wide = torch.float32
    if kind == "half":
        return lambda q, k, v, sinks: Outputs(*run((q, k, v), None, sinks if sinks.dtype is wide else sinks.float()))
    if kind == "fp8":
        return lambda q, k, v, *given: Outputs(
            *run((readable(q), readable(k), readable(v), *_tensors(given[:-1])), None, given[-1].float())
        )
    return lambda q, kv, _, sinks: Outputs(
        *run((readable(q), kv.k, kv.v, kv.k_descale, kv.v_descale), None, sinks.float())
    )


def _with_mask(plan: Plan, t: Tensors, descales: Sequence[Any]) -> Known:
    """The same of a call with a mask of any kind, which comes last."""
    fp8, sinks = plan.call.kind == "fp8", t.sinks is not None
    run = prepared_call(plan, t, numbers=_numbers(descales) if fp8 else (0.0,) * 3).run

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Outputs:
        mask = _mask(given[-1], k.shape[2])
        one = given[-2].float() if sinks else None
        if not fp8:
            return Outputs(*run((q, k, v), None, one, mask))
        return Outputs(*run((q, k, v, *_tensors(given[:3])), None, one, mask))

    return call


def _mask(mask: Any, keys: int) -> MaskParts:
    """Of a mask whose form is known to fit."""
    given = parts(mask)
    seen = given.get("seen")
    return MaskParts(**given) if seen is None else MaskParts(*pack_mask(seen, keys))


def _numbers(descales: Sequence[Any]) -> list[float]:
    return [0.0 if isinstance(x, torch.Tensor) else float(x) for x in descales]


def _tensors(given: Sequence[Any]) -> list[torch.Tensor | None]:
    return [x if isinstance(x, torch.Tensor) else None for x in given]
