"""The attention functions for transformers, in small models: what they compute, how much of it in FP8, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from where import CPU, DEVICE, moved

from fp8cutlass import stats
from fp8cutlass.stats import Served

transformers = pytest.importorskip("transformers")
ft = pytest.importorskip("fp8cutlass.integrations.transformers")

from fp8cutlass.integrations.transformers import route  # noqa: E402

BOUND = 0.06  # relative L2 of logits or hidden states; a wrong mask gives 0.2 and more (test_transformers_mutants.py)
FULL, FLASH = ft.register()
Function = Callable[[Any], torch.Tensor]
PADDED = ("chunked_left", "static_left")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    """Without the warnings about names that have changed."""
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def run(model: Any, implementation: str, way: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, Served]:
    model.set_attn_implementation(implementation)
    with torch.no_grad(), stats.collect() as seen:
        found = way(model)
    return found, seen.result()


def reasons(served: Served) -> set[str]:
    return {key.what for key in served.counts if key.kind == "fallback"}


KNOWN: dict[str, torch.Tensor] = {}  # results of the reference


def compare(
    model: Any,
    name: str,
    way: Callable[[Any], torch.Tensor],
    reference: str,
    calls: int,
    why: set[str],
    label: str = "",
) -> float:
    """Assert what is served and that the result is that of the reference, kept by its label; return the error."""
    want = KNOWN.get(label)
    if want is None:
        want, nothing = run(model, reference, way)
        assert not nothing.counts
        if label:
            KNOWN[label] = want
    got, served = run(model, name, way)
    error = tiny.relative(got, want)
    assert (served.served.calls, served.fallback.calls) == ((0, calls) if why else (calls, 0)), str(served)
    assert reasons(served) == why
    assert error < BOUND and (error == 0) == bool(why), error
    return error


def causal_cases() -> list[Any]:
    cases = []
    for model in tiny.CAUSAL:
        for way in tiny.WAYS:
            for name in (FULL, FLASH):
                if name == FLASH and model in ("gpt_oss", "mistral_64"):
                    continue  # gpt-oss lists the packages that it takes; the other one is like llama
                if way in PADDED and model not in ("llama", "mistral_8", "gemma2", "gpt_oss"):
                    continue
                cases.append(pytest.param(model, way, name, id=f"{model}-{way}-{name}"))
    return cases


MODELS: dict[str, Any] = {}


def made(case: str, build: Callable[[], Any]) -> Any:
    """One model for all its tests, as none of them changes it."""
    if case not in MODELS:
        MODELS[case] = tiny.make(build)
    return MODELS[case]


@pytest.mark.parametrize(("model", "way", "name"), causal_cases())
def test_decoders(model: str, way: str, name: str) -> None:
    """All layers of all forward passes are served, whatever the mask, with softcap and with sinks."""
    calls = 4 if way.startswith(("chunked", "static", "decode")) else 2
    reference = "eager" if model in tiny.BY_EAGER else "sdpa"
    compare(made(model, tiny.CAUSAL[model]), name, tiny.WAYS[way], reference, calls, set(), f"{model} {way}")


CALLS = {"bert_decoder": 4, "whisper": 6, "t5": 6, "modernbert": 3, "modernbert_padded": 3}


@pytest.mark.parametrize("name", [FULL, FLASH])
@pytest.mark.parametrize("case", tiny.OTHERS)
def test_other_models(case: str, name: str) -> None:
    """Encoders, cross-attention, vision. In the way of FlashAttention images of unlike size are one call."""
    build, way = tiny.OTHERS[case]
    calls = CALLS.get(case, 2)
    if case == "qwen2_vision" and name == FULL:
        calls *= 2
    compare(made(case, build), name, way, "sdpa", calls, set(), case)


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny.make(tiny.CAUSAL["llama"], dtype)


def behind(model: Any, ids: torch.Tensor, first: int) -> float:
    """How far the logits of ``ids`` (batch, tokens) from ``first`` on are behind the best ones of sdpa for the same
    tokens, at most, in units of their root mean square. Equal tokens are too much to ask: bf16 has ties."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(ids).logits[:, first - 1 : -1].float()
    chosen = logits.gather(2, ids[:, first:, None])[..., 0]
    return float((logits.amax(2) - chosen).max() / logits.square().mean().sqrt())


def following(ids: torch.Tensor, first: int) -> torch.Tensor:
    """The next token of the vocabulary in the place of each from ``first`` on."""
    return torch.cat((ids[:, :first], (ids[:, first:] + 1) % tiny.VOCABULARY), 1)


@pytest.mark.parametrize("name", [FULL, FLASH])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(name: str, cache: str | None) -> None:
    """Each token is a best one by sdpa, within the bound of two logits; all calls are served."""

    def generate(model: Any) -> torch.Tensor:
        ids = tiny.tokens()
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    model = llama()
    got, served = run(model, name, generate)
    assert torch.equal(got[:, : tiny.TOKENS], tiny.tokens()) and got.shape[1] == tiny.TOKENS + 4
    assert behind(model, got, tiny.TOKENS) < 2 * BOUND < behind(model, following(got, tiny.TOKENS), tiny.TOKENS)
    assert (served.served.calls, served.fallback.calls) == (8, 0)


def test_autocast_is_seen() -> None:
    """Rotary embeddings hand over float32 queries and keys. Inside, nothing is cast: the emulator is float32."""
    model = llama(torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        compare(model, FULL, tiny.WAYS["prefill"], "sdpa", 2, set())
    compare(model, FULL, tiny.WAYS["prefill"], "sdpa", 2, {"dtype"})
    draw = torch.Generator().manual_seed(0)
    q, k, v = (moved(torch.randn(1, 4, tiny.TOKENS, 32, generator=draw, device=CPU).bfloat16()) for _ in range(3))
    module = model.model.layers[0].self_attn
    found = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
            found.append(route.full(module, q, k, v, None)[0])
    assert torch.equal(*found)


def test_gradients_run_as_before() -> None:
    model = llama()
    model.set_attn_implementation(FULL)
    with stats.collect() as seen:
        model(tiny.tokens()).logits.float().pow(2).mean().backward()
    assert reasons(seen.result()) == {"grad"} and seen.result().served.calls == 0
    assert float(model.model.layers[0].self_attn.q_proj.weight.grad.norm()) > 0


def test_dropout_falls_back() -> None:
    model = tiny.make(lambda: tiny._causal("LlamaConfig", attention_dropout=0.5)).train()
    _, served = run(model, FULL, tiny.WAYS["prefill"])
    assert reasons(served) == {"dropout"} and served.served.calls == 0


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_mask_of_the_users_own_falls_back(kind: str) -> None:
    """Though it is causal: nobody says so."""
    seen = torch.ones(tiny.TOKENS, tiny.TOKENS, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, -1e9)
    compare(llama(), FULL, lambda m: m(tiny.tokens(), attention_mask=mask).logits, "sdpa", 2, {"mask"})


@pytest.mark.parametrize("name", [FULL, FLASH])
def test_holes_in_the_padding_fall_back(name: str) -> None:
    mask = tiny.padding(True)
    mask[1, 20:23] = 0
    way = lambda m: m(tiny.tokens(), attention_mask=mask).logits[mask.bool()]  # noqa: E731
    want, _ = run(model := llama(), "sdpa", way)
    got, served = run(model, name, way)
    assert reasons(served) == {"mask"} and served.served.calls == 0
    assert tiny.relative(got, want) < 0.01


def test_a_sequence_that_is_all_padding() -> None:
    mask = torch.ones(2, tiny.TOKENS, dtype=torch.long)
    mask[0] = 0
    compare(llama(), FULL, lambda m: m(tiny.tokens(), attention_mask=mask).logits[1], "sdpa", 2, set())


def test_images_of_unlike_size_need_one_call_a_layer_or_one_an_image() -> None:
    build, way = tiny.OTHERS["qwen2_vision"]
    model = tiny.make(build)
    assert [run(model, name, way)[1].served.calls for name in (FULL, FLASH)] == [4, 2]


def test_lengths_of_sequences_as_a_keyword() -> None:
    """As examples/minilm.py gives them: one row, several sentences."""
    ends = torch.tensor([0, 9, 29, 40], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    build, _ = tiny.OTHERS["bert"]
    model = tiny.make(build)
    ids, places = tiny.tokens(1), tiny.PLACES
    parts = zip(ids.split((9, 20, 11), 1), places.split((9, 20, 11), 1), strict=True)
    with torch.no_grad():
        alone = [model(part, position_ids=place).last_hidden_state for part, place in parts]
    got, served = run(model, FULL, lambda m: m(ids, position_ids=places, **lengths).last_hidden_state)
    assert tiny.relative(got, torch.cat(alone, 1)) < BOUND and served.served.calls == 2
    with torch.enable_grad():  # not served, and still sequence by sequence
        model.set_attn_implementation(FULL)
        slow = model(ids, position_ids=places, **lengths).last_hidden_state
    assert tiny.relative(slow.detach(), torch.cat(alone, 1)) < 0.01


def test_packed_keys_of_cross_attention() -> None:
    """Packed once, then read by every step; beam search and other changes of rows pack again."""

    def steps(model: Any) -> torch.Tensor:
        own = transformers.DynamicCache(config=model.config)
        cache = transformers.EncoderDecoderCache(own, ft.PackedCrossAttentionCache())
        more = tiny.cached(model, cache)
        ids = tiny.tokens()
        first = model(tiny.mel(), decoder_input_ids=ids[:, :5], **more)
        heard = (first.encoder_last_hidden_state,)
        second = model(encoder_outputs=heard, decoder_input_ids=ids[:, 5:6], **more)
        cache.reorder_cache(torch.tensor([1, 1]))
        third = model(encoder_outputs=heard, decoder_input_ids=ids[:, 6:7], **more)
        cache.cross_attention_cache.layers[0].keys.mul_(0)  # what was packed is no longer what is there
        fourth = model(encoder_outputs=heard, decoder_input_ids=ids[:, 7:8], **more)
        return torch.cat([x.logits for x in (first, second, third, fourth)], 1)

    from fp8cutlass.integrations.transformers import serve

    packed, original = [], serve._on_packed
    model = tiny.make(tiny.whisper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_on_packed", lambda *given: packed.append(given[1]) or original(*given))
        compare(model, FULL, steps, "sdpa", 6 + 4 + 4 + 4, set())
    assert len(packed) == 2 * 4 - 1 and len({id(x) for x in packed}) == 4


def test_continuous_batching() -> None:
    """Requests of unlike length share calls: with a flash name transformers has it so. A replay of a CUDA graph would
    not be counted."""
    settings = transformers.ContinuousBatchingConfig(use_cuda_graph=False, max_memory_percent=0.1)
    options = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    asked = [row.tolist()[:length] for row, length in zip(tiny.tokens(), (40, 17), strict=True)]

    def serve(model: Any) -> list[list[int]]:
        given = {"generation_config": options, "continuous_batching_config": settings}
        found = model.generate_batch(asked, progress_bar=False, **given)
        return [found[name].generated_tokens for name in sorted(found)]

    model = llama()
    model.set_attn_implementation(FLASH)
    with torch.no_grad(), stats.collect() as seen:
        found = serve(model)
    for request, added in zip(asked, found, strict=True):
        ids = torch.tensor([request + added])
        assert len(added) == 3 and behind(model, ids, len(request)) < 2 * BOUND
        assert behind(model, following(ids, len(request)), len(request)) > 2 * BOUND
    assert seen.result().fallback.calls == 0 and seen.result().served.calls == 2 * 3
