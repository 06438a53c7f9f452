"""``torch.ops.fp8cutlass.pack_kv`` and ``attention_packed``: keys and values into the form that kernels read, and
attention on that form. Functional, on CPU and CUDA, with fake kernels, like the operators of :mod:`operator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..choose.reuse import KVForm
from ..choose.target import target
from ..errors import UnsupportedError
from ..manifest import Manifest, Variant, load_manifest
from ..native.fused import Operands, descale_shape, empty_operands, fill, packed_shape, quantise_and_pack, readable
from ..quant.smooth import key_mean, restore_lse
from .launch import Call, Outputs, empty_outputs, kernel_operands, run_made, score_amax
from .operators import HALF_DTYPES, OPTIONS, RESULTS, choose, fill_trivial, register, wrong_options

Tensors = tuple[torch.Tensor, ...]


def _pack_kv(k: torch.Tensor, v: torch.Tensor, kernel: str, scaling: str, smooth_k: bool, hadamard: bool) -> Tensors:
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
    granularity = manifest.scaling[scaling]
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
    else:  # a row of K is there for Q, of which nothing is used
        options = (None, k.dtype, scaling, "fast", False, 0, 1.0, False, False, kernel, smooth_k, hadamard)
        spec = kernel_operands(Call(k[:, :, :1], k, v, None, None, None, *options), variant, granularity)
        for name, room in zip(("k", "v", "k_descale", "v_descale"), made, strict=False):
            room.copy_(getattr(spec, name))
        if smooth_k:
            k_mean.copy_(F.pad(key_mean(k), (0, variant.head_dim - k.shape[3])))
    return made


def _room(
    k: torch.Tensor, v: torch.Tensor, variant: Variant, manifest: Manifest, scaling: str, smooth_k: bool
) -> Tensors:
    made = empty_operands(
        None,
        k,
        v,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        granularity=manifest.scaling[scaling],
        smooth_k=smooth_k,
    )
    k_mean = k.new_empty((0,), dtype=torch.float32) if made.k_mean is None else made.k_mean
    return made.k, made.v, made.k_descale, made.v_descale, k_mean  # type: ignore[return-value]  # all but Q is there


def _fake_pack_kv(
    k: torch.Tensor, v: torch.Tensor, kernel: str, scaling: str, smooth_k: bool, hadamard: bool
) -> Tensors:
    manifest = load_manifest(target(k.device).directory)
    return _room(k, v, manifest.find(kernel), manifest, scaling, smooth_k)


def _as_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    k_mean: torch.Tensor | None,
    *rest: Any,
) -> tuple[Call, torch.Tensor | None, KVForm]:
    *options, key_block, amax, hadamard = rest
    arguments = (q, k, v, None, k_descale, v_descale, *options, k_mean is not None, hadamard)
    return Call(*arguments), k_mean, KVForm(k.shape[-1], key_block, amax)


def _attention_packed(call: Call, k_mean: torch.Tensor | None, form: KVForm) -> Outputs:
    """What attention_half does, of Q alone."""
    at = target(call.q.device)
    modes = load_manifest(at.directory).scaling
    _check(call, k_mean, form, modes)
    variant, number, _ = choose(
        at,
        call.q,
        call.k,
        out_dtype=call.out_dtype,
        scaling=call.scaling,
        causal=call.causal,
        precision=call.precision,
        kernel=call.kernel,
        form=form,
    )
    outputs = empty_outputs(call)
    if not fill_trivial(outputs, call.k):
        run_packed(call, k_mean, variant, number, modes[call.scaling], outputs)
    return outputs


def run_packed(
    call: Call,
    k_mean: torch.Tensor | None,
    variant: Variant,
    number: int,
    granularity: Mapping[str, str],
    outputs: Outputs,
) -> None:
    """Run one kernel on bf16 or fp16 Q and the packed K and V of ``call``, no dimension empty, and fill ``outputs``;
    ``k_mean`` is what was subtracted from the keys."""
    made = _query(call, variant, granularity)
    made = replace(made, k=call.k, v=call.v, k_descale=call.k_descale, v_descale=call.v_descale)
    run_made(call, variant, number, made, outputs)
    if k_mean is not None and call.return_lse:
        restore_lse(outputs[1], call.q, k_mean[..., : call.q.shape[3]], call.scale)


def _query(call: Call, variant: Variant, granularity: Mapping[str, str]) -> Operands:
    """Q as the kernel reads it."""
    if not call.q.is_cuda:
        row = call.q[:, :, :1]  # is there for K and V, of which nothing is used
        return kernel_operands(replace(call, k=row, v=row, smooth_k=False), variant, granularity)
    return quantise_and_pack(
        call.q,
        None,
        None,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        amax=score_amax(variant),
        granularity=granularity,
        negate_q=call.scale < 0,
        hadamard=call.hadamard,
    )


def _check(call: Call, k_mean: torch.Tensor | None, form: KVForm, modes: dict[str, dict[str, str]]) -> None:
    """What a caller of the bare operator can get wrong; ``attention`` has checked the same with more words."""
    q, k = call.q, call.k
    wrong = wrong_options(call, modes)
    if q.dim() != 4 or k.dim() != 4:
        wrong.append(f"q and k must have 4 dimensions, got {q.dim()} and {k.dim()}")
    if wrong:
        raise UnsupportedError(*wrong)
    batch, kv_heads, _, head_dim = k.shape
    if q.dtype not in HALF_DTYPES:
        wrong.append(f"q must be {' or '.join(map(str, HALF_DTYPES))}, got {q.dtype}")
    if q.shape[0] != batch or not 0 < q.shape[3] <= head_dim:
        wrong.append(f"q must be ({batch}, H, Sq, 1..{head_dim}), got {tuple(q.shape)}")
    if q.shape[1] and (kv_heads == 0 or q.shape[1] % kv_heads):
        wrong.append(f"the heads of k must divide the {q.shape[1]} of q, got {kv_heads}")
    if form.key_block < 1:
        raise UnsupportedError(*wrong, f"key_block must be at least 1, got {form.key_block}")
    shapes = {"k": k.shape, "v": packed_shape(k.shape), "k_mean": (*k.shape[:2], head_dim)}
    for name in "kv":
        shapes[f"{name}_descale"] = descale_shape(name, k.shape, modes[call.scaling][name], form.key_block)
    given = {"k": k, "v": call.v, "k_descale": call.k_descale, "v_descale": call.v_descale, "k_mean": k_mean}
    for name, x in given.items():
        dtype = torch.uint8 if name in ("k", "v") else torch.float32
        if x is None:
            continue
        if x.shape != shapes[name] or x.dtype != dtype or x.device != q.device:
            wrong.append(
                f"{name} must be {dtype} of shape {tuple(shapes[name])} on {q.device}, "
                f"got {x.dtype}, {tuple(x.shape)} on {x.device}"
            )
        elif name != "k" and not x.is_contiguous():
            wrong.append(f"{name} must be contiguous")
    if wrong:
        raise UnsupportedError(*wrong)


pack_kv = register(
    "pack_kv(Tensor k, Tensor v, str kernel, str scaling, bool smooth_k, bool hadamard) -> "
    "(Tensor k8, Tensor v8, Tensor k_descale, Tensor v_descale, Tensor k_mean)",
    _pack_kv,
    _fake_pack_kv,
)
attention_packed = register(
    "attention_packed(Tensor q, Tensor k, Tensor v, Tensor k_descale, Tensor v_descale, Tensor? k_mean, "
    f"{OPTIONS}, int key_block, float amax, bool hadamard) -> {RESULTS}",
    lambda *args: _attention_packed(*_as_call(*args)),
    lambda *args: empty_outputs(_as_call(*args)[0]),
)
