"""Which keys share a `block` descale, and which scaling modes of calls a kernel computes."""

from __future__ import annotations

from codegen.arch import FAMILIES
from codegen.axes import Scaling
from codegen.variant import Variant

KEY_BLOCK = 128  # keys of a `block` descale in public tensors; packed V is padded to a multiple of it


def key_block(v: Variant) -> int:
    """Keys that share a `block` descale of K and V in the tensors that this kernel reads.

    A tile has one descale: where it does not divide the public block, the block is the tile.
    """
    return KEY_BLOCK if KEY_BLOCK % v.tile_n == 0 else v.tile_n


def served(v: Variant) -> tuple[Scaling, ...]:
    """The scaling modes of calls that the kernel computes."""
    if v.scaling is not Scaling.BLOCK or not FAMILIES[v.family].strided_descales:
        return (v.scaling,)
    return tuple(s for s in Scaling if s is v.scaling or s.coarse)
