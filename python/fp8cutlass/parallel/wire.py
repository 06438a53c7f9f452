"""Packed keys and values as one buffer of bytes, and back without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..cache.packed import PackedKV
from ..cache.packed_kind import Kind, cuts_of, shapes_of
from ..memory import concatenated, copy_into
from .shards import Shards

ALIGNMENT = 128  # of each tensor in the buffer


class Place(NamedTuple):
    """Where a tensor lies in the buffer."""

    name: str
    at: int  # bytes
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def places(kind: Kind, tokens: int) -> tuple[tuple[Place, ...], int]:
    """Of each tensor of so many tokens, and the bytes in all."""
    found, at = [], 0
    for name, (shape, dtype) in shapes_of(kind, tokens).items():
        size = math.prod(shape) * dtype.itemsize
        found.append(Place(name, at, size, shape, dtype))
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(found), max(at, ALIGNMENT)  # no exchange is empty


def size(like: PackedKV, tokens: int) -> int:
    """Bytes of a buffer."""
    return places(like.kind, tokens)[1]


def to_wire(packed: PackedKV, out: torch.Tensor | None = None) -> torch.Tensor:
    """Its bytes, into ``out`` where there is one, which may be longer."""
    where, total = places(packed.kind, packed.shape[2])
    buffer = packed.k.new_empty((total,), dtype=torch.uint8) if out is None else out
    tensors = packed.tensors()
    for place in where:
        copy_into(_view(buffer, place), tensors[place.name])
    return buffer


def from_wire(like: PackedKV, buffer: torch.Tensor, tokens: int) -> PackedKV:
    """So many tokens that another rank packed alike: views of its bytes."""
    where, _ = places(like.kind, tokens)
    return replace(like, **{place.name: _view(buffer, place) for place in where})  # type: ignore[arg-type]


def _view(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    return buffer.narrow(0, place.at, place.size).view(place.dtype).view(place.shape)


def in_order(like: PackedKV, buffer: torch.Tensor, cut: Shards, begins: Sequence[int]) -> PackedKV:
    """All keys in their order, of what the ranks of ``cut`` packed alike. The bytes of rank r lie from ``begins[r]`` on
    in ``buffer``, which is contiguous."""
    of = {torch.uint8: buffer, torch.float32: buffer.view(torch.float32)}
    found = {}
    for name, dtype, dim, pieces in _pieces(like.kind, cut, tuple(begins)):
        whole = of[dtype]
        first = whole.storage_offset()
        parts = [whole.as_strided(shape, stride, first + at) for shape, stride, at in pieces]
        found[name] = parts[0] if len(parts) == 1 else concatenated(parts, dim)
    return replace(like, **found)  # type: ignore[arg-type]


Piece = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and where it begins, in elements


@lru_cache(maxsize=1024)
def _pieces(kind: Kind, cut: Shards, begins: tuple[int, ...]) -> list[tuple[str, torch.dtype, int, list[Piece]]]:
    """Of each tensor its dtype, the dimension of tokens, and the segments of all ranks in their order."""
    lengths = cut.lengths
    found: dict[str, tuple[str, torch.dtype, int, list[Piece]]] = {}
    for start, stop, rank, at in cut.in_order():
        cuts = cuts_of(kind, lengths[rank], at, stop - start)
        for place in places(kind, lengths[rank])[0]:
            stride = tuple(math.prod(place.shape[i + 1 :]) for i in range(len(place.shape)))
            begin, shape = (begins[rank] + place.at) // place.dtype.itemsize, list(place.shape)
            dim = -1  # of descales, which all keys of a rank have
            if place.name in cuts:
                dim, first, shape[dim] = cuts[place.name]
                begin += first * stride[dim]
            made = found.setdefault(place.name, (place.name, place.dtype, dim, []))
            made[3].append((tuple(shape), stride, begin))
    return list(found.values())
