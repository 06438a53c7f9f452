"""``hadamard``: the rows of Q and K are multiplied by one orthonormal matrix before they are quantised.

That leaves every score as it is and spreads an outlier over its whole row, so that it costs the other elements less of
e4m3's range. The matrix is a Walsh-Hadamard transform after fixed signs: without them a vector that is constant along
the row, which is common, would all go into one element.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Bit d % 32 of word d / 32 set: column d changes its sign. The first 256 bits of the fraction of pi.
SIGNS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)


def rotated_columns(head_dim: int) -> int:
    """Columns that are transformed together: the row where ``head_dim`` is a power of two, a third of it, 32 or 64,
    where it is 96 or 192; the matrix is then block-diagonal, and orthonormal all the same."""
    return head_dim if head_dim & (head_dim - 1) == 0 else head_dim // 3


def _signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """Of the columns, (head_dim,) float32. Nothing is copied from the host, so that a CUDA graph can capture it."""
    words = torch.cat([torch.full((32,), word, device=device) for word in SIGNS[: -(-head_dim // 32)]])
    column = torch.arange(head_dim, device=device)
    return 1.0 - 2.0 * (words[:head_dim] >> column % 32 & 1)


def rotate(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return x (B, H, S, D) times the matrix of a kernel's ``head_dim``, at least D: (B, H, S, head_dim) float32.

    To the bit: zeros are appended, signs applied; then u + v and u - v take the places of elements u and v that lie
    1, then 2, 4, ... apart, rounded each time; every zero becomes positive, so that a kernel may hold a value by its
    negative; at last everything is multiplied by float32(1 / sqrt(columns)). An infinity or NaN makes all columns that
    are transformed with it infinite or NaN, and with them all scores of the row.
    """
    columns = rotated_columns(head_dim)
    y = (F.pad(x.float(), (0, head_dim - x.shape[3])) * _signs(head_dim, x.device)).unflatten(3, (-1, columns))
    apart = 1
    while apart < columns:
        u, v = y.unflatten(4, (-1, 2, apart)).unbind(5)
        y = torch.stack((u + v, u - v), 5).flatten(4)
        apart *= 2
    return ((y + 0.0) * columns**-0.5).flatten(3)
