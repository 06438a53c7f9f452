"""The SGLang adapter through prefill, decode, mixed batches, shared prefixes and pages that are used again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine_sglang as stand_in
import pytest
import torch
from engine_sglang import ForwardMode
from engine_steps import Requests, Sequence, Shape

from fp8cutlass import stats
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.integrations.sglang import register

MODULE = "fp8cutlass.integrations.sglang.backend"
REQUESTS, CONTEXT = 6, 96


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield stand_in
    sys.modules.pop(MODULE, None)


class Engine:
    """Steps of a model with one layer."""

    def __init__(self, shape: Shape, layout: str = "nhd", scaled: bool = True, graphs: int = 0) -> None:
        name = register()
        self.shape, self.requests = shape, Requests(shape)
        self.pool = stand_in.MHATokenToKVPool(
            (shape.pages - 1) * shape.page_size, shape.page_size, shape.kv_heads, shape.head_dim, layout
        )
        self.runner = stand_in.runner_of(self.pool, REQUESTS, CONTEXT)
        self.backend = stand_in.ATTENTION_BACKENDS[name](self.runner)
        self.layer = stand_in.RadixAttention(
            shape.heads, shape.head_dim, shape.head_dim**-0.5, shape.kv_heads, 0, shape.softcap, -1, shape.window
        )
        if scaled:
            self.layer.k_scale, self.layer.v_scale = shape.k_scale, shape.v_scale
        self.numbers: dict[int, int] = {}
        self.graphs = graphs
        if graphs:
            self.backend.init_cuda_graph_state(graphs, graphs)
            self.backend.held.table.fill_(0)

    def step(self, batch: list[tuple[Sequence, int]], mode: ForwardMode, known: bool = True) -> None:
        """So many new tokens of each, judged against float64. ``known``: whether lengths are on the host, too."""
        new = [self.requests.grow(s, n) for s, n in batch]
        slots = self.runner.req_to_token_pool.req_to_token
        for s, _ in batch:
            number = self.numbers.setdefault(id(s), len(self.numbers) % REQUESTS)
            slots[number] = -9  # what lies past the end is never read
            slots[number, : len(s)] = torch.tensor([self.requests.slot(s, t) for t in range(len(s))])
        lengths = torch.tensor([len(s) for s, _ in batch])
        rows = torch.tensor([n for _, n in batch])
        forward = stand_in.ForwardBatch(
            mode, len(batch), torch.tensor([self.numbers[id(s)] for s, _ in batch]), lengths,
            torch.tensor([slot for _, _, some in new for slot in some]), lengths.cpu() if known else None,
        )  # fmt: skip
        if mode != ForwardMode.DECODE:
            forward.extend_seq_lens, forward.extend_seq_lens_cpu = rows, rows.tolist() if known else None
        if self.graphs and mode == ForwardMode.DECODE:
            self.backend.init_forward_metadata_out_graph(forward)
            self.backend.init_forward_metadata_in_graph(forward)
        else:
            self.backend.init_forward_metadata(forward)
        shape, tokens = self.shape, int(rows.sum())
        q = self.requests.random(tokens, shape.heads * shape.head_dim)
        k, v = (torch.cat([x[i] for x in new]) for i in (0, 1))
        given = {} if shape.sinks is None else {"sinks": shape.sinks}
        out = self.backend.forward(q, k, v, self.layer, forward, **given)
        assert out.shape == q.shape and out.dtype == q.dtype
        q, out = (x.view(tokens, shape.heads, shape.head_dim) for x in (q, out))
        begin = 0
        for s, n in batch:
            self.requests.judge(s, q[begin : begin + n], out[begin : begin + n])
            begin += n


@pytest.mark.parametrize(
    "page_size, pages, layout", [(1, 300, "nhd"), (16, 24, "nhd"), (64, 8, "nhd"), (16, 24, "hnd")]
)
@pytest.mark.parametrize("graphs", [0, 4])
def test_a_life_of_requests(sglang: Any, page_size: int, pages: int, layout: str, graphs: int) -> None:
    """Prefill in chunks, decode, both in a batch, a shared prefix, pages of a request that has ended."""
    shape = Shape(page_size=page_size, pages=pages, k_scale=torch.tensor([0.125]), v_scale=torch.tensor([2.0]))
    engine = Engine(shape, layout, graphs=graphs)
    one, two = Sequence(), Sequence()
    with stats.collect() as seen:
        engine.step([(one, 70), (two, 9)], ForwardMode.EXTEND)
        engine.step([(two, 20), (one, 1)], ForwardMode.MIXED, known=False)
        engine.step([(one, 1), (two, 1)], ForwardMode.DECODE)
        three = engine.requests.share(one, 64 // page_size)
        engine.step([(three, 7)], ForwardMode.EXTEND)
        engine.step([(two, 1), (one, 1), (three, 1)], ForwardMode.DECODE, known=False)
        engine.requests.drop(two)
        four = Sequence()
        engine.step([(four, 30), (three, 1)], ForwardMode.MIXED)
        engine.step([(four, 1), (three, 1), (one, 1)], ForwardMode.DECODE)
    assert set(four.pages) & set(two.pages)
    assert seen.result().served.calls == 7 and {key.door for key in seen.result().counts} == {"sglang"}


@pytest.mark.parametrize(
    "shape",
    [
        Shape(window=12),
        Shape(softcap=3.0),
        Shape(sinks=torch.tensor([0.5, -1.0, 2.0, 4.0])),
        Shape(heads=8, kv_heads=1, head_dim=128, page_size=1, pages=80),
    ],
    ids=["window", "softcap", "sinks", "multi_query"],
)
def test_features(sglang: Any, shape: Shape) -> None:
    """Of a layer whose checkpoint has no scales."""
    engine = Engine(shape, scaled=False)
    one, two = Sequence(), Sequence()
    engine.step([(one, 30), (two, 5)], ForwardMode.EXTEND)
    engine.step([(two, 1), (one, 1)], ForwardMode.DECODE)


def test_a_graph_reads_the_tensors_of_its_own_step(sglang: Any) -> None:
    """The tensors that a capture saw are the ones that a replay fills: their addresses stay."""
    engine = Engine(Shape(), graphs=4)
    one = Sequence()
    engine.step([(one, 20)], ForwardMode.EXTEND)
    engine.step([(one, 1)], ForwardMode.DECODE)
    before = engine.backend.forward_metadata
    engine.step([(one, 1)], ForwardMode.DECODE)
    after = engine.backend.forward_metadata
    for name in ("lengths", "ends", "table"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr()
    assert int(after.lengths) == 22 and engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_a_layer_that_shares_keys_writes_none(sglang: Any) -> None:
    engine = Engine(Shape())
    engine.step([(Sequence(), 20)], ForwardMode.EXTEND)
    before = [x.clone() for x in engine.pool.buffers]
    forward = stand_in.ForwardBatch(
        ForwardMode.DECODE, 1, torch.tensor([0]), torch.tensor([20]), torch.tensor([0]), torch.tensor([20])
    )
    engine.backend.init_forward_metadata(forward)
    q, kv = torch.randn(1, 256).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    assert engine.backend.forward(q, kv, kv, engine.layer, forward, save_kv_cache=False).isfinite().all()
    assert engine.backend.forward(q, None, None, engine.layer, forward).isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(before, engine.pool.buffers, strict=True))


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"kv_cache_dtype": torch.bfloat16}, "--kv-cache-dtype fp8_e4m3"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"use_mla_backend": True}, "latent"),
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative"),
        ({"model_config": SimpleNamespace(context_len=8, is_encoder_decoder=True)}, "encoder-decoder"),
    ],
)
def test_a_runner_that_is_not_served_is_refused_by_name(sglang: Any, changed: dict[str, Any], text: str) -> None:
    pool = stand_in.MHATokenToKVPool(32, 16, 2, 64)
    with pytest.raises(UnsupportedError, match=text):
        importlib.import_module(MODULE).FP8CutlassBackend(stand_in.runner_of(pool, 2, 32, **changed))


@pytest.mark.parametrize("layout", ["vectorized_5d", "page_major", None])
def test_a_pool_that_is_not_served_is_refused_by_name(sglang: Any, layout: str | None) -> None:
    """The pool of hybrid models has no layout of its own: it has two pools."""
    pool = stand_in.MHATokenToKVPool(32, 16, 2, 64)
    if layout is None:
        del pool.kv_cache_layout
    else:
        pool.kv_cache_layout = layout
    with pytest.raises(UnsupportedError, match=f"layout {layout or 'unknown'}"):
        importlib.import_module(MODULE).FP8CutlassBackend(stand_in.runner_of(pool, 2, 32))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"attn_type": stand_in.AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"v_head_dim": 32}, "values of width 32"),
        ({"head_dim": 80, "v_head_dim": 80}, "head size 80"),
        ({"logit_cap": 3.0, "logit_capping_method": "other"}, "capped by other"),
        ({"xai_temperature_len": 5}, "temperature"),
    ],
)
def test_a_layer_that_is_not_served_is_refused_by_name(sglang: Any, change: dict[str, Any], text: str) -> None:
    engine = Engine(Shape())
    vars(engine.layer).update(change)
    with pytest.raises(UnsupportedError, match=text):
        engine.step([(Sequence(), 2)], ForwardMode.EXTEND)


def test_steps_that_are_not_served_are_refused_by_name(sglang: Any) -> None:
    engine = Engine(Shape(), graphs=2)
    with pytest.raises(UnsupportedError, match="speculative"):
        engine.step([(Sequence(), 2)], ForwardMode.TARGET_VERIFY)
    forward = stand_in.ForwardBatch(ForwardMode.EXTEND, 1, *torch.ones(3, 1).long())
    with pytest.raises(UnsupportedError, match="CUDA graphs of"):
        engine.backend.init_forward_metadata_out_graph(forward)
    with pytest.raises(UnsupportedError, match="argument k_rope"):
        engine.backend.forward_decode(None, None, None, engine.layer, forward, k_rope=torch.zeros(1))


def test_the_name_is_offered_once(sglang: Any) -> None:
    assert register() == register() == "fp8cutlass" and stand_in.CHOICES == ["fp8cutlass"]
