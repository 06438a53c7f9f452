"""A ragged batch from tensors to its outputs: sequences of unequal lengths, their tokens one after the other.

On a card one operator of the extension makes the operands and attends. Of bf16 and fp16 tensors K and V are quantised
and become blocks, where each sequence begins at a block of its own (`include/fp8cutlass/walk/ragged.h` says where). Of
FP8 operands V does. ``by_torch`` and ``fp8_by_torch`` are the specification of the packed bytes. Lengths stay on the
device. On the CPU each sequence is emulated by itself, which is the specification of the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..choose.dispatch import decide, padded_head_dim
from ..choose.lowering import stays
from ..choose.problem import Problem
from ..choose.resident import OfLengths, for_lengths
from ..choose.special import PRECISE_ENOUGH
from ..choose.target import Target, target
from ..dtypes import OUT_NAMES
from ..emulator.emulate import emulate
from ..errors import NoKernelError, UnsupportedError
from ..manifest import KEY_BLOCK, Variant, load_manifest
from ..memory import as_bytes
from ..native import extension
from ..quant.lower import lowered
from ..quant.quantize import LIMITS, V_AMAX, quantize
from ..quant.v_layout import pack_v
from .call import FAR, Call, Tensors
from .launch import lowered_operands, quantised, score_amax
from .options import F16_SCORES
from .ragged_call import RaggedCall
from .ragged_launch import launch, leaves_q, with_sinks

SOFTMAXES = {"fast": ("linear", "exp2"), "accurate": ("exp2",)}  # what serves a precision, the preferred one first


def precision_of(call: RaggedCall) -> str:
    """That of the kernel, where none is pinned."""
    sizes = call.q.shape[2], call.k.shape[0], call.cu_k.shape[0] - 1, call.max_k
    return precision_for(call.precision, bool(call.descales), bool(call.softcap), *sizes)


def precision_for(precision: str, fp8: bool, capped: bool, *sizes: int) -> str:
    """``precision_of`` a call of these sizes, as :func:`.stays` takes them. Caps have exponentials alone."""
    return "accurate" if capped or (fp8 and stays(*sizes)) else precision


def blocks_of(tokens: int, sequences: int, key_block: int) -> int:
    """Blocks of packed K and V: those of all tokens, one for each sequence, and as many more as V is padded to."""
    blocks = -(-tokens // key_block) + sequences
    while blocks * key_block % KEY_BLOCK:
        blocks += 1
    return blocks


def places(cu: torch.Tensor, used: torch.Tensor | None, tokens: int, key_block: int) -> torch.Tensor:
    """Where each of ``tokens`` goes in the blocks, (tokens,) int64; one past their end where it belongs to no sequence.

    Sequence s begins at block ``cu[s] // key_block + s``, which is past the blocks of the sequence before.
    """
    sequences = cu.shape[0] - 1
    token = torch.arange(tokens, device=cu.device)
    ends = cu[1:].long()
    sequence = torch.searchsorted(ends, token, right=True).clamp(max=sequences - 1)
    begin = cu.long()[sequence]
    length = ends[sequence] - begin
    if used is not None:
        length = torch.minimum(length, used.long()[sequence])
    within = token - begin
    place = (begin // key_block + sequence) * key_block + within
    end = blocks_of(tokens, sequences, key_block) * key_block
    there = (within >= 0) & (within < length) & (place >= 0) & (place < end)
    return torch.where(there, place, end)


def to_blocks(x: torch.Tensor, place: torch.Tensor, blocks: int, key_block: int) -> torch.Tensor:
    """Copy x (tokens, heads, D) to where ``places`` says, (1, heads, blocks * key_block, D); zeros between."""
    spread = x.new_zeros((blocks * key_block + 1, *x.shape[1:]))
    spread.index_copy_(0, place, x)
    return spread[:-1].transpose(0, 1)[None]


def choose(at: Target, call: RaggedCall, precision: str = "") -> tuple[Variant, int]:
    """The one kernel of the class, and its number in the extension; NoKernelError where the target has none.
    ``precision`` stands in for that of the call's sizes."""
    softmaxes = SOFTMAXES[call.precision if call.kernel else precision or precision_of(call)]
    of_call = (call.q.shape[2], call.mask, OUT_NAMES[call.out_dtype], bool(call.softcap), softmaxes, call.kernel)
    return _chosen(at.directory, at.arch, *of_call)


@lru_cache(maxsize=256)  # looking through all variants takes longer than a launch
def _chosen(
    directory: Path, arch: str, width: int, mask: str, out: str, capped: bool, softmaxes: tuple[str, ...], kernel: str
) -> tuple[Variant, int]:
    manifest = load_manifest(directory)
    head_dim = padded_head_dim(width, manifest.head_dims[arch])
    wanted = {"kind": "ragged", "head_dim": head_dim, "mask": mask, "out": out}
    if capped:  # kernels of windows serve every mask
        wanted |= {"kind": "capped", "walk": "ragged", "mask": "window"}
    for softmax in softmaxes:
        for number, v in enumerate(manifest.variants):
            fits = all(getattr(v, name) == value for name, value in wanted.items()) and arch in v.targets
            if fits and v.softmax == softmax and kernel in ("", v.id):
                return v, number
    if kernel:
        raise UnsupportedError(f"kernel={kernel!r} is not built, or does not serve this ragged batch")
    words = ", ".join(f"{name} {value}" for name, value in wanted.items() if name != "walk")
    raise NoKernelError(f"no kernel for ragged batches on {arch} in profile {manifest.profile!r}: {words}")


def keeping(at: Target, call: RaggedCall) -> tuple[OfLengths, ...]:
    """The kernels that keep K and V in shared memory and can serve such calls, that for the fewest keys first."""
    if call.descales or call.softcap or call.kernel or call.precision != "fast" or call.mask == "window":
        return ()
    if call.out_dtype != call.q.dtype:
        return ()
    head_dim = padded_head_dim(call.q.shape[2], load_manifest(at.directory).head_dims[at.arch])
    return for_lengths(at.directory, at.arch, head_dim, OUT_NAMES[call.out_dtype], causal=call.mask == "causal")


def kept(at: Target, call: RaggedCall) -> OfLengths | None:
    """The one that is the fastest way for this call; None where the kernel of the class is."""
    of = (call.max_k, call.cu_q.shape[0] - 1, call.q.shape[1], call.k.shape[1], at.sm_count)
    return next((found for found in keeping(at, call) if found.serves(*of)), None)


def run(call: RaggedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (tokens, H, D) and LSE (H, tokens): 0 and -inf where a token belongs to no sequence; the LSE (0,) where it is
    not wanted."""
    tokens, heads, head_dim = call.q.shape
    lse = call.q.new_empty((heads, tokens) if call.return_lse else (0,), dtype=torch.float32)
    if not call.q.is_cuda:
        lse.fill_(-torch.inf)
        out = call.q.new_zeros((tokens, heads, head_dim), dtype=call.out_dtype)
        _emulate(call, out, lse)
        return out, lse
    at = target(call.q.device)
    variant, number = choose(at, call)
    if not tokens or not call.k.shape[0]:
        return call.q.new_zeros((tokens, heads, head_dim), dtype=call.out_dtype), lse.fill_(-torch.inf)
    way: dict[str, Any] = {"leave_q": leaves_q(tokens, call.cu_q.shape[0] - 1)}
    found = kept(at, call)
    if found is not None:
        variant, number, way["resident"] = found.variant, found.variant_number, found.number
    out = launch(call, variant, number, lse if call.return_lse else None, **way)
    return (out if variant.head_dim == head_dim else out[..., :head_dim].contiguous()), lse


@dataclass(frozen=True)
class Made:
    """What a kernel reads: Q (tokens, H, D), K, packed V (Hkv, D, columns), uint8, and their descales; K lies in blocks
    (columns, Hkv, D), or as it came (tokens, Hkv, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    descales: tuple[torch.Tensor, ...]
    in_blocks: bool


def launch_made(call: RaggedCall, made: Made, variant: Variant, number: int, lse: torch.Tensor | None) -> torch.Tensor:
    """Run a kernel on operands that are made."""
    tokens, heads, _ = call.q.shape
    out = call.q.new_zeros((tokens, heads, variant.head_dim), dtype=call.out_dtype)
    if lse is not None:
        lse.fill_(-torch.inf)
    words = extension.compiled().ragged_plan_words(number, tokens, call.cu_q.shape[0] - 1)
    plan = torch.empty(words, dtype=torch.int32, device=out.device)
    ends = (FAR if end < 0 else end for end in (call.left, call.right))
    tables = (call.cu_q, call.cu_k, call.used_q, call.used_k, plan)
    extension.compiled().forward_ragged(
        number, made.q, made.k, made.v, *made.descales, *tables, as_bytes(out).view(out.dtype), lse, abs(call.scale),
        *ends, call.bottom_right, made.in_blocks, call.softcap, call.sinks,
    )  # fmt: skip
    return with_sinks(call.sinks, out, lse)


def fp8_by_torch(call: RaggedCall, variant: Variant) -> Made:
    """Of a call with FP8 tensors, on any device: V is packed, K is read as it is, and Q is lowered where the kernel has
    f16 scores."""
    block, missing = variant.key_block, variant.head_dim - call.q.shape[2]
    q, k, v = (F.pad(x.view(torch.uint8), (0, missing)) for x in (call.q, call.k, call.v))
    sequences = call.cu_k.shape[0] - 1
    blocks = blocks_of(call.k.shape[0], sequences, block)
    place = places(call.cu_k, call.used_k, call.k.shape[0], block)
    packed = pack_v(to_blocks(v, place, blocks, block))[0]
    descales = call.descales
    if score_amax(variant) < LIMITS[torch.float8_e4m3fn]:
        q8, power = lowered(q.transpose(0, 1)[None].view(call.q.dtype), torch.ones(1, device=q.device), q.shape[2])
        q = q8.view(torch.uint8)[0].transpose(0, 1)
        of_token = torch.searchsorted(call.cu_q[1:].long(), torch.arange(q.shape[0], device=q.device), right=True)
        of_q = _each(call.descales[0], of_token.clamp(max=sequences - 1))
        descales = ((of_q * power).contiguous(), *call.descales[1:])
    q = q ^ 0x80 if call.scale < 0 else q
    return Made(q.contiguous(), k.contiguous(), packed, descales, in_blocks=False)


def _each(descale: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """(1,) or (sequences, heads) for tokens, whose ``sequence`` is given: (1, heads or 1, their number)."""
    return descale.reshape(1, 1, 1) if descale.dim() == 1 else descale[sequence].T[None]


def by_torch(call: RaggedCall, variant: Variant) -> Made:
    """Of a call with 16-bit tensors, on any device: the bytes that the extension's kernel makes."""
    block, missing = variant.key_block, variant.head_dim - call.q.shape[2]
    blocks = blocks_of(call.k.shape[0], call.cu_k.shape[0] - 1, block)
    place = places(call.cu_k, call.used_k, call.k.shape[0], block)
    q = F.pad(call.q.transpose(0, 1)[None], (0, missing))
    k, v = (F.pad(to_blocks(x, place, blocks, block), (0, missing)) for x in (call.k, call.v))
    amax = score_amax(variant)
    q8, q_descale = quantize(q, granularity="token", amax=amax)
    k8, k_descale = quantize(k, granularity="block", amax=amax, block=block)
    v8, v_descale = quantize(v, granularity="block", amax=V_AMAX, block=block)
    q8, k8 = q8.view(torch.uint8), k8.view(torch.uint8)
    q8 = q8 ^ 0x80 if call.scale < 0 else q8
    packed = pack_v(v8.view(torch.uint8))
    return Made(q8[0].transpose(0, 1), k8[0].transpose(0, 1), packed[0], (q_descale, k_descale, v_descale), True)


def _pinned(call: RaggedCall) -> Variant | None:
    """The kernel that a call on the CPU names, of whatever architecture; None where it names none."""
    if not call.kernel:
        return None
    directory = target(call.q.device).directory
    named = load_manifest(directory).find(call.kernel)
    return choose(Target(directory, named.targets[0], 0), call)[0]


def _emulate(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Each sequence by itself, by the kernel that the call names, or the one that the table has for its sizes."""
    q_ends, k_ends = call.cu_q.tolist(), call.cu_k.tolist()
    for s in range(len(q_ends) - 1):
        q, k, v = (
            call.q[q_ends[s] : q_ends[s + 1]],
            call.k[k_ends[s] : k_ends[s + 1]],
            call.v[k_ends[s] : k_ends[s + 1]],
        )
        if call.used_q is not None:
            q = q[: max(0, int(call.used_q[s]))]
        if call.used_k is not None:
            k, v = k[: max(0, int(call.used_k[s]))], v[: max(0, int(call.used_k[s]))]
        if not len(q) or not len(k):
            continue
        of = slice(q_ends[s], q_ends[s] + len(q))
        dense_q, dense_k, dense_v = (x.transpose(0, 1)[None] for x in (q, k, v))
        descales = tuple(d[s : s + 1] if d.dim() == 2 else d for d in call.descales)
        result, log_sum = emulate_sequence(call, dense_q, dense_k, dense_v, descales)
        out[of] = result[0].transpose(0, 1)
        if call.return_lse:
            lse[:, of] = log_sum[0]


def _shared_by(descales: tuple[torch.Tensor, ...]) -> str:
    """The scaling mode of descales as a caller gives them."""
    return "head" if descales[0].dim() == 2 else "tensor"


def sequence_kernel(call: RaggedCall, q: torch.Tensor, k: torch.Tensor) -> Variant:
    """What the emulator takes for one sequence: the kernel that the table has for its sizes."""
    at, precision, fp8 = target(q.device), precision_of(call), bool(call.descales)
    scaling = _shared_by(call.descales) if fp8 and precision not in F16_SCORES else "block"
    problem = Problem(
        arch=at.arch, head_dim=q.shape[3], seqlen_q=q.shape[2], seqlen_k=k.shape[2], batch=1, heads=q.shape[1],
        dtype="e4m3", out=OUT_NAMES[call.out_dtype], scaling=scaling, causal=call.mask == "causal",
        precision=precision, quantised=fp8, lowered=fp8 and precision in F16_SCORES, sm_count=at.sm_count,
    )  # fmt: skip
    return decide(at.directory, problem)[0]


def emulate_sequence(
    call: RaggedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor, ...],
    variant: Variant | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, (1, heads, tokens, D), by ``variant``, else the kernel that the call names, else the table's."""
    rows, keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    offset = keys - rows if call.bottom_right else 0
    right, left = (FAR if end < 0 else end for end in (call.right, call.left))
    variant = variant or _pinned(call) or sequence_kernel(call, q, k)
    fits = bool(descales) and variant.score == "f16"
    scaling = _shared_by(descales) if descales and not fits else "block"
    q_descale, k_descale, v_descale = descales or (None, None, None)
    one = Tensors(q, k, v, q_descale, k_descale, v_descale)
    if fits:
        one = lowered_operands(variant, one)
    if not descales:
        half = Call("half", call.out_dtype, call.scale)
        one = quantised(half, variant, {"q": "token", "k": "block", "v": "block"}, one)
    missing = variant.head_dim - head_dim
    q, k, v = (F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) for x in (one.q, one.k, one.v))
    if call.scale < 0:
        q = (q.view(torch.uint8) ^ 0x80).view(q.dtype)
    if one.q_descale is None or one.k_descale is None or one.v_descale is None:
        raise RuntimeError("a descale was not made")
    result = emulate(
        q,
        k,
        v,
        one.q_descale,
        one.k_descale,
        one.v_descale,
        variant=variant,
        scale=abs(call.scale),
        scaling=scaling,
        causal_offset=offset + right,
        window_offset=offset - left if call.mask == "window" else None,
        softcap=call.softcap,
        sinks=call.sinks,
        return_lse=call.return_lse,
    )
    return result.out[..., :head_dim], result.lse


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)


PRECISIONS = tuple(p for p in PRECISE_ENOUGH if p in SOFTMAXES)
