"""Calls of the bare operator ``torch.ops.fp8cutlass.attend``, by name."""

from __future__ import annotations

from typing import Any

import torch

from fp8cutlass import quantize
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.plan import Plan
from fp8cutlass.choose.problem import Decision
from fp8cutlass.dtypes import OPERANDS
from fp8cutlass.manifest import Manifest, Variant

ASKED: dict[str, Any] = {"out_dtype": torch.bfloat16, "scaling": "head", "precision": "accurate", "scale": 0.125}
ASKED |= {"return_lse": True, "return_amax": True}


def split(kind: str, **given: Any) -> tuple[Call, Tensors]:
    """A call and its tensors: names of ``Tensors`` and of ``Call`` together, the latter with the defaults of ASKED."""
    tensors = Tensors(**{name: given.pop(name) for name in Tensors._fields if name in given})
    return Call(kind, **ASKED | given), tensors


def arguments(kind: str, **given: Any) -> tuple[Any, ...]:
    """The same as arguments of the operator, in order."""
    call, t = split(kind, **given)
    return t.q, t.k, t.v, list(t[3:]), call.text(), *call.numbers()


def fp8_arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /, **changes: Any) -> tuple[Any, ...]:
    """Of operands that are quantised here, with a descale for each head."""
    pairs = [quantize(x, granularity="head") for x in (q, k, v)]
    given: dict[str, Any] = dict(zip("qkv", (x for x, _ in pairs), strict=True))
    given |= dict(zip(("q_descale", "k_descale", "v_descale"), (d for _, d in pairs), strict=True))
    return arguments("fp8", **given | changes)


def half_arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /, **changes: Any) -> tuple[Any, ...]:
    return arguments("half", **{"q": q, "k": k, "v": v} | changes)


def plan_of(call: Call, variant: Variant, manifest: Manifest) -> Plan:
    """A call by this kernel, whatever the table says."""
    number = manifest.index[variant.id]
    granularity = OPERANDS[variant.dtype].granularity(manifest.scaling[call.scaling])
    return Plan(call, variant, number, Decision(variant.id), granularity)
