"""Which keys share a `block` descale."""

from __future__ import annotations

from codegen.variant import Variant

KEY_BLOCK = 128  # keys of a `block` descale in public tensors; packed V is padded to a multiple of it


def key_block(v: Variant) -> int:
    """Keys that share a `block` descale of K and V in the tensors that this kernel reads.

    A tile has one descale: where it does not divide the public block, the block is the tile.
    """
    return KEY_BLOCK if KEY_BLOCK % v.tile_n == 0 else v.tile_n
