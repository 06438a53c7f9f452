"""Packed keys and values as one buffer of bytes, and back without a copy."""

from __future__ import annotations

import math

import torch

from ..cache.packed import PackedKV
from ..memory import copy_into

ALIGNMENT = 128  # of each tensor in the buffer


def places(like: PackedKV, tokens: int) -> tuple[dict[str, tuple[int, tuple[int, ...], torch.dtype]], int]:
    """Where each tensor of so many tokens lies, its shape and dtype; and the bytes in all."""
    found, at = {}, 0
    for name, (shape, dtype) in like.shapes(tokens).items():
        found[name] = (at, shape, dtype)
        at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return found, max(at, ALIGNMENT)  # no exchange is empty


def size(like: PackedKV, tokens: int) -> int:
    """Bytes of a buffer."""
    return places(like, tokens)[1]


def to_wire(packed: PackedKV, out: torch.Tensor | None = None) -> torch.Tensor:
    """Its bytes, into ``out`` where there is one, which may be longer."""
    where, total = places(packed, packed.shape[2])
    buffer = packed.k.new_empty((total,), dtype=torch.uint8) if out is None else out
    tensors = packed.tensors()
    for name, (at, shape, dtype) in where.items():
        copy_into(_view(buffer, at, shape, dtype), tensors[name])
    return buffer


def from_wire(like: PackedKV, buffer: torch.Tensor, tokens: int) -> PackedKV:
    """So many tokens that another rank packed alike: views of its bytes."""
    where, _ = places(like, tokens)
    return like.rebuilt({name: _view(buffer, at, shape, dtype) for name, (at, shape, dtype) in where.items()})


def _view(buffer: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return buffer.narrow(0, at, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
