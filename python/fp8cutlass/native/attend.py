"""Calls on a card, from the chosen kernel to its outputs: one operator of the extension each.

``attend`` quantises bf16 and fp16 operands, ``attend_fp8`` lowers and packs FP8 ones, ``attend_packed`` quantises Q for
packed K and V. Each allocates, and attends. The bits are those of :mod:`.fused` and ``forward`` one after the other, or
of torch operations and ``forward``. docs/design/terms.md defines "Q left" and "handover"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._ops import LIBRARY, compiled
from ..manifest import Variant
from ..memory import as_bytes, empty_rows
from ..quant.quantize import GRANULARITIES
from ..quant.sinks import join_lse
from ..quant.smooth import restore_lse
from . import extension
from .fused import v_amax
from .masks import NO_MASK, MaskParts
from .numbers import constants

# There is no backward, and `attention` says so: the dispatcher passes over autograd, whose fallback would look at every
# argument, and on to whatever else a tensor asks for, such as a lazy negation.
_library = torch.library.Library(LIBRARY, "IMPL")
OPERATORS = {"half": "attend", "fp8": "attend_fp8", "packed": "attend_packed"}  # of each kind of call
for _name in OPERATORS.values():
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradCUDA")

LEAVE_FROM, LEAVE_HANDED_FROM = 1024, 256  # rows and keys; the second where packing of K and V overlaps
LEAVE_ITEMS = 132  # query tiles, one for each SM of an H200
HAND_OVER_FROM = 16 << 20  # elements of K; half as many again where heads are few
FEW_HEADS = 64  # fewer than this, of all sequences
HAND_OVER_HEADS = 2048  # of K, of all sequences, at most: kReadyHeads in csrc/counters.h
HANDED_OVER = (64, 128)  # head_dims whose pack kernels can overlap: Pack.delivers of the generator

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # out, lse, amax; the last two where wanted


@dataclass(frozen=True)
class Attend:
    """A call but for its tensors, for operands of one shape, layout and dtype on one device."""

    operator: Any  # of fp8cutlass_C
    constants: torch.Tensor  # its first argument
    head_dim: int  # the caller's
    kernel_head_dim: int
    scale: float
    smooth_k: bool  # of bf16 and fp16 operands
    return_lse: bool
    return_amax: bool
    bare: bool  # none of the three: the operator gets its inputs alone

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out_descale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        mask: MaskParts = NO_MASK,
    ) -> Result:
        """Run a call of kind "half" on q (B, H, Sq, D), k and v (B, Hkv, Sk, D); :meth:`run` says more."""
        if not self.smooth_k:
            return self.run((q, k, v), out_descale, sinks, mask)
        mean = k.new_empty((*k.shape[:2], self.kernel_head_dim), dtype=torch.float32)
        result = self.run((q, k, v), out_descale, sinks, mask, mean)
        if result[1] is not None:
            restore_lse(result[1], q[..., : self.head_dim], mean[..., : self.head_dim], self.scale)
        return result

    def run(
        self,
        inputs: Sequence[Any],
        out_descale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        mask: MaskParts = NO_MASK,
        k_mean: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Result:
        """Give the operator its inputs: q, k and v that are ``fused.readable``, no dimension empty, and descales.

        ``sinks`` are (H,) float32, contiguous; ``mask`` is for kernels of lists of tiles or of biases. ``k_mean`` is
        written. ``out``, of a call of kind "packed", takes the result: of its shape and dtype, ``fused.is_readable``.

        Returns out (B, H, Sq, D), dense in q's memory order where none was given; lse (B, H, Sq) and amax (1,),
        float32, or None.
        """
        lse = amax = None
        try:
            # An argument costs more to pass than to leave out.
            if self.bare and out_descale is None and sinks is None and mask is NO_MASK and out is None:
                made = self.operator(self.constants, *inputs)
            else:
                q = inputs[0]
                lse = q.new_empty(q.shape[:3], dtype=torch.float32) if self.return_lse else None
                amax = q.new_zeros((1,), dtype=torch.float32) if self.return_amax else None
                more = () if k_mean is None else (k_mean,)
                named = {} if mask is NO_MASK else mask._asdict()
                if out is not None and self.kernel_head_dim == self.head_dim:
                    named["out"] = out
                made = self.operator(self.constants, *inputs, out_descale, lse, amax, sinks, *more, **named)
        except RuntimeError as error:
            extension.name_memory_error(error)
            raise
        if lse is not None and sinks is not None:
            join_lse(lse, sinks)
        if self.kernel_head_dim == self.head_dim:
            return made, lse, amax
        out = empty_rows(made, self.head_dim, made.dtype) if out is None else out  # q may be a copy in another order
        as_bytes(out).copy_(as_bytes(made)[..., : self.head_dim])
        return out, lse, amax


def takes_source(variant: Variant, granularity: Mapping[str, str], *, hadamard: bool) -> bool:
    """Whether the attention kernel can quantise Q by itself: each row with its own scale, and not rotated. The bits are
    those that the pack kernel makes."""
    return variant.quantises_q and granularity["q"] == "token" and not hadamard


def takes_handover(variant: Variant, granularity: Mapping[str, str], *, smooth_k: bool, hadamard: bool) -> bool:
    """Whether packing of K and V can overlap with attention (handover). It takes descales of blocks, no smoothing or
    rotation, and a Q that the attention kernel quantises. The bits are the same."""
    blocks = granularity["k"] == granularity["v"] == "block" and variant.head_dim in HANDED_OVER
    return blocks and not smooth_k and takes_source(variant, granularity, hadamard=hadamard)


class Way(NamedTuple):
    """How operands come to the attention kernel; both False: all packed before it."""

    leave_q: bool  # the attention kernel quantises Q
    hand_over: bool  # K and V are packed while the attention kernel runs


PACKED_BEFORE = Way(leave_q=False, hand_over=False)


def faster_way(
    variant: Variant,
    granularity: Mapping[str, str],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    smooth_k: bool,
    hadamard: bool,
) -> Way:
    """The fastest way that the kernel has for q (B, H, Sq, D) and k (B, Hkv, Sk, D).

    A Q that the attention kernel quantises is not written and read once more. But its rows delay the softmax, and a
    CTA's first rows overlap with nothing (docs/lab/pack.md).
    """
    if not takes_source(variant, granularity, hadamard=hadamard):
        return PACKED_BEFORE
    batch, heads, rows, _ = q_shape
    handed = takes_handover(variant, granularity, smooth_k=smooth_k, hadamard=hadamard) and _is_large(k_shape)
    enough = min(rows, k_shape[2]) >= (LEAVE_HANDED_FROM if handed else LEAVE_FROM)
    leave_q = enough and batch * heads * -(-rows // variant.tile_m) > LEAVE_ITEMS
    return Way(leave_q, leave_q and handed)


def _is_large(shape: Sequence[int]) -> bool:
    """Whether overlap is faster for k of ``shape``. It is where the part that all SMs pack before attention begins is
    small (docs/lab/pack.md)."""
    heads = math.prod(shape[:2])
    enough = HAND_OVER_FROM * 3 // 2 if heads < FEW_HEADS else HAND_OVER_FROM
    return math.prod(shape) >= enough and heads <= HAND_OVER_HEADS


def prepare(
    kind: str,
    variant: Variant,
    number: int,
    granularity: Mapping[str, str],
    *,
    head_dim: int,
    amax: float,
    seq_major: bool,
    scale: float,
    causal_offset: int,
    window_offset: int,
    smooth_k: bool,
    hadamard: bool,
    return_lse: bool,
    return_amax: bool,
    merge_lse: bool = False,
    softcap: float = 0.0,
    way: Way = PACKED_BEFORE,
    resident: int = -1,
    descales: Sequence[float] = (0.0, 0.0, 0.0),
) -> Attend:
    """The call of a variant, ``number`` in the extension, on operands of a kind: "half", "fp8" or "packed".

    ``way`` is limited to what the kernel can do: quantise Q (:func:`takes_source`), and start while K and V are packed
    (:func:`takes_handover`). ``resident`` is the number of a kernel that keeps K and V in shared memory and computes
    what the variant would, or -1. ``amax`` and ``granularity`` are those of :func:`.fused.quantise_and_pack`;
    ``seq_major`` puts the result into memory in the order (B, S, H, D). ``descales`` of FP8 operands that are no
    tensors are numbers.
    """
    extension.load()
    leave_q = way.leave_q and takes_source(variant, granularity, hadamard=hadamard)
    hand_over = leave_q and way.hand_over
    hand_over = hand_over and takes_handover(variant, granularity, smooth_k=smooth_k, hadamard=hadamard)
    numbers = {
        "variant": number,
        **{f"{name}_granularity": GRANULARITIES.index(granularity[name]) for name in "qkv"},
        "score_amax": amax,
        "v_amax": v_amax(granularity),
        "hadamard": hadamard,
        "seq_major": seq_major,
        "scale": scale,
        "softcap": softcap,
        "causal_offset": causal_offset,
        "window_offset": window_offset,
        "resident": resident,
        "leave_q": leave_q,
        "hand_over": hand_over,
        "merge_lse": merge_lse,
        **{f"{name}_descale": x for name, x in zip("qkv", descales, strict=True)},
    }
    return Attend(
        operator=getattr(compiled(), OPERATORS[kind]).default._op,  # the overload's own frame costs 0.2 us
        constants=constants(extension.call_fields(), **numbers),
        head_dim=head_dim,
        kernel_head_dim=variant.head_dim,
        scale=scale,
        smooth_k=smooth_k,
        return_lse=return_lse,
        return_amax=return_amax,
        bare=not (smooth_k or return_lse or return_amax),
    )
