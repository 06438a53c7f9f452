"""The layouts of what kernels read in tiles of 128 keys: V (transposed, keys and columns permuted), K's token descales.

Packing V is a pure permutation of bytes (docs/design/numerics.md gives the reasons for the order):

* key ``8 h + 2 t + c`` of each 16 keys (h < 2, t < 4, c < 2) is stored at position ``4 t + 2 h + c``;
* column ``8 a + 2 b + c`` of each 32 columns (a < 4, b < 4, c < 2) is stored in row ``8 b + 2 a + c``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..manifest import KEY_BLOCK


def pack_v(v: torch.Tensor) -> torch.Tensor:
    """Return V (B, Hkv, Sk, D), FP8, any strides, as contiguous (B, Hkv, D, ceil(Sk / 128) * 128) of the same dtype.

    Keys past Sk are zero bytes, so that whatever follows V in memory never meets a probability. D must be a multiple
    of 32 (ValueError).
    """
    batch, heads, tokens, head_dim = v.shape
    if head_dim % 32:
        raise ValueError(f"v must have a head_dim that is a multiple of 32 to be packed, got {head_dim}")
    raw = v.view(torch.uint8)
    if tokens % KEY_BLOCK:  # to pad by nothing is a copy
        raw = F.pad(raw, (0, 0, 0, -tokens % KEY_BLOCK))
    padded = raw.shape[2]
    # (B, Hkv, key / 16, h, t, c, D / 32, a, b, c) -> (B, Hkv, D / 32, b, a, c, key / 16, t, h, c)
    split = raw.reshape(batch, heads, padded // 16, 2, 4, 2, head_dim // 32, 4, 4, 2)
    packed = split.permute(0, 1, 6, 8, 7, 9, 2, 4, 3, 5).reshape(batch, heads, head_dim, padded)
    return packed.contiguous().view(v.dtype)


def without_zeros(descale: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The token descales (B, H, S) of an s8 V (B, H, S, D): 0 where a token is zeros, which takes no range of P from
    the others."""
    return descale.masked_fill((v == 0).all(3), 0.0)


def pad_token_descale(descale: torch.Tensor, value: float = 1.0) -> torch.Tensor:
    """Extend K's descales of `token` scaling, or those of V's tokens, float32 (B, Hkv, Sk), with ``value`` to whole
    tiles, ceil(Sk / 128) * 128.

    The kernels read them by the tile, and mask the keys past Sk.
    """
    return F.pad(descale, (0, -descale.shape[2] % KEY_BLOCK), value=value)


def unpack_v(packed: torch.Tensor, tokens: int) -> torch.Tensor:
    """Undo :func:`pack_v`: (B, Hkv, D, Sk_pad) to contiguous (B, Hkv, tokens, D)."""
    batch, heads, head_dim, padded = packed.shape
    # The column permutation swaps two digits and is its own inverse; the key permutation is not.
    split = packed.view(torch.uint8).reshape(batch, heads, head_dim // 32, 4, 4, 2, padded // 16, 4, 2, 2)
    raw = split.permute(0, 1, 6, 8, 7, 9, 2, 4, 3, 5).reshape(batch, heads, padded, head_dim)
    return raw[:, :, :tokens].contiguous().view(packed.dtype)
