"""``torch.ops.fp8cutlass``: ``attention_fp8`` takes FP8 operands and their descales, ``attention_half`` bf16 or fp16
operands, which it quantises for the kernel that it chooses. Output, LSE and amax out, on CPU and CUDA alike.

Both are functional and have fake kernels, so torch.compile, torch.export and FakeTensor see through them. Descales are
canonical (docs/numerics.md); :func:`fp8cutlass.attention` brings everything else into that form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..choose.dispatch import decide
from ..choose.problem import Decision, Problem
from ..choose.reuse import KVForm
from ..choose.target import Target, target
from ..emulator.emulate import OUT_DTYPES
from ..errors import UnsupportedError
from ..manifest import Variant, load_manifest
from ..memory import as_bytes
from ..quant.descale import SCALE_MAX, canonical_shape
from .launch import Call, Outputs, empty_outputs, run, run_half

DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
HALF_DTYPES = (torch.bfloat16, torch.float16)  # quantised inside
OUT_NAMES = {dtype: name for name, dtype in OUT_DTYPES.items()}

RESULTS = "(Tensor out, Tensor lse, Tensor amax)"
OPTIONS = (
    "Tensor? out_descale, ScalarType out_dtype, str scaling, str precision, bool causal, SymInt causal_offset, "
    "float scale, bool return_lse, bool return_amax, str kernel"
)


def choose(
    at: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    scaling: str,
    causal: bool,
    precision: str,
    kernel: str,
    form: KVForm | None = None,
) -> tuple[Variant, int, Decision]:
    """The kernel for operands of these sizes: the variant, its number in the extension, and why. ``form`` is that of
    packed keys and values."""
    problem = problem_of(at, q, k, out_dtype=out_dtype, scaling=scaling, causal=causal, precision=precision)
    variant, number, decision = decide(at.directory, problem, kernel, form)
    if q.is_cuda and at.arch not in variant.targets:  # only a pinned one; the emulator runs them all
        raise UnsupportedError(f"kernel={kernel!r} is built for {', '.join(variant.targets)}, {q.device} is {at.arch}")
    return variant, number, decision


def problem_of(
    at: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    scaling: str,
    causal: bool,
    precision: str,
) -> Problem:
    """What the choice depends on."""
    batch, heads, seqlen_q, head_dim = q.shape
    return Problem(
        arch=at.arch,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[2],
        batch=batch,
        heads=heads,
        dtype=DTYPE_NAMES.get(q.dtype, "e4m3"),
        out=OUT_NAMES[out_dtype],
        scaling=scaling,
        causal=causal,
        precision=precision,
        quantised=q.dtype in DTYPE_NAMES,
        sm_count=at.sm_count,
        kv_heads=k.shape[1],
        card=at.card,
    )


def _attention(call: Call) -> Outputs:
    """What both operators do, on both devices."""
    at = target(call.q.device)
    modes = load_manifest(at.directory).scaling
    _check(call, modes)
    variant, number, _ = choose(
        at,
        call.q,
        call.k,
        out_dtype=call.out_dtype,
        scaling=call.scaling,
        causal=call.causal,
        precision=call.precision,
        kernel=call.kernel,
    )
    if call.q_descale is None and call.q.numel() and call.k.shape[2]:
        return run_half(call, variant, number, modes[call.scaling])
    outputs = empty_outputs(call)
    if not fill_trivial(outputs, call.k):
        run(call, variant, number, outputs)
    return outputs


def _check(call: Call, modes: dict[str, dict[str, str]]) -> None:
    """What a caller of the bare operators can get wrong; ``attention`` has checked the same with more words."""
    q, k, v = operands = (call.q, call.k, call.v)
    wrong = [f"{name} must have 4 dimensions" for name, x in zip("qkv", operands, strict=True) if x.dim() != 4]
    if wrong:
        raise UnsupportedError(*wrong)
    batch, heads, _, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        wrong.append(f"k and v must be ({batch}, Hkv, Sk, {head_dim}), got {tuple(k.shape)} and {tuple(v.shape)}")
    if heads and (k.shape[1] == 0 or heads % k.shape[1]):
        wrong.append(f"the heads of k must divide the {heads} of q, got {k.shape[1]}")
    dtypes = HALF_DTYPES if call.q_descale is None else tuple(DTYPE_NAMES)
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        accepted = " or all ".join(map(str, dtypes))
        wrong.append(f"q, k and v must be all {accepted}, got {q.dtype}, {k.dtype} and {v.dtype}")
    wrong += wrong_options(call, modes)
    if call.scaling not in modes:
        raise UnsupportedError(*wrong)
    for name, x, descale in zip("qkv", operands, (call.q_descale, call.k_descale, call.v_descale), strict=True):
        if descale is None:
            continue
        shape = canonical_shape(modes[call.scaling][name], x.shape)
        if descale.shape != shape or descale.dtype != torch.float32 or not descale.is_contiguous():
            wrong.append(
                f"{name}_descale must be float32, contiguous, of shape {shape}, "
                f"got {descale.dtype}, {tuple(descale.shape)}"
            )
    if wrong:
        raise UnsupportedError(*wrong)


def wrong_options(call: Call, modes: dict[str, dict[str, str]]) -> list[str]:
    """What is wrong with the arguments of a bare operator that are no operands."""
    wrong = []
    if call.out_dtype not in OUT_NAMES:
        wrong.append(f"out_dtype must be one of {', '.join(map(str, OUT_NAMES))}, got {call.out_dtype}")
    if (call.out_dtype == torch.float8_e4m3fn) != (call.out_descale is not None):
        wrong.append("out_descale goes with out_dtype=torch.float8_e4m3fn, and with it only")
    if call.out_descale is not None and (call.out_descale.shape, call.out_descale.dtype) != ((1,), torch.float32):
        wrong.append("out_descale must be float32 of shape (1,)")
    if not abs(call.scale) <= SCALE_MAX:  # false for NaN
        wrong.append(f"scale must be finite in float32, also times log2(e), got {call.scale}")
    if call.scaling not in modes:
        wrong.append(f"scaling must be one of {', '.join(modes)}, got {call.scaling!r}")
    return wrong


def fill_trivial(outputs: Outputs, k: torch.Tensor) -> bool:
    """Serve the calls that need no kernel: nothing to write, or no key to look at."""
    out, lse, amax = outputs
    if out.numel() and k.shape[2]:
        return False
    as_bytes(out).zero_()
    lse.fill_(-torch.inf)
    amax.zero_()
    return True


_library = torch.library.Library("fp8cutlass", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator on CPU and CUDA, ``fake`` for tensors without memory, and return it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"fp8cutlass::{name}", fake, lib=_library)
    return getattr(torch.ops.fp8cutlass, name).default


def _register(name: str, arguments: str, as_call: Callable[..., Call]) -> Any:
    """Define attention; ``as_call`` brings its arguments into the form of Call."""
    return register(
        f"{name}({arguments}) -> {RESULTS}",
        lambda *args: _attention(as_call(*args)),
        lambda *args: empty_outputs(as_call(*args)),
    )


attention_fp8 = _register(
    "attention_fp8",
    f"Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, {OPTIONS}",
    Call,
)
attention_half = _register(
    "attention_half",
    f"Tensor q, Tensor k, Tensor v, {OPTIONS}, bool smooth_k=False, bool hadamard=False",
    lambda q, k, v, *options: Call(q, k, v, None, None, None, *options),
)
