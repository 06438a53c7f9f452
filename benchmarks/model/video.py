"""Blocks like those of Wan 2.1 14B: self-attention over a video, cross-attention to a text, and a feed-forward network,
each with the modulation of a time step. The blocks alone: no embedding, no encoder of text, no VAE."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layers import Attend, Drawn, angles, rotation, split_heads, turned
from .problems import Problem

EPSILON = 1e-6
ROPE_BASE = 10000.0


class Block:
    """The weights of one block."""

    def __init__(self, problem: Problem, draw: Drawn) -> None:
        width, ffn = problem.width, problem.ffn
        self.own = [draw.weight(width, width) for _ in range(4)]  # of q, k, v and the output
        self.cross = [draw.weight(width, width) for _ in range(4)]
        self.up, self.down = draw.weight(ffn, width), draw.weight(width, ffn)
        self.modulation = draw.normal(6, width, std=width**-0.5)
        self.ones = torch.ones(width, dtype=torch.bfloat16, device=self.up.device)


class Video:
    """``forward`` gives what the stack adds to its input, (1, S, width)."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        draw = Drawn(device)
        self._problem = problem
        self._blocks = [Block(problem, draw) for _ in range(problem.layers)]
        self._x = draw.normal(1, problem.tokens, problem.width)
        self._text = draw.normal(1, problem.context, problem.width)
        self._time = draw.normal(6, problem.width)
        self._rotation = rotation(_grid_angles(problem, device))

    def forward(self, attend: Attend) -> torch.Tensor:
        x = self._x
        for layer, block in enumerate(self._blocks):
            x = self._through(layer, block, x, attend)
        return x - self._x

    def _through(self, layer: int, block: Block, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = block.modulation + self._time
        y = _normal(x) * (1 + scale) + shift
        x = x + self._attention(layer, block, block.own, y, y, attend, cross=False) * gate
        x = x + self._attention(layer, block, block.cross, _normal(x), self._text, attend, cross=True)
        y = _normal(x) * (1 + ffn_scale) + ffn_shift
        return x + F.linear(F.gelu(F.linear(y, block.up), approximate="tanh"), block.down) * ffn_gate

    def _attention(
        self, layer: int, block: Block, weights: list[torch.Tensor], x: torch.Tensor, of: torch.Tensor, attend: Attend,
        *, cross: bool,
    ) -> torch.Tensor:  # fmt: skip
        heads, width = self._problem.heads, (self._problem.width,)
        q, k, v, out = weights
        queries = split_heads(F.rms_norm(F.linear(x, q), width, block.ones, EPSILON), heads)
        keys = split_heads(F.rms_norm(F.linear(of, k), width, block.ones, EPSILON), heads)
        if not cross:
            queries, keys = (turned(tokens, *self._rotation) for tokens in (queries, keys))
        values = split_heads(F.linear(of, v), heads)
        return F.linear(attend(layer, queries, keys, values, causal=False, cross=cross).flatten(2), out)


def _normal(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON)


def _grid_angles(problem: Problem, device: torch.device | str) -> torch.Tensor:
    """(S, D / 2): a third of the pairs turns by the frame, a third by the row, a third by the column of a token."""
    frames, height, width = problem.grid
    pairs = problem.head_dim // 2
    third = pairs // 3
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in (frames, height, width)), indexing="ij")
    shares = (pairs - 2 * third, third, third)
    return torch.cat([angles(at.flatten(), n, ROPE_BASE) for at, n in zip(axes, shares, strict=True)], -1)
