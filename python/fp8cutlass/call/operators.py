"""``torch.ops.fp8cutlass``: ``attend`` runs a call, ``pack_kv`` makes packed keys and values. On CPU and CUDA alike.

Both are functional and have fake kernels, so torch.compile, torch.export and FakeTensor can trace them. They refuse
what C++ and the emulator cannot take. The messages for users are in :mod:`.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .._ops import NAMESPACE
from ..choose.target import target
from ..dtypes import DTYPE_NAMES, HALF_DTYPES, OPERANDS, operand_name
from ..errors import UnsupportedError
from ..manifest import Manifest, Variant, load_manifest
from ..native.fused import Operands, descale_shape, empty_operands, fill, packed_shape, readable
from ..quant.descale import canonical_shape
from ..quant.smooth import key_mean
from . import distributed
from .call import Call, Outputs, Tensors, parse
from .launch import empty_outputs, packed_keys, run
from .masks import wrong_parts
from .options import F16_SCORES, wrong_scale, wrong_softcap
from .plan import resolve, score_amax

REST = Tensors._fields[3:]  # the tensors that `attend` takes as a list
OPTIONAL = ("out_descale", "k_mean", "sinks")

_library = torch.library.Library(NAMESPACE, "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator on CPU and CUDA, ``fake`` for tensors without memory, and return it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, _without_autocast(run), "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """The emulator's products are float32, whatever autocast makes of those of the program."""

    def inside(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return run(*args)
        with torch.autocast("cpu", enabled=False):
            return run(*args)

    return inside


def execute(call: Call, t: Tensors) -> Outputs:
    """Run a call through the operator, which torch's modes, transforms and compilers see."""
    if distributed.given(t):
        return distributed.attend(call, t, execute)
    results = list(attend(t.q, t.k, t.v, list(t[3:]), call.text(), *call.numbers()))
    lse = results[1] if call.return_lse else None
    return Outputs(results[0], lse, results[-1] if call.return_amax else None)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rest: Sequence[torch.Tensor | None],
    text: str,
    *numbers: Any,
) -> list[torch.Tensor]:
    call, t = parse(text, numbers), Tensors(q, k, v, *rest)
    _check(call, t, load_manifest(target(q.device).directory).scaling)
    plan = resolve(call, q, k)
    return [x for x in run(plan, t) if x is not None]


def _fake_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: Any, text: str, *numbers: Any
) -> list[torch.Tensor]:
    return [x for x in empty_outputs(parse(text), q) if x is not None]


attend = register(
    "attend(Tensor q, Tensor k, Tensor v, Tensor?[] rest, str call, SymInt? left, SymInt? right, SymInt key_block, "
    "float scale, float amax, float softcap) -> Tensor[]",
    _attend,
    _fake_attend,
)


def _check(call: Call, t: Tensors, modes: dict[str, dict[str, str]]) -> None:
    """What is wrong with a direct call of the operator; ``attention`` checks the same with longer messages."""
    q, k, v = t[:3]
    wrong = [f"{name} must have 4 dimensions" for name, x in zip("qkv", t, strict=False) if x is None or x.dim() != 4]
    if call.scaling not in modes:
        wrong.append(f"scaling must be one of {', '.join(modes)}, got {call.scaling!r}")
    if call.kind == "packed" and call.key_block < 1:
        wrong.append(f"key_block must be at least 1, got {call.key_block}")
    if wrong:
        raise UnsupportedError(*wrong)
    (batch, heads, _, head_dim), kv_heads = q.shape, k.shape[1]
    if heads and (kv_heads == 0 or heads % kv_heads):
        wrong.append(f"the heads of k must divide the {heads} of q, got {kv_heads}")
    dtypes = tuple(DTYPE_NAMES) if call.kind == "fp8" else HALF_DTYPES
    alike = (q,) if call.kind == "packed" else (q, k, v)
    if q.dtype not in dtypes or any(x.dtype != q.dtype for x in alike):
        accepted = " or all ".join(map(str, dtypes))
        wrong.append(f"q, k and v must be all {accepted}, got {', '.join(str(x.dtype) for x in alike)}")
    if k.shape[0] != batch or (call.kind != "packed" and (k.shape != v.shape or k.shape[3] != head_dim)):
        wrong.append(f"k and v must be ({batch}, Hkv, Sk, {head_dim}), got {tuple(k.shape)} and {tuple(v.shape)}")
    if call.kind == "packed" and not 0 < head_dim <= k.shape[3]:
        wrong.append(f"q must be ({batch}, H, Sq, 1..{k.shape[3]}), got {tuple(q.shape)}")
    if (call.out_dtype == torch.float8_e4m3fn) != (t.out_descale is not None):
        wrong.append("out_descale must be given with out_dtype=torch.float8_e4m3fn, and must be None otherwise")
    for reason in (wrong_scale("scale", call.scale), wrong_softcap("softcap", call.softcap)):
        wrong += [] if reason is None else [reason]
    given = {name: getattr(t, name) for name in ("seen", "bias", "tiles", "counts", "bits")}
    wrong += wrong_parts(given, (batch, heads, q.shape[2], k.shape[2]), q.device)
    there = given["seen"] is not None or given["tiles"] is not None, given["bias"] is not None
    if (call.masked, call.biased) != there:
        wrong.append(f"masked={call.masked} and biased={call.biased} must say whether there is a mask and a bias")
    if call.biased and call.precision in F16_SCORES:
        wrong.append(f"a bias is added to float32 scores, which precision={call.precision!r} may not have")
    expected = _packed_shapes(call, t, modes) if call.kind == "packed" else _descale_shapes(call, t, modes)
    expected["sinks"] = ((heads,), torch.float32)
    for name, (shape, dtype) in expected.items():
        x = getattr(t, name)
        if x is None and name in OPTIONAL:
            continue
        if x is None or x.shape != shape or x.dtype != dtype or x.device != q.device:
            got = "none" if x is None else f"{x.dtype}, {tuple(x.shape)} on {x.device}"
            wrong.append(f"{name} must be {dtype} of shape {tuple(shape)} on {q.device}, got {got}")
        elif name != "k" and not x.is_contiguous():
            wrong.append(f"{name} must be contiguous")
    if wrong:
        raise UnsupportedError(*wrong)


Expected = dict[str, tuple[Sequence[int], torch.dtype]]


def _descale_shapes(call: Call, t: Tensors, modes: dict[str, dict[str, str]]) -> Expected:
    floats: dict[str, tuple[int, ...]] = {"out_descale": (1,)}
    if call.kind == "fp8":
        floats |= {f"{n}_descale": canonical_shape(modes[call.scaling][n], getattr(t, n).shape) for n in "qkv"}
    return {name: (shape, torch.float32) for name, shape in floats.items()}


def _packed_shapes(call: Call, t: Tensors, modes: dict[str, dict[str, str]]) -> Expected:
    shape = t.k.shape
    expected: Expected = {"k": (shape, torch.uint8), "v": (packed_shape(shape), torch.uint8)}
    floats = {"k_mean": (*shape[:2], shape[3]), "out_descale": (1,)}
    granularity = OPERANDS[operand_name(t.q.dtype, call.precision)].granularity(modes[call.scaling])
    for name in "kv":
        floats[f"{name}_descale"] = descale_shape(name, shape, granularity[name], call.key_block)
    return expected | {name: (sizes, torch.float32) for name, sizes in floats.items()}


def _pack_kv(
    k: torch.Tensor, v: torch.Tensor, kernel: str, scaling: str, smooth_k: bool, hadamard: bool
) -> tuple[torch.Tensor, ...]:
    """K and packed V as ``kernel`` reads them, their descales, and the mean that was subtracted from K, (0,) without
    ``smooth_k``: k, v, k_descale, v_descale and k_mean of :class:`Operands`."""
    manifest = load_manifest(target(k.device).directory)
    variant = manifest.find(kernel)
    if k.dim() != 4 or k.shape != v.shape or k.dtype not in HALF_DTYPES or v.dtype != k.dtype or v.device != k.device:
        raise UnsupportedError(
            f"k and v must be (B, Hkv, Sk, D) of one shape, device and dtype, {' or '.join(map(str, HALF_DTYPES))}, "
            f"got {tuple(k.shape)}, {k.dtype} and {tuple(v.shape)}, {v.dtype}"
        )
    if not 0 < k.shape[3] <= variant.head_dim or scaling not in variant.scalings:
        raise UnsupportedError(
            f"kernel={kernel!r} is for head_dim 1..{variant.head_dim} and scaling {' or '.join(variant.scalings)}, "
            f"got {k.shape[3]} and {scaling!r}"
        )
    granularity = OPERANDS[variant.dtype].granularity(manifest.scaling[scaling])
    made = _room(k, v, variant, manifest, scaling, smooth_k)
    k8, v8, k_descale, v_descale, k_mean = made
    if not k.numel():
        for x, value in ((k_descale, 1.0), (v_descale, 1.0), (k_mean, 0.0)):
            x.fill_(value)
    elif k.is_cuda:
        fill(
            Operands(None, k8, v8, None, k_descale, v_descale, k_mean if smooth_k else None),
            None,
            readable(k),
            readable(v),
            key_block=variant.key_block,
            amax=score_amax(variant),
            granularity=granularity,
            negate_q=False,
            hadamard=hadamard,
        )
    else:
        call = Call("half", k.dtype, 1.0, scaling=scaling, smooth_k=smooth_k, hadamard=hadamard)
        spec = packed_keys(call, variant, granularity, k, v)
        for name, room in zip(("k", "v", "k_descale", "v_descale"), made, strict=False):
            room.copy_(getattr(spec, name))
        if smooth_k:
            k_mean.copy_(F.pad(key_mean(k), (0, variant.head_dim - k.shape[3])))
    return made


def _room(
    k: torch.Tensor, v: torch.Tensor, variant: Variant, manifest: Manifest, scaling: str, smooth_k: bool
) -> tuple[torch.Tensor, ...]:
    made = empty_operands(
        None,
        k,
        v,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        granularity=OPERANDS[variant.dtype].granularity(manifest.scaling[scaling]),
        smooth_k=smooth_k,
    )
    k_mean = k.new_empty((0,), dtype=torch.float32) if made.k_mean is None else made.k_mean
    return made.k, made.v, made.k_descale, made.v_descale, k_mean  # type: ignore[return-value]  # all but Q is there


def _fake_pack_kv(
    k: torch.Tensor, v: torch.Tensor, kernel: str, scaling: str, smooth_k: bool, hadamard: bool
) -> tuple[torch.Tensor, ...]:
    manifest = load_manifest(target(k.device).directory)
    return _room(k, v, manifest.find(kernel), manifest, scaling, smooth_k)


pack_kv = register(
    "pack_kv(Tensor k, Tensor v, str kernel, str scaling, bool smooth_k, bool hadamard) -> "
    "(Tensor k8, Tensor v8, Tensor k_descale, Tensor v_descale, Tensor k_mean)",
    _pack_kv,
    _fake_pack_kv,
)
