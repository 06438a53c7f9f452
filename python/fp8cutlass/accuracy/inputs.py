"""Random operands of the accuracy table, the same numbers on every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

Shape = tuple[int, int, int, int]  # batch, heads, tokens, head_dim
Operands16 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value in bf16

OUTLIER_SHARE = 0.001
OUTLIER_SIZE = 10.0  # standard deviation of an outlier
BIAS_SIZE = 8.0  # standard deviation of a channel's bias, in units of that of K


def randn(*shape: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bf16 normal numbers that are the same on every machine."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.bfloat16().to(device)


def normal(shape: Shape) -> Operands16:
    """N(0, 1)."""
    q, k, v = (randn(*shape, seed=seed) for seed in range(3))
    return q, k, v


def outliers(shape: Shape) -> Operands16:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), in all three."""
    generator = torch.Generator().manual_seed(7)

    def spiked(x: torch.Tensor) -> torch.Tensor:
        size = OUTLIER_SIZE * torch.randn(x.shape, generator=generator)
        return (x.float() + size * (torch.rand(x.shape, generator=generator) < OUTLIER_SHARE)).bfloat16()

    q, k, v = normal(shape)
    return spiked(q), spiked(k), spiked(v)


def biased_keys(shape: Shape) -> Operands16:
    """N(0, 1), and on every key of a head the same vector of N(0, 64): softmax does not see it, rounding does."""
    q, k, v = normal(shape)
    bias = BIAS_SIZE * torch.randn(1, shape[1], 1, shape[3], generator=torch.Generator().manual_seed(7))
    return q, (k.float() + bias).bfloat16(), v


INPUTS: dict[str, Callable[[Shape], Operands16]] = {"randn": normal, "outlier": outliers, "K bias": biased_keys}
