"""From how many keys on FP8 operands are lowered for kernels with f16 scores.

Each row of Q is divided then, and of few keys that takes longer than the kernel saves (docs/lab/walk.md, row 55).
"""

from __future__ import annotations

LOWER_FROM = {64: 256, 128: 320, 256: 1024}  # keys of a sequence, by the widest head_dim


def stays(head_dim: int, keys: int, sequences: int = 1, longest: int | None = None) -> bool:
    """Whether FP8 operands with so many keys in all stay as they are. Long sequences of a batch have most of its work,
    so that a sequence counts as the mean of the average one and the ``longest``."""
    average = keys // max(sequences, 1)
    size = average if longest is None else (average + longest) // 2
    return size < next((least for widest, least in LOWER_FROM.items() if head_dim <= widest), size + 1)
