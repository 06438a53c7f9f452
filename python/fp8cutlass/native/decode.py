"""The kernels of decode: which one serves a call, its work, its launch. Lengths stay on the device: no number is waited
for, and what is launched can be captured. Nothing here is an operation of torch but the making of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .._ops import LIBRARY
from ..errors import NoKernelError
from ..manifest import Decode, load_manifest
from . import extension
from .numbers import constants

# As in native/attend.py: there is no backward, and autograd's fallback would look at every argument.
_library = torch.library.Library(LIBRARY, "IMPL")
for _name in ("cut", "decode", "prefill"):
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradCUDA")

FAR = 1 << 30  # a window's end that no length reaches
OVERHEAD = 4  # what a unit costs beside its tiles, in tiles; a guess that no card has judged
CUT_WORDS = 12  # of decode::Cut
ARRIVALS = 8  # decode::kArrivals
PIECE = 256  # bytes: pieces of the work's memory begin at multiples of it, as in csrc/workspace.h


@lru_cache(maxsize=1024)
def kernel_for(directory: Path, arch: str, head_dim: int, rows: int, few: bool = False) -> tuple[Decode, int]:
    """The kernel with the fewest rows a unit that holds ``rows``, else the one with the most, and its number. Where
    there are ``few`` units, none is taken that half of its rows would do for, but the next smaller one: more units then
    keep more SMs busy.

    NoKernelError lists the head_dims of the architecture.
    """
    manifest = load_manifest(directory)
    there = [
        (d.rows, number)
        for number, d in enumerate(manifest.decodes)
        if (arch, head_dim) == (d.arch, d.head_dim) and not d.candidate
    ]
    if not there:
        served = sorted({d.head_dim for d in manifest.decodes if d.arch == arch})
        raise NoKernelError(
            f"decode on {arch} in profile {manifest.profile!r} has head_dim {', '.join(map(str, served)) or 'none'}, "
            f"got {head_dim}"
        )
    enough = [x for x in there if x[0] >= rows]
    size, number = min(enough) if enough else max(there)
    if few and 2 * rows <= size and (smaller := [x for x in there if x[0] < size]):
        number = max(smaller)[1]
    return manifest.decodes[number], number


@dataclass(frozen=True)
class Work:
    """How the units of a batch are cut into shares, one a CTA. Good for every layer of a step whose calls have the same
    lengths, heads, window and page size. Calls that share it must not run at the same time."""

    kernel: Decode
    number: int
    ctas: int
    share: bool  # whether CTAs may share a unit; else results of a sequence do not depend on the others
    memory: torch.Tensor | None = None  # (work_bytes,) uint8; None: each call cuts its own
    routed: bool = False  # sequences of negative length are another kernel's

    @property
    def cuts(self) -> torch.Tensor:
        """(CTAs + 1, 12) int32."""
        return self._words(0, (self.ctas + 1) * CUT_WORDS).view(-1, CUT_WORDS)

    @property
    def arrived(self) -> torch.Tensor:
        """(CTAs x ARRIVALS,) int32, zero between calls."""
        return self._words(_up(4 * (self.ctas + 1) * CUT_WORDS), self.ctas * ARRIVALS)

    def _words(self, begin: int, count: int) -> torch.Tensor:
        if self.memory is None:
            raise ValueError("the work is not cut yet")
        return self.memory[begin : begin + 4 * count].view(torch.int32)


def _up(bytes: int) -> int:
    return -(-bytes // PIECE) * PIECE


def work_bytes(kernel: Decode, ctas: int) -> int:
    """Of the cuts, the counters of arrivals, and two parts of a unit for each CTA (csrc/decode.cpp)."""
    return _up(4 * (ctas + 1) * CUT_WORDS) + _up(4 * ctas * ARRIVALS) + _up(8 * ctas * kernel.part_floats)


def uncut(kernel: Decode, number: int, sm_count: int, *, share: bool) -> Work:
    """The work of calls that cut it themselves."""
    return Work(kernel, number, sm_count * kernel.ctas_per_sm, share)


def cut(
    kernel: Decode,
    number: int,
    sm_count: int,
    lengths: torch.Tensor,
    cu_q: torch.Tensor | None,
    *,
    tokens: int,
    most_keys: int,
    heads: int,
    kv_heads: int,
    left: int,
    right: int,
    share: bool,
) -> Work:
    """Launch the kernel that cuts the work. Without ``cu_q`` all sequences have as many of the ``tokens``."""
    extension.load()
    plain = uncut(kernel, number, sm_count, share=share)
    memory = torch.empty(work_bytes(kernel, plain.ctas), dtype=torch.uint8, device=lengths.device)
    numbers = numbers_of(plain, left=left, right=right)
    extension.compiled().cut(numbers, lengths, cu_q, tokens, most_keys, heads, kv_heads, memory)
    return Work(kernel, number, plain.ctas, share, memory)


def numbers_of(
    work: Work,
    *,
    left: int,
    right: int,
    scale: float = 1.0,
    softcap: float = 0.0,
    k_descale: float = 1.0,
    v_descale: float = 1.0,
) -> torch.Tensor:
    """The first argument of the operators. Windows' ends below 0 are none."""
    return constants(
        extension.decode_fields(), decode=work.number, ctas=work.ctas, overhead=OVERHEAD, share=work.share,
        left=_end(left), right=_end(right), scale=scale, softcap=softcap, k_descale=k_descale, v_descale=v_descale,
        routed=work.routed,
    )  # fmt: skip


def _end(keys: int) -> int:
    return FAR if keys < 0 else min(keys, FAR)


@dataclass(frozen=True)
class Caches:
    """K and V as they lie, and their descales."""

    k: torch.Tensor  # (pages, page_size, Hkv, D) e4m3, or its bytes as uint8; strides of whole 16 bytes
    v: torch.Tensor
    k_descale: torch.Tensor | float  # (1,), (Hkv,) or (sequences, Hkv) float32, any strides
    v_descale: torch.Tensor | float
    k_token: torch.Tensor | None  # (pages, page_size, Hkv) float32, any strides: of each token and head
    v_page: torch.Tensor | None  # (pages, Hkv) float32, any strides: of each page and head

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Descales of K and V that are no numbers."""
        k, v = (x if isinstance(x, torch.Tensor) else None for x in (self.k_descale, self.v_descale))
        return k, v


@dataclass(frozen=True)
class Launch:
    """A call but for its tensors."""

    operator: Any
    numbers: torch.Tensor

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Give the operator its tensors, in the order of csrc/binding.cpp. Returns the result in the shape of q."""
        try:
            return self.operator(self.numbers, *tensors)
        except RuntimeError as error:
            extension.name_memory_error(error)
            raise


def launch_of(
    work: Work,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float = 0.0,
    k_descale: torch.Tensor | float = 1.0,
    v_descale: torch.Tensor | float = 1.0,
) -> Launch:
    """Descales that are tensors are given with the other ones, later."""
    extension.load()
    k, v = (1.0 if isinstance(x, torch.Tensor) else float(x) for x in (k_descale, v_descale))
    numbers = numbers_of(work, left=left, right=right, scale=scale, softcap=softcap, k_descale=k, v_descale=v)
    return Launch(extension.compiled().decode.default._op, numbers)  # the overload's own frame costs 0.2 us


def attend(
    work: Work,
    q: torch.Tensor,
    caches: Caches,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor,
    cu_q: torch.Tensor | None,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    into: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel: out of the shape and dtype of q (tokens, H, D), and the natural LSE (H, tokens). ``into``:
    both, where they are there.

    ``work`` was cut for these lengths, heads, window and page table, or it is not cut, which is done first. ``sinks``:
    (H,) float32, bf16 or fp16, or (H, tokens) float32. Without ``page_table`` page s is all of sequence s.
    """
    result, lse = (None, _sums(q, return_lse)) if into is None else into
    launch = launch_of(
        work, scale=scale, left=left, right=right, softcap=softcap, k_descale=caches.k_descale,
        v_descale=caches.v_descale,
    )  # fmt: skip
    out = launch(
        q, caches.k, caches.v, page_table, lengths, cu_q, *caches.tensors, caches.k_token, caches.v_page, sinks,
        work.memory, result, lse,
    )  # fmt: skip
    return out if result is None else result, lse


def _sums(q: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    return torch.empty(q.shape[1], q.shape[0], device=q.device) if wanted else None


def prefill(
    work: Work,
    variant: int,
    q: torch.Tensor,
    caches: Caches,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor,
    cu_q: torch.Tensor | None,
    *,
    scale: float,
    left: int,
    right: int,
    return_lse: bool,
    score_amax: float,
    least: int,
    most: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Launch what serves long chunks: the kernel that chooses sequences of ``least`` queries and more, at most ``most``
    with ``capacity`` keys in all; the one that copies their keys; the plan of a ragged batch; and ``variant``. Q's rows
    begin at multiples of 16 bytes.

    Returns out and the LSE, where the rows of these sequences are written, and the lengths for ``work``, which is
    routed: (sequences,) int32, negative where a sequence is none of its.
    """
    extension.load()
    out, lse, rest = torch.empty_like(q), _sums(q, return_lse), torch.empty_like(lengths)
    k, v = (1.0 if isinstance(x, torch.Tensor) else float(x) for x in (caches.k_descale, caches.v_descale))
    numbers = numbers_of(work, left=left, right=right, scale=scale, k_descale=k, v_descale=v)
    extension.compiled().prefill(
        numbers, variant, q, caches.k, caches.v, page_table, lengths, cu_q, *caches.tensors, caches.k_token,
        caches.v_page, out, lse, rest, score_amax, least, most, capacity,
    )  # fmt: skip
    return out, lse, rest
