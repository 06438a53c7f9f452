"""A language model like Llama 3 8B: embedding, layers with grouped heads and a gated feed-forward network, and logits
of the last token of each sequence.

Embeddings are standard normal. Weights whose products are added to them are smaller by the square root of twice the
layers, as those of GPT-2 begin (Radford et al., 2019, section 2.3). With one standard deviation for all, each layer
makes the errors of those before it larger: docs/lab/decode.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layers import WEIGHT_STD, Attend, Drawn, angles, rotation, split_heads, turned
from .problems import Problem

EPSILON = 1e-5
ROPE_BASE = 500000.0


class Layer:
    """The weights of one layer. Projections of one input are one product, as engines have them."""

    def __init__(self, problem: Problem, draw: Drawn) -> None:
        width, kv_width = problem.width, problem.kv_heads * problem.head_dim
        added = WEIGHT_STD * (2 * problem.of) ** -0.5
        self.qkv, self.out = draw.weight(width + 2 * kv_width, width), draw.weight(width, width, added)
        self.gate_up, self.down = draw.weight(2 * problem.ffn, width), draw.weight(width, problem.ffn, added)
        self.ones = torch.ones(width, dtype=torch.bfloat16, device=self.out.device)


class Llama:
    """``forward`` gives logits, (B, vocabulary). The tokens of a sequence are its last ``tokens`` of ``keys``."""

    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        draw = Drawn(device)
        self._problem = problem
        self._layers = [Layer(problem, draw) for _ in range(problem.layers)]
        self._embedding = draw.normal(problem.vocabulary, problem.width)
        self._head = draw.weight(problem.vocabulary, problem.width)
        size = (problem.batch, problem.tokens)
        self._tokens = torch.randint(problem.vocabulary, size, generator=draw.generator, device=device)
        positions = torch.arange(problem.keys - problem.tokens, problem.keys, device=device)
        self._rotation = rotation(angles(positions, problem.head_dim // 2, ROPE_BASE))

    def forward(self, attend: Attend) -> torch.Tensor:
        x = F.embedding(self._tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, self._normal(x, layer), attend)
            gate, up = F.linear(self._normal(x, layer), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._normal(x[:, -1], self._layers[-1]), self._head)

    def _normal(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        return F.rms_norm(x, (self._problem.width,), layer.ones, EPSILON)

    def _attention(self, number: int, layer: Layer, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        problem = self._problem
        kv_width = problem.kv_heads * problem.head_dim
        q, k, v = F.linear(x, layer.qkv).split((problem.width, kv_width, kv_width), -1)
        queries = turned(split_heads(q, problem.heads), *self._rotation)
        keys = turned(split_heads(k, problem.kv_heads), *self._rotation)
        values = split_heads(v, problem.kv_heads)
        return F.linear(attend(number, queries, keys, values, causal=True).flatten(2), layer.out)
