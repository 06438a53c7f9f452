"""Quantisation and packing on CUDA: :func:`quantize` of Q, K and V and :func:`pack_v` in one kernel, bit for bit. An
operand that is None is skipped, and so is its result.

Each element is read once and written once. Descales that more than a block of a head shares need a first kernel, which
finds the maxima. The same kernels apply what :mod:`prepare` does to Q and K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..manifest import KEY_BLOCK
from ..memory import ALIGNMENT, aligned, as_bytes, empty_rows, is_aligned
from ..quant.descale import canonical_shape
from ..quant.quantize import GRANULARITIES, LIMITS, V_AMAX
from . import extension

BEYOND_BLOCKS = ("tensor", "head", "channel")  # granularities whose maxima take a kernel of their own


@dataclass(frozen=True)
class Operands:
    """What a kernel of head_dim D reads: the FP8 bytes, uint8, of Q (B, H, Sq, D) and K (B, Hkv, Sk, D), rows 16-byte
    aligned, and of packed V (B, Hkv, D, ceil(Sk / 128) * 128); and their descales, float32, contiguous. K's descales of
    tokens are padded with ones to whole tiles, V's of tokens with zeros, V's of channels with ones to D. What was not
    made is None."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    k_mean: torch.Tensor | None = None  # (B, Hkv, D): what was subtracted from the keys, where they are smoothed


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, H, S, D), or a copy where the kernel cannot read it: rows must start on multiples of 16 bytes and be
    contiguous, of a multiple of 16 bytes (zero columns are appended)."""
    chunk = ALIGNMENT // x.element_size()
    if x.shape[3] % chunk:
        x = F.pad(as_bytes(x), (0, -x.shape[3] % chunk)).view(x.dtype)
    return aligned(x if x.stride(3) == 1 else x.contiguous())


def is_readable(x: torch.Tensor) -> bool:
    """Whether ``readable`` returns x itself."""
    return x.shape[3] * x.element_size() % ALIGNMENT == 0 and x.stride(3) == 1 and is_aligned(x)


def quantise_and_pack(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    head_dim: int,
    key_block: int,
    amax: float,
    granularity: Mapping[str, str],
    negate_q: bool,
    smooth_k: bool = False,
    hadamard: bool = False,
) -> Operands:
    """Make a kernel's operands of q (B, H, Sq, D) and k, v (B, Hkv, Sk, D), bf16 or fp16 on a card, no dimension empty,
    one of them at least.

    Args:
        head_dim: the kernel's, at least D: the columns between are zeros.
        key_block: keys that share a descale where K and V are scaled by ``block``.
        amax: what the largest magnitude of a group of Q and K becomes; of V :func:`v_amax` says it.
        granularity: of "q", "k" and "v", a row of ``scaling`` of the manifest.
        negate_q: turn the sign of Q, for a negative softmax scale.
        smooth_k, hadamard: subtract a mean from the keys, rotate Q and K: ``smooth``, ``rotate`` and ``prepare``.

    Raises RuntimeError where the extension has no kernel for ``head_dim``, ``key_block`` and the dtype: it holds those
    that its attention kernels need.
    """
    q, k, v = (None if x is None else readable(x) for x in (q, k, v))
    made = empty_operands(q, k, v, head_dim=head_dim, key_block=key_block, granularity=granularity, smooth_k=smooth_k)
    fill(made, q, k, v, key_block=key_block, amax=amax, granularity=granularity, negate_q=negate_q, hadamard=hadamard)
    return made


def v_amax(granularity: Mapping[str, str]) -> float:
    """What the largest magnitude of a group of V becomes. V is int8 where its tokens have descales."""
    return LIMITS[torch.int8] if granularity["v"] == "token" else V_AMAX


def descale_shape(name: str, shape: Sequence[int], granularity: str, key_block: int) -> tuple[int, ...]:
    """Of the descale of operand "q", "k" or "v", whose shape is (B, H, S, the kernel's head_dim)."""
    if name != "q" and granularity == "token":
        shape = (*shape[:2], -(-shape[2] // KEY_BLOCK) * KEY_BLOCK, shape[3])
    return canonical_shape(granularity, shape, key_block)


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of packed V, which was (B, Hkv, Sk, the kernel's head_dim)."""
    return (*shape[:2], shape[3], -(-shape[2] // KEY_BLOCK) * KEY_BLOCK)


def empty_operands(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    head_dim: int,
    key_block: int,
    granularity: Mapping[str, str],
    smooth_k: bool = False,
) -> Operands:
    """Allocate them, Q and K dense in the memory order of q and k; ``k_mean`` with ``smooth_k``."""
    made: dict[str, torch.Tensor | None] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        made[name] = made[f"{name}_descale"] = None
        if x is None:
            continue
        shape = (*x.shape[:3], head_dim)
        made[f"{name}_descale"] = x.new_empty(
            descale_shape(name, shape, granularity[name], key_block), dtype=torch.float32
        )
        if name == "v":
            made[name] = x.new_empty(packed_shape(shape), dtype=torch.uint8)
        else:
            made[name] = empty_rows(x, head_dim, torch.uint8)
    k_mean = None
    if smooth_k and k is not None:
        k_mean = k.new_empty((*k.shape[:2], head_dim), dtype=torch.float32)
    return Operands(**made, k_mean=k_mean)


def fill(
    made: Operands,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    key_block: int,
    amax: float,
    granularity: Mapping[str, str],
    negate_q: bool,
    hadamard: bool = False,
) -> None:
    """Write every byte of ``made`` from operands that are :func:`readable`; where it has a ``k_mean``, of smooth K."""
    descales = {"q": made.q_descale, "k": made.k_descale, "v": made.v_descale}
    beyond = [d for name, d in descales.items() if d is not None and granularity[name] in BEYOND_BLOCKS]
    extension.load()
    extension.compiled().pack(
        key_block,
        q,
        k,
        v,
        *(GRANULARITIES.index(granularity[name]) for name in "qkv"),
        amax,
        v_amax(granularity),
        negate_q,
        made.q,
        made.k,
        made.v,
        *descales.values(),
        beyond[0].new_zeros((sum(d.numel() for d in beyond),)) if beyond else None,
        hadamard,
        made.k_mean,
    )
