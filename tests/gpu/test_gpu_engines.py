"""The adapters for serving engines on a card: a layer of vLLM's, eager and in a CUDA graph, on pages of vLLM's layout.

Regressions these catch: a step that waits for a number of the device; a graph that keeps the lengths, pages or row
counts of its capture. The backend may report AttentionCGSupport.ALWAYS once these have passed on a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import engine_vllm as stand_in
import pytest
import torch
from engine_steps import Requests, Sequence, Shape

pytestmark = pytest.mark.gpu

OURS = "fp8cutlass.integrations.vllm."


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from stand_in.installed(monkeypatch)


class Layer:
    """Writes on the host, attends on the card, from tensors whose addresses stay."""

    def __init__(self, shape: Shape, tokens: int, requests: int) -> None:
        steps, impl = (importlib.import_module(OURS + name) for name in ("steps", "impl"))
        self.shape, self.requests = shape, Requests(shape)
        self.impl = impl.Impl(
            shape.heads, shape.head_dim, shape.head_dim**-0.5, shape.kv_heads, None,
            None if shape.window < 0 else shape.window + 1, "fp8", shape.softcap or None,
            sinks=None if shape.sinks is None else shape.sinks.cuda(),
        )  # fmt: skip
        self.here = stand_in.Attention(shape.k_scale, shape.v_scale)
        self.there = stand_in.Attention(shape.k_scale.cuda(), shape.v_scale.cuda())
        size = (shape.pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim)
        self.bytes = torch.full(size, 0xFF, dtype=torch.uint8)
        self.cache = self.bytes.cuda()
        self.q = torch.zeros(tokens, shape.heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.full_like(self.q, torch.nan)
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.step = steps.Metadata(
            tokens, tokens, shape.pages * shape.page_size, torch.zeros(requests + 1, **int32),
            torch.zeros(requests, **int32), torch.zeros(requests, shape.pages, **int32), torch.zeros(0), True,
        )  # fmt: skip

    def fill(self, batch: list[tuple[Sequence, int]]) -> None:
        """So many new tokens of each; the rest of the tensors is padding."""
        step, ends, begin = self.step, [0], 0
        step.seq_lens.zero_()
        for i, (sequence, rows) in enumerate(batch):
            k, v, slots = self.requests.grow(sequence, rows)
            self.impl.do_kv_cache_update(self.here, k, v, self.bytes, torch.tensor(slots))
            step.seq_lens[i] = len(sequence)
            step.block_table[i, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
            self.q[begin : begin + rows] = self.requests.random(rows, *self.q.shape[1:]).cuda()
            begin += rows
            ends.append(begin)
        ends += [begin] * (len(step.query_start_loc) - len(ends))
        step.query_start_loc.copy_(torch.tensor(ends))
        self.cache.copy_(self.bytes)

    def run(self) -> torch.Tensor:
        found = self.impl.forward(self.there, self.q, None, None, self.cache, self.step, self.out)
        assert isinstance(found, torch.Tensor)
        return found

    def judge(self, batch: list[tuple[Sequence, int]]) -> None:
        begin = 0
        for sequence, rows in batch:
            at = slice(begin, begin + rows)
            self.requests.judge(sequence, self.q[at].cpu(), self.out[at].cpu())
            begin += rows
        assert not self.out[begin:].any()


SHAPES = [
    Shape(8, 2, 128, k_scale=torch.tensor([0.25]), v_scale=torch.tensor([0.5, 2.0])),
    Shape(8, 2, 64, window=20, softcap=5.0, sinks=torch.linspace(-1, 2, 8)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["scales", "window_softcap_sinks"])
def test_a_graph_follows_lengths_pages_and_rows(vllm: Any, shape: Shape) -> None:
    layer = Layer(shape, 48, 4)
    one, two, three = Sequence(), Sequence(), Sequence()
    batch = [(one, 37), (two, 9)]
    layer.fill(batch)
    layer.run()
    layer.judge(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    for batch in ([(one, 1), (two, 1)], [(three, 30), (one, 1), (two, 5)], [(two, 1)], [(one, 20), (three, 2)]):
        layer.fill(batch)
        layer.out.fill_(torch.nan)
        graph.replay()
        layer.judge(batch)
