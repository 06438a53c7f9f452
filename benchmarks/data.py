"""Tensors of a problem and the float32 reference that every contender is held to."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from .shapes import Shape

SAMPLED_ROWS = 128  # of the first head of the first batch and of the last head of the last

# Relative L2 error above which a time does not count. FP8 operands, probabilities and (for some) outputs of 3 mantissa
# bits make 0.05 to 0.06 on this data; a wrong tile, descale or mask makes far more than these limits.
ERROR_LIMIT = {"fp8": 0.10, "bf16": 0.02, "int8": 0.10}


@dataclass(frozen=True)
class Data:
    """Random bf16 ``q`` (B, H, Sq, D), ``k`` and ``v`` (B, Hkv, Sk, D), contiguous, and the expected output of some
    rows: ``expected[i]`` is (rows, D) float32 for the (batch, head) pair ``pairs[i]``."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    rows: torch.Tensor
    pairs: tuple[tuple[int, int], ...]
    expected: tuple[torch.Tensor, ...]

    def error(self, out: torch.Tensor, descale: float = 1.0) -> float:
        """Relative L2 error of an output (B, H, Sq, D) of any dtype and strides, times ``descale``, on the sample.

        NaN counts as infinite, so that it fails every limit.
        """
        got, expected = self.sample(out, descale)
        error = float((got - expected).norm() / expected.norm())
        return error if error == error else math.inf

    def sample(self, out: torch.Tensor, descale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampled rows of an output, times ``descale``, and what is expected there: (pairs, rows, D) float32."""
        got = torch.stack([out[pair].float()[self.rows] for pair in self.pairs])
        return got * descale, torch.stack(self.expected)


def make_data(shape: Shape, device: torch.device | str = "cuda", seed: int = 0) -> Data:
    """Draw the operands of a shape (standard normal) and compute the reference of the sampled rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, seqlen: int) -> torch.Tensor:
        size = (shape.batch, heads, seqlen, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    return with_operands(
        shape,
        draw(shape.heads, shape.seqlen_q),
        draw(shape.kv_heads, shape.seqlen_k),
        draw(shape.kv_heads, shape.seqlen_k),
    )


def with_operands(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, every_row: bool = False) -> Data:
    """Data of given bf16 operands; with ``every_row`` the sample is the whole output."""
    scale = 1.0 / math.sqrt(shape.head_dim)
    count = shape.seqlen_q if every_row else min(SAMPLED_ROWS, shape.seqlen_q)
    rows = torch.linspace(0, shape.seqlen_q - 1, count, device=q.device).round().long()
    ends = [(0, 0), (shape.batch - 1, shape.heads - 1)]
    pairs = tuple(itertools.product(range(shape.batch), range(shape.heads)) if every_row else dict.fromkeys(ends))
    expected = tuple(_reference(shape, q, k, v, scale, rows, *pair) for pair in pairs)
    return Data(shape, q, k, v, scale, rows, pairs, expected)


def _reference(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, rows: torch.Tensor, b: int, h: int
) -> torch.Tensor:
    kv_head = h // (shape.heads // shape.kv_heads)
    scores = q[b, h, rows].float() @ k[b, kv_head].float().T * scale
    if shape.causal:
        keys = torch.arange(shape.seqlen_k, device=q.device)
        scores = scores.masked_fill(keys > rows[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v[b, kv_head].float()
