"""Scaling modes: the granularity of the descales of Q, K and V. Kernels, package and docs read this list."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import FAMILIES
from codegen.spec import Scaling, Variant

KEY_BLOCK = 128  # keys of a `block` descale in public tensors; packed V is padded to a multiple of it


@dataclass(frozen=True, kw_only=True)
class Granularity:
    q: str
    k: str
    v: str


# Q per token costs the kernel nothing, as a thread owns whole rows; V per token cannot be factored out of P V, V per
# channel can.
GRANULARITY = {
    Scaling.TENSOR: Granularity(q="tensor", k="tensor", v="tensor"),
    Scaling.HEAD: Granularity(q="head", k="head", v="head"),
    Scaling.BLOCK: Granularity(q="token", k="block", v="block"),
    Scaling.TOKEN: Granularity(q="token", k="token", v="channel"),
}


def key_block(v: Variant) -> int:
    """Keys that share a `block` descale of K and V in the tensors that this kernel reads.

    A tile has one descale: where it does not divide the public block, the block is the tile.
    """
    return KEY_BLOCK if KEY_BLOCK % v.tile_n == 0 else v.tile_n


def served(v: Variant) -> tuple[Scaling, ...]:
    """The scaling modes of calls that the kernel computes."""
    if v.scaling is Scaling.BLOCK and FAMILIES[v.family].strided_descales:
        return (Scaling.TENSOR, Scaling.HEAD, Scaling.BLOCK)
    return (v.scaling,)
