"""Models of diffusers: how close, and how many calls are served and why others are not. Needs diffusers."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import relative_l2
from torch.utils._python_dispatch import TorchDispatchMode
from where import CPU, cpu_alone, no_default, randn

diffusers = pytest.importorskip("diffusers")

import context_parallel  # noqa: E402
import tiny_diffusers as tiny  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from diffusers.models import attention_processor as processors  # noqa: E402

from fp8cutlass import UnsupportedError, stats  # noqa: E402
from fp8cutlass.integrations import diffusers as fp8  # noqa: E402
from fp8cutlass.integrations.diffusers import backend, masks, reach  # noqa: E402

BOUND = 0.04  # of a model's output; losing a mask or a scale gives more in most of them
diffusers.logging.set_verbosity_error()

GLOO = cpu_alone("processes that share the CPU, by gloo")
Counts = dict[tuple[str, str], int]  # (class of the processor, reason) -> calls


def counts(seen: stats.Collected) -> Counts:
    assert {key.door for key in seen.result().counts} <= {"diffusers"}
    return {(key.where, key.what): count.calls for key, count in seen.result().counts.items()}


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    """The backend of the process afterwards is the one before."""
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


CASES: dict[str, tuple[Callable[[], Any], tuple[int, int], Counts]] = {
    # (modules by the backend, modules by torch's attention), counts
    "flux": (tiny.flux, (2, 0), {("", ""): 2}),
    "sd3": (tiny.sd3, (0, 2), {("JointAttnProcessor2_0", ""): 2}),
    "sdxl": (tiny.sdxl, (0, 8), {("AttnProcessor2_0", ""): 8}),
    "wan": (tiny.wan, (4, 0), {("", ""): 4}),
    "cogvideox": (tiny.cogvideox, (0, 2), {("CogVideoXAttnProcessor2_0", ""): 2}),
    "ltx": (tiny.ltx, (2, 0), {("", ""): 1, ("", "mask"): 1}),
    "pixart": (tiny.pixart, (0, 4), {("AttnProcessor2_0", ""): 2, ("AttnProcessor2_0", "mask"): 2}),
    "qwen image": (tiny.qwen_image, (2, 0), {("", ""): 2}),
    "qwen image, padded": (partial(tiny.qwen_image, 5), (2, 0), {("", ""): 2}),
    "hunyuan video": (tiny.hunyuan_video, (2, 1), {("", ""): 2, ("AttnProcessor2_0", ""): 1}),
    "hunyuan video, padded": (
        partial(tiny.hunyuan_video, 9), (2, 1), {("", ""): 2, ("AttnProcessor2_0", ""): 1},
    ),
    "autoencoder": (tiny.autoencoder, (0, 2), {("AttnProcessor2_0", ""): 2}),
    "wan autoencoder": (tiny.wan_autoencoder, (0, 2), {("WanAttentionBlock", ""): 2}),
    "sana": (tiny.sana, (0, 1), {("SanaAttnProcessor2_0", ""): 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models(case: str) -> None:
    make, modules, expected = CASES[case]
    model, given = tiny.built(make)
    before = tiny.run(model, given)
    found = fp8.enable(model)
    with stats.collect() as seen:
        out = tiny.run(model, given)
    assert (len(found.dispatched), len(found.watched)) == modules and counts(seen) == expected
    error = relative_l2(out, before.double())
    assert error < BOUND and (error > 0) == any(not why for _, why in expected)
    fp8.disable(model)
    with stats.collect() as seen:
        assert torch.equal(tiny.run(model, given), before)
    assert not seen.result().counts


def test_what_is_not_reached_is_named() -> None:
    model, _ = tiny.built(tiny.sana)
    found = fp8.enable(model)
    assert list(found.left) == ["transformer_blocks.0.attn1"] and "SanaLinearAttnProcessor2_0" in str(found)


def test_the_default_of_the_process_does_not_change() -> None:
    model, _ = tiny.built(tiny.flux)
    fp8.enable(model)
    assert dispatch._AttentionBackendRegistry._active_backend == dispatch.AttentionBackendName.NATIVE
    other, given = tiny.built(tiny.flux)
    with stats.collect() as seen:
        tiny.run(other, given)
    assert not seen.result().counts


def test_the_ways_of_diffusers_itself() -> None:
    fp8.register()
    model, given = tiny.built(tiny.flux)
    with dispatch.attention_backend("fp8cutlass"), stats.collect() as seen:
        inside = tiny.run(model, given)
    assert counts(seen) == {("", ""): 2}
    model.set_attention_backend("fp8cutlass")
    with stats.collect() as seen:
        assert torch.equal(tiny.run(model, given), inside)
    assert counts(seen) == {("", ""): 2}
    assert copy.deepcopy(model).transformer_blocks[0].attn.processor._attention_backend.value == "fp8cutlass"


def test_modules_can_be_left_out() -> None:
    model, given = tiny.built(tiny.pixart)
    found = fp8.enable(model, exclude=("transformer_blocks.0.*",))
    assert sorted(found.left.values()) == ["excluded"] * 2 and len(found.watched) == 2
    with stats.collect() as seen:
        tiny.run(model, given)
    assert counts(seen) == {("AttnProcessor2_0", ""): 1, ("AttnProcessor2_0", "mask"): 1}


class Encoder(torch.nn.Linear):
    """Of transformers, by its name."""

    __module__ = "transformers.models.clip"


def test_a_pipeline_is_reached_part_by_part() -> None:
    transformer, _ = tiny.built(tiny.sd3)
    autoencoder, _ = tiny.built(tiny.autoencoder)
    parts = {"transformer": transformer, "vae": autoencoder, "text_encoder": Encoder(2, 2), "scheduler": object()}
    found = fp8.enable(types.SimpleNamespace(components=parts))
    assert {name.split(".")[0] for name in found.watched} == {"transformer", "vae"}
    assert list(found.left) == ["text_encoder"] and "integrations.transformers" in str(found)
    with pytest.raises(TypeError, match="SimpleNamespace"):
        fp8.enable(types.SimpleNamespace())


def test_a_pipeline_makes_the_same_picture() -> None:
    """Two steps of two layers, then the VAE's one layer."""
    pipeline = tiny.dit_pipeline()

    def picture() -> torch.Tensor:
        generator = torch.Generator(CPU).manual_seed(3)
        made = pipeline([1, 2], generator=generator, num_inference_steps=2, output_type="np").images
        return torch.from_numpy(made)

    before = picture()
    fp8.enable(pipeline)
    with stats.collect() as seen:
        out = picture()
    assert counts(seen) == {("AttnProcessor2_0", ""): 5}
    assert 0 < relative_l2(out, before.double()) < BOUND
    fp8.disable(pipeline)
    assert torch.equal(picture(), before)


def test_the_checks_of_diffusers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch._AttentionBackendRegistry, "_checks_enabled", True)
    assert dispatched(*operands())[2] == {("", ""): 1}
    with pytest.raises(ValueError, match="same dtype"):
        dispatch.dispatch_attention_fn(*operands()[:2], operands()[2].float(), backend=fp8.register())


def test_accuracy_belongs_to_a_name() -> None:
    q = randn(1, 40, 2, 64, seed=1)
    k = randn(1, 40, 2, 64, seed=2) + 20.0
    exact = F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, q))).transpose(1, 2)
    fp8.register()
    smooth = fp8.register("fp8cutlass_smooth", smooth_k=True)
    errors = [
        relative_l2(dispatch.dispatch_attention_fn(q, k, q, backend=name), exact) for name in ("fp8cutlass", smooth)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert fp8.register("fp8cutlass_smooth", smooth_k=True) is smooth
    with pytest.raises(ValueError, match="another name"):
        fp8.register("fp8cutlass_smooth", hadamard=True)
    for name in ("native", "FP8"):
        with pytest.raises(ValueError, match="cannot be a backend's name"):
            fp8.register(name)
    with pytest.raises(TypeError, match="dropout_p"):
        fp8.register("other", dropout_p=0.0)
    model, given = tiny.built(tiny.sd3)
    fp8.enable(model, name="fp8cutlass_smooth", smooth_k=True)
    model, given = tiny.built(tiny.flux)
    found = fp8.enable(model, name="fp8cutlass_smooth", smooth_k=True)
    assert len(found.dispatched) == 2


def operands(heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(randn(2, n, h, 64, seed=n) for n, h in ((40, heads), (24, kv_heads), (24, kv_heads)))


def dispatched(*tensors: torch.Tensor, **given: Any) -> tuple[Any, Any, Counts]:
    """The result of the backend, of diffusers' own, and what was counted."""
    with stats.collect() as seen:
        out = dispatch.dispatch_attention_fn(*tensors, backend=fp8.register(), **given)
    native = {name: value for name, value in given.items() if name != "attention_kwargs"}
    want = dispatch.dispatch_attention_fn(*tensors, backend=dispatch.AttentionBackendName.NATIVE, **native)
    return out, want, counts(seen)


@pytest.mark.parametrize(
    "given", [{}, {"is_causal": True}, {"scale": 0.05}, {"enable_gqa": True}, {"attention_kwargs": {"unknown": None}}]
)
def test_calls_of_the_dispatcher_are_served(given: dict[str, Any]) -> None:
    out, want, counted = dispatched(*operands(kv_heads=2 if "enable_gqa" in given else 4), **given)
    assert counted == {("", ""): 1} and 0 < relative_l2(out, want.double()) < 0.06


HOLES = torch.ones(2, 24, dtype=torch.bool)
HOLES[:, 7] = False


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attn_mask": HOLES}, "mask"),
        ({"attn_mask": torch.zeros(2, 4, 1, 24, dtype=torch.bfloat16).masked_fill(~HOLES[:, None, None], -10000.0)},
         "mask"),
        ({"attention_kwargs": {"temperature": 2.0}}, "keyword"),
    ],
)  # fmt: skip
def test_other_calls_are_those_of_diffusers(given: dict[str, Any], why: str) -> None:
    out, want, counted = dispatched(*operands(), **given)
    assert torch.equal(out, want) and counted == {("", why): 1}


def test_a_boolean_mask_is_served() -> None:
    out, want, counted = dispatched(*operands(), attn_mask=HOLES[:, None, None])
    assert counted == {("", ""): 1} and 0 < relative_l2(out, want.double()) < 0.06
    assert relative_l2(dispatched(*operands())[1], want.double()) > 0.1


def test_float32_dropout_and_gradients_are_those_of_diffusers() -> None:
    out, want, counted = dispatched(*(x.float() for x in operands()))
    assert torch.equal(out, want) and counted == {("", "dtype"): 1}
    assert dispatched(*operands(), dropout_p=0.5)[2] == {("", "dropout"): 1}
    q, k, v = operands()
    out, want, counted = dispatched(q.requires_grad_(), k, v)
    assert torch.equal(out, want) and out.requires_grad and counted == {("", "grad"): 1}


def test_the_lse_has_tokens_before_heads() -> None:
    q, k, v = operands()
    out, lse = dispatch.dispatch_attention_fn(q, k, v, backend=fp8.register(), attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) / 8
    assert out.shape == q.shape and float((lse - scores.logsumexp(-1)).abs().max()) < 0.3


class Looks(TorchDispatchMode):
    """Counts how often somebody asks whether all of a mask is True."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.all.default
        return func(*args, **(kwargs or {}))


def test_masks_that_hide_nothing_are_looked_at_once_and_again_when_changed() -> None:
    mask = torch.ones(3, 1, 1, 11, dtype=torch.bool)
    with Looks() as looks:
        assert [masks.visible_mask(mask) for _ in range(3)] == [None] * 3 and looks.count == 1
        mask[0, 0, 0, 3] = False
        assert masks.visible_mask(mask) is mask and looks.count == 2
    other = torch.ones(3, 1, 1, 11, dtype=torch.bool)
    assert masks.visible_mask(other) is None and masks.visible_mask(mask) is mask
    added = torch.zeros(3, 1, 1, 11)
    assert masks.visible_mask(added) is None and masks.visible_mask(None) is None
    added[0, 0, 0, 0] = 0.5
    assert masks.visible_mask(added) is added
    with torch.inference_mode():  # counts no versions
        made = torch.ones(1, 5, dtype=torch.bool)
        assert masks.visible_mask(made) is None
        made[0, 1] = False
        assert masks.visible_mask(made) is made


def test_a_watched_module_stays_what_it_is() -> None:
    """A copy has its own weights; a forward that something else put on the module is inside, too."""
    model, given = tiny.built(tiny.sd3)
    kinds = [type(module) for module in model.modules()]
    inner = model.transformer_blocks[1].attn
    inner.forward = partial(lambda old, *args, **kwargs: old(*args, **kwargs), inner.forward)
    fp8.enable(model)
    fp8.enable(model)
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), kinds, strict=True))
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in kinds]
    with stats.collect() as seen:
        out = tiny.run(model, given)
    assert counts(seen) == {("JointAttnProcessor2_0", ""): 2}
    del inner.forward
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.nn.init.zeros_(model.proj_out.weight)
    for other in others:
        with stats.collect() as seen:
            assert torch.equal(tiny.run(other, given), out)
        assert counts(seen) == {("JointAttnProcessor2_0", ""): 2}
    fp8.disable(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("make", [tiny.flux, tiny.sd3], ids=lambda make: make.__name__)
def test_compile_keeps_one_graph(make: Callable[[], Any]) -> None:
    model, given = tiny.built(make)
    fp8.enable(model)
    eager = tiny.run(model, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with no_default(), stats.collect() as seen:
        out = tiny.run(compiled, given)
    assert sum(counts(seen).values()) == 2 and {why for _, why in counts(seen)} == {""}
    assert relative_l2(out, eager.double()) < 0.01


def test_names_are_read_from_code() -> None:
    """A module without attention is none, and one that multiplies by itself is not reached."""
    assert reach.way_of(torch.nn.Linear(2, 2)) is None
    attention = processors.Attention(32, heads=2, dim_head=16)
    assert reach.way_of(attention) == reach.WATCHED
    attention.set_processor(processors.AttnProcessor())
    assert "AttnProcessor computes attention itself" == reach.way_of(attention)
    adapter = processors.IPAdapterAttnProcessor2_0(32, 16)  # a module with a call of its own
    attention.set_processor(adapter)
    assert reach.way_of(attention) == reach.WATCHED


@GLOO
def test_context_parallel_over_two_processes(tmp_path: Path) -> None:
    """One call each: keys travel packed. diffusers' own way serves no float32 in a ring."""
    torch.multiprocessing.spawn(context_parallel.worker, (str(tmp_path),), nprocs=context_parallel.WORLD)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(context_parallel.WORLD)]
    q, k, v = (x.transpose(1, 2).double() for x in context_parallel.operands())
    want = F.scaled_dot_product_attention(q, k, v, scale=0.1).transpose(1, 2)
    for way, calls in (("ring", 1), ("ulysses", 1)):
        parts = [rank[way] for rank in found]
        assert relative_l2(torch.cat([part["out"] for part in parts], 1), want) < 0.06
        assert [part["served"] for part in parts] == [(calls, 0)] * 2
        assert [part["reasons"] for part in parts] == [["dtype"]] * 2
        assert all("unknown" in part["unknown"] for part in parts)
        assert [part["wide"] == "ran" for part in parts] == [way == "ulysses"] * 2


@GLOO
@pytest.mark.parametrize("ranks", context_parallel.DEGREES)
def test_models_over_several_processes(ranks: int, tmp_path: Path) -> None:
    """Wan and Flux with random weights give what they give in one process."""
    torch.multiprocessing.spawn(context_parallel.models, (ranks, str(tmp_path)), nprocs=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for name, make in context_parallel.MODELS.items():
        model, given = tiny.built(make)
        fp8.enable(model)
        with stats.collect() as seen:
            want = tiny.run(model, given)
        for way in context_parallel.DEGREES[ranks]:
            for out, served, other in (rank[f"{name} {way}"] for rank in found):
                assert (served, other) == (seen.result().served.calls, 0)
                assert relative_l2(out, want.double()) < 0.005, (name, way)


def test_how_a_ring_exchanges_keys() -> None:
    assert fp8.register("fp8cutlass_ring", context_parallel="ring") is fp8.register("fp8cutlass_ring")
    with pytest.raises(ValueError, match="another name"):
        fp8.register("fp8cutlass_ring", context_parallel="gather")
    with pytest.raises(ValueError, match="context_parallel must be one of gather, ring"):
        fp8.register("fp8cutlass_other", context_parallel="alltoall")


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "mask dropped": (
        backend, "visible_mask", lambda mask: None,
        lambda: test_other_calls_are_those_of_diffusers({"attn_mask": HOLES}, "mask"),
    ),
    "mask of a watched model dropped": (
        reach, "visible_mask", lambda mask: None, lambda: test_models("pixart"),
    ),
    "causal lost": (
        backend, "attend", lambda *args, **kwargs: ATTEND(*args, **{**kwargs, "is_causal": False}),
        lambda: test_calls_of_the_dispatcher_are_served({"is_causal": True}),
    ),
    "scale lost": (
        backend, "attend", lambda *args, **kwargs: ATTEND(*args, **{**kwargs, "scale": None}),
        lambda: test_calls_of_the_dispatcher_are_served({"scale": 0.05}),
    ),
    "layout mistaken": (
        backend, "attend", lambda *args, **kwargs: ATTEND(*args, **{**kwargs, "layout": "bhsd"}),
        lambda: test_models("flux"),
    ),
    "nothing watched": (reach, "_Mode", lambda *args: torch.no_grad(), lambda: test_models("sd3")),
}  # fmt: skip
ATTEND = backend.attend


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, fault, noticing = MUTANTS[name]
    noticing()
    if module is backend and attribute == "attend":
        fp8.register()
    monkeypatch.setattr(module, attribute, fault)
    with pytest.raises((AssertionError, UnsupportedError)):
        noticing()
