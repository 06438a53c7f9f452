"""Shapes of packed keys and values, and where they are cut: integers alone, each worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..choose.target import granularities
from ..dtypes import OPERANDS, operand_name
from ..manifest import GROUPS
from ..native.fused import descale_shape, packed_shape

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Kind(NamedTuple):
    """What shapes depend on but for the number of tokens."""

    batch: int
    heads: int
    columns: int  # head_dim of the kernel
    key_block: int
    k_shared: str  # what shares a descale: a granularity
    v_shared: str
    mean: bool  # whether there is a k_mean


@lru_cache(maxsize=64)
def shared_by(scaling: str, dtype: torch.dtype, precision: str) -> Mapping[str, str]:
    """Of "q", "k" and "v" what shares a descale."""
    mode = dict(zip("qkv", granularities(scaling), strict=True))
    return MappingProxyType(OPERANDS[operand_name(dtype, precision)].granularity(mode))


def shapes_of(kind: Kind, tokens: int) -> Shapes:
    """Shape and dtype of each tensor of so many tokens, by name."""
    return _shapes(kind, tokens) if _plain(*kind, tokens) else _shapes.__wrapped__(kind, tokens)


@lru_cache(maxsize=4096)
def _shapes(kind: Kind, tokens: int) -> Shapes:
    whole = (kind.batch, kind.heads, tokens, kind.columns)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        f"{name}_descale": (descale_shape(name, whole, shared, kind.key_block), torch.float32)
        for name, shared in (("k", kind.k_shared), ("v", kind.v_shared))
    }
    if kind.mean:
        found["k_mean"] = ((kind.batch, kind.heads, kind.columns), torch.float32)
    return MappingProxyType(found | {"k": (whole, torch.uint8), "v": (packed_shape(whole), torch.uint8)})


def cuts_of(kind: Kind, tokens: int, start: int, count: int) -> Mapping[str, tuple[int, int, int]]:
    """How ``count`` of the ``tokens`` are cut out of each tensor: dimension, first and length. Tensors that belong to
    all tokens alike have no entry."""
    cuts = _cuts if _plain(*kind, tokens, start, count) else _cuts.__wrapped__
    return cuts(kind, tokens, start, count)


def _plain(*values: object) -> bool:
    """Whether they can be kept: none is symbolic, and nothing is traced."""
    return not torch.compiler.is_compiling() and not any(isinstance(x, torch.SymInt) for x in values)


@lru_cache(maxsize=4096)
def _cuts(kind: Kind, tokens: int, start: int, count: int) -> Mapping[str, tuple[int, int, int]]:
    before, after = shapes_of(kind, tokens), shapes_of(kind, count)
    found = {"k": (2, start, count), "v": (3, start, after["v"][0][3])}
    for name, shared in (("k_descale", kind.k_shared), ("v_descale", kind.v_shared)):
        if before[name][0] != after[name][0]:  # blocks or tokens in the last dimension
            blocks = start // kind.key_block
            first = {"block": blocks, "group": GROUPS * blocks}.get(shared, start)
            found[name] = (2, first, after[name][0][2])
    return MappingProxyType(found)
