"""The vLLM adapter through prefill, decode, mixed batches, shared prefixes and pages that are used again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import engine_vllm as stand_in
import pytest
import torch
from engine_steps import Requests, Sequence, Shape
from where import CPU, DEVICE

from fp8cutlass import stats
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.integrations import pages
from fp8cutlass.integrations.vllm import plugin, register

OURS = "fp8cutlass.integrations.vllm."
# Physical orders of [layer, block, head, token, content], as vLLM names them.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from stand_in.installed(monkeypatch)


def cache_of(shape: Shape, layout: str) -> torch.Tensor:
    """(blocks, kv_heads, tokens, 2 * head_dim) uint8, every byte a NaN of e4m3."""
    order = LAYOUTS[layout]
    logical = (2, shape.pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim)
    physical = torch.full([logical[i] for i in order], 0xFF, dtype=torch.uint8)
    return physical.permute([order.index(i) for i in range(5)])[1]


class Engine:
    """Steps of a model with one layer."""

    def __init__(self, shape: Shape, layout: str = "LBHNC", **options: Any) -> None:
        register()
        backend = stand_in.AttentionBackendEnum.CUSTOM.get_class()
        self.shape, self.requests = shape, Requests(shape)
        self.builder = backend.get_builder_cls()(None, ["layer"], None, DEVICE)
        self.layer = stand_in.Attention(shape.k_scale, shape.v_scale)
        self.impl = backend.get_impl_cls()(
            shape.heads, shape.head_dim, shape.head_dim**-0.5, shape.kv_heads, None,
            None if shape.window < 0 else shape.window + 1, "fp8", shape.softcap or None, "decoder", None,
            **({} if shape.sinks is None else {"sinks": shape.sinks}), **options,
        )  # fmt: skip
        self.cache = cache_of(shape, layout)

    def step(self, batch: list[tuple[Sequence, int]], padding: int = 0, causal: bool = True) -> None:
        """So many new tokens of each, then ``padding`` tokens and a request of none: judged against float64."""
        shape, new = self.shape, [self.requests.grow(s, n) for s, n in batch]
        lengths = [len(s) for s, _ in batch]
        rows = [n for _, n in batch]
        ends = torch.tensor([0, *rows]).cumsum(0).int()
        table = torch.full((len(batch), shape.pages), -7, dtype=torch.int32)  # what lies past the end is never read
        for i, (s, _) in enumerate(batch):
            table[i, : len(s.pages)] = torch.tensor(s.pages, dtype=torch.int32)
        slots = torch.tensor([slot for _, _, some in new for slot in some] + [-1] * padding)
        k, v = (torch.cat([x[i] for x in new]) for i in (0, 1))
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        if padding:
            k, v = (torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)]) for x in (k, v))
            ends, seq_lens = torch.cat([ends, ends[-1:]]), torch.cat([seq_lens, seq_lens.new_zeros(1)])
            table = torch.cat([table, table[:1]])
        tokens = sum(rows) + padding
        common = stand_in.CommonAttentionMetadata(
            ends, ends.cpu(), seq_lens, len(seq_lens), tokens, max(rows), max(lengths) + 5, table, slots, causal
        )
        q = self.requests.random(tokens, shape.heads, shape.head_dim)
        self.metadata = metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        output = torch.full((tokens, shape.heads * shape.head_dim), torch.nan, dtype=q.dtype)
        found = self.impl.forward(self.layer, q, k, v, self.cache, metadata, output)
        assert found is output
        out, begin = output.view(tokens, shape.heads, shape.head_dim), 0
        for (s, n), _ in zip(batch, new, strict=True):
            self.requests.judge(s, q[begin : begin + n], out[begin : begin + n])
            begin += n
        assert not out[begin:].any(), "padding"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_life_of_requests(vllm: Any, layout: str) -> None:
    """Prefill in chunks, decode, both in a batch, drafts, a shared prefix, pages of a request that has ended."""
    scales = torch.tensor([0.02, 0.5]), torch.tensor([3.0, 0.25])  # by KV head
    engine = Engine(Shape(k_scale=scales[0], v_scale=scales[1]), layout)
    one, two = Sequence(), Sequence()
    with stats.collect() as seen:
        engine.step([(one, 37), (two, 9)])  # prefill
        engine.step([(two, 20), (one, 1)])  # a chunk beside a decode
        engine.step([(one, 1), (two, 1)], padding=3)  # decode, padded
        three = engine.requests.share(one, 2)
        engine.step([(three, 11), (one, 4)])  # behind a shared prefix; four tokens of a draft
        engine.step([(one, 1), (three, 1), (two, 1)])
        engine.requests.drop(two)
        four = Sequence()
        engine.step([(four, 40), (three, 2)], padding=1)
        engine.step([(four, 1), (one, 1), (three, 1)])
    assert set(four.pages) & set(two.pages)
    assert seen.result().served.calls == 7 and not seen.result().fallback.calls
    assert {key.door for key in seen.result().counts} == {"vllm"}


@pytest.mark.parametrize(
    "shape",
    [
        Shape(window=12),
        Shape(softcap=3.0),
        Shape(sinks=torch.tensor([0.5, -1.0, 2.0, 4.0]).bfloat16()),
        Shape(heads=8, kv_heads=1, head_dim=128, page_size=64, pages=6),
        Shape(heads=2, kv_heads=2, head_dim=256, page_size=32, pages=8),
        Shape(heads=6, kv_heads=2, window=7, softcap=5.0, sinks=torch.randn(6), k_scale=torch.tensor(0.1)[None]),
    ],
    ids=["window", "softcap", "sinks", "multi_query", "wide", "all"],
)
def test_features(vllm: Any, shape: Shape) -> None:
    engine = Engine(shape, "LBNHC")
    one, two = Sequence(), Sequence()
    engine.step([(one, 30), (two, 5)])
    engine.step([(two, 25), (one, 1)])
    engine.step([(one, 1), (two, 1)])


def test_a_scale_of_no_axis_is_taken(vllm: Any) -> None:
    """vLLM registers its scales as tensors without an axis."""
    engine = Engine(Shape(k_scale=torch.tensor([0.25]), v_scale=torch.tensor([2.0])))
    engine.layer._k_scale, engine.layer._v_scale = torch.tensor(0.25), torch.tensor(2.0)
    engine.step([(Sequence(), 20)])


def test_rows_that_see_all_keys(vllm: Any) -> None:
    """Without causality a window reaches as far behind as before."""
    for window in (-1, 6):
        engine = Engine(Shape(window=window, right=window))
        engine.step([(Sequence(), 19), (Sequence(), 8)], causal=False)


def test_another_block_table_is_the_same_step(vllm: Any) -> None:
    engine = Engine(Shape())
    ends, used = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    table, slots = torch.tensor([[3]], dtype=torch.int32), torch.tensor([48])
    step = engine.builder.build(0, stand_in.CommonAttentionMetadata(ends, ends, used, 1, 1, 1, 1, table, slots))
    other = engine.builder.update_block_table(step, table + 1, slots + 16)
    assert int(other.block_table) == 4 and int(other.slot_mapping) == 64 and int(step.block_table) == 3
    assert other.seq_lens is used


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 2.0)])
def test_the_stand_in_of_vllms_kernel_writes_what_the_adapter_does(vllm: Any, scales: tuple[float, float]) -> None:
    """On a card the adapter calls it, elsewhere torch operations."""
    with CPU:
        engine = Engine(Shape(), "LBNHC")
        by_head = [torch.tensor([1.0, 0.5]) * scale for scale in scales]
        layer = stand_in.Attention(*by_head)
        caches = [cache_of(engine.shape, "LBNHC") for _ in range(3)]
    k, v, slots = Requests(Shape()).grow(Sequence(), 20)
    k, v, where = k.cpu(), v.cpu(), torch.tensor([-1, *slots[1:]], device=CPU)
    engine.impl.do_kv_cache_update(layer, k, v, caches[0], where)
    stand_in.reshape_and_cache_flash(k, v, *engine.impl.pages(caches[1]), where, "fp8", *by_head)
    assert torch.equal(caches[0], caches[1]) and not torch.equal(caches[0], caches[2])


def test_a_run_that_measures_memory_writes_zeros(vllm: Any) -> None:
    engine = Engine(Shape())
    output = torch.full((3, 256), torch.nan)
    assert not engine.impl.forward(engine.layer, None, None, None, engine.cache, None, output).any()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"kv_cache_dtype": "auto"}, "a cache of auto"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a cache of fp8_e5m2"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"sinks": torch.zeros(3)}, "sinks of shape"),
    ],
)
def test_a_layer_that_is_not_served_is_refused_by_name(vllm: Any, options: dict[str, Any], text: str) -> None:
    impl = importlib.import_module(OURS + "impl").Impl
    with pytest.raises(UnsupportedError, match=text):
        impl(**{"num_heads": 4, "head_size": 64, "scale": 1.0, "num_kv_heads": 2, "kv_cache_dtype": "fp8"} | options)


def test_steps_that_are_not_served_are_refused_by_name(vllm: Any) -> None:
    engine = Engine(Shape())
    x = torch.zeros(1, dtype=torch.int32)
    common = [x, x, x, 1, 1, 1, 1, x[None], x]
    with pytest.raises(UnsupportedError, match="cascade"):
        engine.builder.build(16, stand_in.CommonAttentionMetadata(*common))
    with pytest.raises(UnsupportedError, match="causality by request"):
        engine.builder.build(0, stand_in.CommonAttentionMetadata(*common, causal=x > 0))
    with pytest.raises(UnsupportedError, match="reference sliding"):
        engine.builder.build(0, stand_in.CommonAttentionMetadata(*common, rswa_prefix_lens=x))
    step = engine.builder.build(0, stand_in.CommonAttentionMetadata(*common))
    with pytest.raises(UnsupportedError, match="quantised in the same kernel"):
        engine.impl.forward(engine.layer, None, None, None, engine.cache, step, x, output_scale=x)


def test_what_the_backend_says_of_itself(vllm: Any) -> None:
    backend = importlib.import_module(OURS + "backend").FP8CutlassBackend
    assert backend.get_name() == stand_in.AttentionBackendEnum.CUSTOM.name
    assert [d for d in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", None) if backend.supports_kv_cache_dtype(d)] == [
        "fp8", "fp8_e4m3",
    ]  # fmt: skip
    capabilities = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    served = [c for c in capabilities if backend.supports_compute_capability(stand_in.DeviceCapability(*c))]
    assert served == [(8, 9), (9, 0)]
    asked = (16, False, False, False, False, stand_in.DeviceCapability(9, 0))
    assert backend.supports_combination(128, torch.bfloat16, "fp8", *asked) is None
    assert "64, 96, 128" in str(backend.supports_combination(80, torch.bfloat16, "fp8", *asked))
    assert "--kv-cache-dtype" in str(backend.supports_combination(128, torch.bfloat16, None, *asked))
    assert not backend.forward_includes_kv_cache_update  # else vLLM would not call do_kv_cache_update
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is stand_in.AttentionCGSupport.NEVER


def test_head_sizes_are_those_of_the_kernels() -> None:
    from fp8cutlass.integrations.pages import CARDS, HEAD_DIMS
    from fp8cutlass.manifest import generated_dir, load_manifest

    decodes = [d for d in load_manifest(generated_dir()).decodes if not d.candidate]
    for arch in {d.arch for d in decodes}:
        assert sorted({d.head_dim for d in decodes if d.arch == arch}) == list(HEAD_DIMS)
    assert {d.arch.rstrip("a") for d in decodes} == {f"sm{major}{minor}" for major, minor in CARDS}


def test_another_package_keeps_its_backend(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    stand_in.register_backend(stand_in.AttentionBackendEnum.CUSTOM, "theirs.Backend")
    with pytest.raises(RuntimeError, match=r"taken by theirs\.Backend"):
        register()
    plugin()
    assert stand_in.AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend" and "theirs.Backend" in caplog.text


def test_an_older_vllm_is_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.AttentionBackend, "get_kv_cache_shape", None, raising=False)
    with pytest.raises(ImportError, match=r"0\.28"):
        register()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_engine(engine: str) -> None:
    """A process that cannot import it: the package imports nothing of it, and errors say what is missing."""
    text = f"""
import sys
sys.modules[{engine!r}] = None
import fp8cutlass
assert not any(name.startswith("fp8cutlass.integrations") for name in sys.modules)
from fp8cutlass.integrations import {engine} as ours
ours.plugin()
for do in (ours.register, lambda: __import__("fp8cutlass.integrations.{engine}.backend")):
    try:
        do()
    except ImportError as error:
        assert "fp8cutlass" in str(error) and {engine!r} in str(error).lower(), error
    else:
        raise AssertionError(do)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env={"PYTHONPATH": "python"})
    assert done.returncode == 0, done.stderr


def test_the_work_of_a_step_is_cut_once_for_its_layers(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for a layer with a window."""
    made: list[Any] = []
    make = pages.plan_attention
    monkeypatch.setattr(pages, "plan_attention", lambda *args, **rest: made.append(rest) or make(*args, **rest))
    engine, one = Engine(Shape()), Sequence()
    engine.step([(one, 20)])
    assert len(made) == 1
    metadata, shape = engine.metadata, engine.shape
    q, output = torch.randn(20, shape.heads, shape.head_dim).bfloat16(), torch.empty(20, 256).bfloat16()
    for left in (-1, 4, 4, -1):
        engine.impl.left = left
        engine.impl.forward(engine.layer, q, None, None, engine.cache, metadata, output)
    assert [x["window_size"] for x in made] == [(-1, 0), (4, 0)]
    engine.impl.left = -1
    engine.step([(one, 1)])
    assert len(made) == 3
