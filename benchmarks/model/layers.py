"""What both models are made of. Weights and activations are bf16."""

from __future__ import annotations

from typing import Protocol

import torch

WEIGHT_STD = 0.02


class Attend(Protocol):
    """Attention of layer ``layer``: q (B, S, H, D), k and v (B, Sk, Hkv, D), bf16. Returns (B, S, H, D). ``cross`` is
    attention to a text, which has no mask and no cache."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor: ...


class Drawn:
    """Random numbers of one seed on one device, bf16."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(size, generator=self.generator, device=self.generator.device, dtype=torch.bfloat16)
        return drawn.mul_(std)

    def weight(self, rows: int, columns: int, std: float = WEIGHT_STD) -> torch.Tensor:
        """As ``torch.nn.functional.linear`` takes it."""
        return self.normal(rows, columns, std=std)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, heads * D) to (B, S, heads, D)."""
    return x.unflatten(-1, (heads, -1))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary turn of (B, S, H, D): columns i and i + D / 2 are a pair; ``cos`` and ``sin`` are (S, 1, D / 2)."""
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def angles(positions: torch.Tensor, pairs: int, base: float) -> torch.Tensor:
    """(S, pairs) float32."""
    inverse = base ** (-torch.arange(pairs, device=positions.device, dtype=torch.float32) / pairs)
    return positions.float()[:, None] * inverse


def rotation(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine as ``turned`` takes them, bf16."""
    return angle.cos().bfloat16()[:, None], angle.sin().bfloat16()[:, None]
