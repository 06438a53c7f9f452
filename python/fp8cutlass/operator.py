"""``torch.ops.fp8cutlass.attention_fp8``: FP8 tensors in, output, LSE and amax out, on CPU and CUDA alike.

The operator is functional and has a fake kernel, so torch.compile, torch.export and FakeTensor see through it. It takes
canonical descales only (docs/architecture.md); :func:`fp8cutlass.attention` brings everything else into that form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from . import extension
from .descale import FLOAT32_MAX, canonical_shape
from .dispatch import Problem, decide
from .emulator import OUT_DTYPES, emulate
from .errors import UnsupportedError
from .manifest import KEY_BLOCK, Variant, load_manifest
from .pack import pack_v
from .target import Target, target

DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
OUT_NAMES = {dtype: name for name, dtype in OUT_DTYPES.items()}
ALIGNMENT = 16  # bytes of one vector access

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SCHEMA = (
    "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor? out_descale, ScalarType out_dtype, str scaling, str precision, bool causal, SymInt causal_offset, "
    "float scale, bool return_lse, bool return_amax, str kernel) -> (Tensor out, Tensor lse, Tensor amax)"
)

_library = torch.library.Library("fp8cutlass", "DEF")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


@dataclass(frozen=True)
class Call:
    """The operator's arguments, in the order of the schema.

    q is (B, H, Sq, D), k and v are (B, Hkv, Sk, D), all FP8 of one type, any strides with a contiguous last dimension,
    D one of the table's head dims. ``precision="fast"`` asserts that the scores fit f16, which holds when Q and K
    were quantised with amax 14. ``kernel`` pins a variant by its id; "" leaves the choice to the table.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    out_descale: torch.Tensor | None
    out_dtype: torch.dtype
    scaling: str
    precision: str
    causal: bool
    causal_offset: int
    scale: float
    return_lse: bool
    return_amax: bool
    kernel: str


def is_seq_major(x: torch.Tensor) -> bool:
    """True for a (B, H, S, D) view of memory in the order (B, S, H, D)."""
    return x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2)


def empty_outputs(call: Call) -> Outputs:
    """Allocate the outputs: ``out`` dense in q's memory order, (B, H, S, D) or (B, S, H, D); ``lse`` (B, H, Sq) and
    ``amax`` (1,) float32, or (0,) where not wanted."""
    q = call.q
    batch, heads, seqlen_q, head_dim = q.shape
    if is_seq_major(q):
        out = q.new_empty((batch, seqlen_q, heads, head_dim), dtype=call.out_dtype).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, seqlen_q, head_dim), dtype=call.out_dtype)
    lse = q.new_empty((batch, heads, seqlen_q) if call.return_lse else (0,), dtype=torch.float32)
    return out, lse, q.new_empty((1 if call.return_amax else 0,), dtype=torch.float32)


def _check(call: Call, at: Target) -> None:
    """What a caller of the bare operator can get wrong; ``attention`` has checked the same with more words."""
    q, k, v = operands = (call.q, call.k, call.v)
    modes = load_manifest(at.directory).scaling
    wrong = [f"{name} must have 4 dimensions" for name, x in zip("qkv", operands, strict=True) if x.dim() != 4]
    if wrong:
        raise UnsupportedError(*wrong)
    batch, heads, _, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        wrong.append(f"k and v must be ({batch}, Hkv, Sk, {head_dim}), got {tuple(k.shape)} and {tuple(v.shape)}")
    if heads and (k.shape[1] == 0 or heads % k.shape[1]):
        wrong.append(f"the heads of k must divide the {heads} of q, got {k.shape[1]}")
    if q.dtype not in DTYPE_NAMES or k.dtype != q.dtype or v.dtype != q.dtype:
        wrong.append(f"q, k and v must be all e4m3fn or all e5m2, got {q.dtype}, {k.dtype} and {v.dtype}")
    if call.out_dtype not in OUT_NAMES:
        wrong.append(f"out_dtype must be one of {', '.join(map(str, OUT_NAMES))}, got {call.out_dtype}")
    if (call.out_dtype == torch.float8_e4m3fn) != (call.out_descale is not None):
        wrong.append("out_descale goes with out_dtype=torch.float8_e4m3fn, and with it only")
    if call.out_descale is not None and (call.out_descale.shape, call.out_descale.dtype) != ((1,), torch.float32):
        wrong.append("out_descale must be float32 of shape (1,)")
    if not 0 <= call.scale <= FLOAT32_MAX:  # false for NaN; a negative scale is a Q of the other sign
        wrong.append(f"scale must be a finite float32 >= 0, got {call.scale}")
    if call.scaling not in modes:
        raise UnsupportedError(*wrong, f"scaling must be one of {', '.join(modes)}, got {call.scaling!r}")
    descales = (call.q_descale, call.k_descale, call.v_descale)
    for name, x, descale in zip("qkv", operands, descales, strict=True):
        shape = canonical_shape(modes[call.scaling][name], x.shape)
        if descale.shape != shape or descale.dtype != torch.float32 or not descale.is_contiguous():
            wrong.append(
                f"{name}_descale must be float32, contiguous, of shape {shape}, "
                f"got {descale.dtype}, {tuple(descale.shape)}"
            )
        if x.stride(3) != 1:
            wrong.append(f"{name} must be contiguous in its last dimension, got stride {x.stride(3)}")
    if wrong:
        raise UnsupportedError(*wrong)


def _choose(call: Call, at: Target) -> tuple[Variant, int]:
    batch, heads, seqlen_q, head_dim = call.q.shape
    problem = Problem(
        arch=at.arch,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=call.k.shape[2],
        batch=batch,
        heads=heads,
        dtype=DTYPE_NAMES[call.q.dtype],
        out=OUT_NAMES[call.out_dtype],
        scaling=call.scaling,
        causal=call.causal,
        precision=call.precision,
        sm_count=at.sm_count,
    )
    variant, number, _ = decide(at.directory, problem, call.kernel)
    return variant, number


def _fill_trivial(outputs: Outputs, k: torch.Tensor) -> bool:
    """Serve the calls that need no kernel: nothing to write, or no key to look at."""
    out, lse, amax = outputs
    if out.numel() and k.shape[2]:
        return False
    (out.view(torch.uint8) if out.element_size() == 1 else out).zero_()
    lse.fill_(-torch.inf)
    amax.zero_()
    return True


@torch.library.impl(_library, "attention_fp8", "CPU")
def _attention_cpu(*args: Any, **kwargs: Any) -> Outputs:
    call = Call(*args, **kwargs)
    at = target(call.q.device)
    _check(call, at)
    variant, _ = _choose(call, at)
    out, lse, amax = outputs = empty_outputs(call)
    if _fill_trivial(outputs, call.k):
        return outputs
    result = emulate(
        call.q,
        call.k,
        call.v,
        call.q_descale,
        call.k_descale,
        call.v_descale,
        variant=variant,
        scale=call.scale,
        causal_offset=call.causal_offset,
        out_descale=call.out_descale,
        return_lse=call.return_lse,
    )
    out.copy_(result.out)
    return out, result.lse if call.return_lse else lse, result.amax if call.return_amax else amax


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy where its rows do not start on multiples of 16 bytes. A dimension of size 1 may
    have any stride."""
    strides = (stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
    if x.data_ptr() % ALIGNMENT == 0 and all(stride * x.element_size() % ALIGNMENT == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.impl(_library, "attention_fp8", "CUDA")
def _attention_cuda(*args: Any, **kwargs: Any) -> Outputs:
    call = Call(*args, **kwargs)
    at = target(call.q.device)
    _check(call, at)
    _, number = _choose(call, at)
    out, lse, amax = outputs = empty_outputs(call)
    if _fill_trivial(outputs, call.k):
        return outputs
    extension.load()
    k_descale = call.k_descale
    if call.scaling == "token":  # read in whole tiles; the keys past Sk are masked
        k_descale = F.pad(k_descale, (0, -call.k.shape[2] % KEY_BLOCK), value=1.0)
    torch.ops.fp8cutlass_C.forward(
        number,
        aligned(call.q).view(torch.uint8),
        aligned(call.k).view(torch.uint8),
        pack_v(call.v).view(torch.uint8),
        call.q_descale,
        k_descale,
        call.v_descale,
        call.out_descale,
        out.view(torch.uint8) if call.out_dtype == torch.float8_e4m3fn else out,
        lse if call.return_lse else None,
        amax.zero_() if call.return_amax else None,
        call.scale,
        call.causal_offset,
    )
    return outputs


@torch.library.register_fake("fp8cutlass::attention_fp8", lib=_library)
def _attention_fake(*args: Any, **kwargs: Any) -> Outputs:
    return empty_outputs(Call(*args, **kwargs))


attention_fp8 = torch.ops.fp8cutlass.attention_fp8.default
