"""The launch of a ragged batch on a card: one operator of the extension, of which everything but tensors is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._ops import LIBRARY
from ..manifest import Variant
from ..native import extension
from ..native.fused import is_readable, readable
from ..quant.quantize import V_AMAX
from ..quant.sinks import join_lse
from .call import FAR
from .launch import score_amax
from .ragged_call import RaggedCall

# As in native/attend.py: there is no backward, and autograd's fallback would look at every argument.
_library = torch.library.Library(LIBRARY, "IMPL")
for _name in ("attend_ragged", "attend_ragged_fp8"):
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradCUDA")

LEAVE_FROM = 128  # rows of a sequence, on average (docs/lab/walk.md, row 11)


@dataclass(frozen=True)
class Launch:
    """A call but for its tensors. ``fp8``: operands come with descales."""

    operator: Any
    variant: int
    fp8: bool
    amaxes: tuple[float, float]
    numbers: tuple[Any, ...]  # scale, window_left, window_right, bottom_right
    softcap: float
    resident: int = -1  # number of the kernel that keeps K and V in shared memory and does it all

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[torch.Tensor | None],
        descales: Sequence[torch.Tensor | None],
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
        leave_q: bool,
    ) -> torch.Tensor:
        """(T, H, the kernel's head_dim). ``lengths``: cu_seqlens of q and k, seqused of both. All of ``lse`` (H, T) is
        written. ``leave_q``: the attention kernel quantises Q itself, where it can; the bits are the same."""
        given: tuple[Any, ...]
        if self.fp8:
            given = (*descales, *lengths, lse, self.amaxes[0], *self.numbers, self.softcap, sinks)
        else:
            numbers = (*self.amaxes, *self.numbers, leave_q, None, self.softcap)
            given = (*lengths, lse, *numbers, sinks, self.resident)
        try:
            out = self.operator(self.variant, q, k, v, *given)
        except RuntimeError as error:
            extension.name_memory_error(error)
            raise
        return with_sinks(sinks, out, lse)


def launch_of(call: RaggedCall, variant: Variant, number: int, resident: int = -1) -> Launch:
    """How calls like this one run on a kernel, or on the one that keeps K and V and computes what it does."""
    extension.load()
    fp8 = bool(call.descales)
    packet = getattr(extension.compiled(), "attend_ragged_fp8" if fp8 else "attend_ragged")
    left, right = (FAR if end < 0 else end for end in (call.left, call.right))
    return Launch(
        packet.default._op,  # the frames of torch's packet and overload cost a microsecond
        number,
        fp8,
        (score_amax(variant), V_AMAX),
        (call.scale, left, right, call.bottom_right),
        call.softcap,
        resident,
    )


def launch(
    call: RaggedCall,
    variant: Variant,
    number: int,
    lse: torch.Tensor | None,
    leave_q: bool = True,
    resident: int = -1,
) -> torch.Tensor:
    """Make the operands of one kernel and run it: out (tokens, H, the kernel's head_dim)."""
    q, k, v = (legible(x) for x in (call.q, call.k, call.v))
    lengths = (call.cu_q, call.cu_k, call.used_q, call.used_k)
    return launch_of(call, variant, number, resident)(q, k, v, lengths, call.descales, call.sinks, lse, leave_q)


def legible(x: torch.Tensor) -> torch.Tensor:
    """x (tokens, heads, D), or a copy where the kernel cannot read it."""
    return readable(x.transpose(0, 1)[None])[0].transpose(0, 1)


def is_legible(x: torch.Tensor) -> bool:
    """Whether ``legible`` gives x itself."""
    return is_readable(x.transpose(0, 1)[None])


def leaves_q(rows: int, sequences: int) -> bool:
    """Whether the attention kernel should quantise Q, where it can. Short sequences have nothing to hide it behind."""
    return rows >= LEAVE_FROM * sequences


def with_sinks(sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """``out`` itself, which has the sinks; ``lse`` gets them."""
    if lse is not None and sinks is not None:
        join_lse(lse, sinks)
    return out
