"""Generation from pages of FP8, in small models: the logits of ``sdpa``, what is counted, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from where import CPU, DEVICE, moved

from fp8cutlass import stats
from fp8cutlass.errors import NoKernelError, UnsupportedError
from fp8cutlass.stats import Served

transformers = pytest.importorskip("transformers")
ft = pytest.importorskip("fp8cutlass.integrations.transformers")

from fp8cutlass.integrations.transformers import paged as attention_of_pages  # noqa: E402
from fp8cutlass.integrations.transformers import pool, route  # noqa: E402

BOUND = 0.06  # relative L2 of logits, as in test_transformers.py
PAGE = 16  # tokens: the 40 of a sequence are in three pages
FULL, FLASH = ft.register()
MODELS: dict[str, Any] = {}
Way = Callable[[Any, Callable[[Any], Any]], torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def wide(name: str) -> Callable[[], Any]:
    """With a head_dim that the kernels of pages have."""
    return tiny.CAUSAL[name] if name == "deepseek" else partial(tiny.CAUSAL[name], head_dim=64)


def made(name: str) -> Any:
    if name not in MODELS:
        MODELS[name] = tiny.make(wide(name))
    return MODELS[name]


def pages(model: Any, **more: Any) -> Any:
    return ft.PagedCache(model.config, page_size=PAGE, **more)


def in_parts(*ends: int, mask: torch.Tensor | None = None) -> Way:
    """Logits of tokens that come in several calls, each up to one of ``ends``; those of padding left out."""

    def way(model: Any, cache: Callable[[Any], Any]) -> torch.Tensor:
        held, found, begin, ids = cache(model), [], 0, tiny.tokens()
        for end in ends:
            more = {} if mask is None else {"attention_mask": mask[:, :end]}
            found.append(model(ids[:, begin:end], **tiny.cached(model, held), **more).logits)
            begin = end
        whole = torch.cat(found, 1)
        return whole if mask is None else whole[mask[:, :begin].bool()]

    return way


HOLE = torch.cat((torch.ones(2, 24, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)), 1)
HOLE[0, 20:24] = 0  # a prompt with padding on the right, to which tokens were added
LONE = torch.ones(2, tiny.TOKENS, dtype=torch.long)
LONE[0, :30] = 0  # nothing of the first sequence is in the first call

WAYS: dict[str, tuple[Way, int]] = {  # and its calls of the model
    "prefill": (in_parts(40), 1),
    "chunked": (in_parts(15, 17, 40), 3),
    "decode": (in_parts(31, 32, 33, 34), 4),
    "left": (in_parts(40, mask=tiny.padding(True)), 1),
    "left_chunked": (in_parts(5, 24, 38, 39, 40, mask=tiny.padding(True)), 5),
    "left_late": (in_parts(24, 32, 33, mask=LONE), 3),
    "right": (in_parts(24, 40, mask=tiny.padding(False)), 2),
}


def run(model: Any, implementation: str, way: Way, cache: Callable[[Any], Any]) -> tuple[torch.Tensor, Served]:
    model.set_attn_implementation(implementation)
    with torch.no_grad(), stats.collect() as seen:
        found = way(model, cache)
    return found, seen.result()


def reference(name: str) -> str:
    return "eager" if name in tiny.BY_EAGER else "sdpa"


def counts(served: Served) -> tuple[int, int]:
    return served.served.calls, served.fallback.calls


def error_of(name: str, way: Way, cache: Callable[[Any], Any] = pages) -> tuple[float, Served]:
    model = made(name)
    want, _ = run(model, reference(name), way, tiny.dynamic)
    got, served = run(model, FULL, way, cache)
    return tiny.relative(got, want), served


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in tiny.CAUSAL if name != "deepseek"])
def test_decoders(name: str, way: str) -> None:
    """All layers of all calls: windows, softcap, sinks, grouped heads, padding and pages that are crossed."""
    function, calls = WAYS[way]
    error, served = error_of(name, function)
    assert counts(served) == (2 * calls, 0), str(served)
    assert 0 < error < BOUND, error


def test_pages_hold_the_keys_without_padding() -> None:
    model, held = made("llama"), []

    def cache(model: Any) -> Any:
        held.append(pages(model))
        return held[0]

    function, _ = WAYS["left_chunked"]
    run(model, FULL, function, cache)
    paged = held[0]
    assert paged.lengths() == paged.lengths(1) == [33, 40] and paged.get_seq_length() == 40
    assert paged.pages.page_size == PAGE and paged.page_table().shape == (2, 3)
    assert len(set(paged.page_table().flatten().tolist())) == 6
    dynamic = tiny.dynamic(model)
    run(model, "sdpa", function, lambda model: dynamic)
    lengths = torch.tensor([33, 40], dtype=torch.int32)
    k, v = paged.pages.dequantise(paged.page_table().to(DEVICE), lengths, layer=0)
    for got, want in ((k, dynamic.layers[0].keys), (v, dynamic.layers[0].values)):
        assert tiny.relative(got[0, :, :33], want[0, :, 7:]) < 0.04
        assert tiny.relative(got[1, :, :40], want[1]) < 0.04


def generated(model: Any, cache: Any, mask: torch.Tensor, **more: Any) -> Any:
    """12 tokens after 27."""
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    keyword = {name: held for name, held in tiny.cached(model, cache).items() if name != "use_cache"}
    ids = tiny.tokens()[:, :27]
    return model.generate(ids, attention_mask=mask[:, :27], eos_token_id=None, **options, **keyword, **more)


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral_8", "gemma3"])
def test_generate(name: str, mask: str, chunk: int | None) -> None:
    """The logits of each step are those of sdpa for the same tokens."""
    model = made(name)
    known = tiny.padding(True) if mask == "left" else torch.ones(2, tiny.TOKENS, dtype=torch.long)
    model.set_attn_implementation(FULL)
    with stats.collect() as seen:
        found = generated(model, pages(model), known, prefill_chunk_size=chunk)
    assert counts(seen.result()) == (2 * (11 + (1 if chunk is None else 3)), 0), str(seen)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        whole = model(found.sequences, attention_mask=known[:, :39]).logits[:, 26:38].float()
    got = torch.stack(found.logits, 1).float()
    for step in range(12):
        assert tiny.relative(got[:, step], whole[:, step]) < BOUND
    first, second = whole.topk(2).values.unbind(-1)
    sure = first - second > 2 * (got - whole).abs().amax(-1)  # of the others the rounding may take either
    assert bool(sure.any())
    assert torch.equal(found.sequences[:, 27:][sure], whole.argmax(-1)[sure])


def test_a_cache_that_grows_gives_the_same_bits() -> None:
    model, ids = made("mistral_8"), tiny.tokens(9)
    found = []
    for number in (None, 27):
        cache = pages(model, num_pages=number)
        way = lambda m, c, held=cache: torch.cat(  # noqa: E731
            [m(part, **tiny.cached(m, held)).logits for part in ids.split((20, 20), 1)], 1
        )
        found.append(run(model, FULL, way, pages)[0])
        assert cache.pages.num_pages == (27 if number else 2 * pool.FIRST_PAGES)
    assert torch.equal(*found)


def test_pages_that_are_out_are_refused_before_anything_is_written() -> None:
    model = made("llama")
    model.set_attn_implementation(FULL)
    cache = pages(model, num_pages=5)
    with torch.no_grad():
        model(tiny.tokens()[:, :32], **tiny.cached(model, cache))
        before = cache.pages.pages.clone()
        with pytest.raises(UnsupportedError, match="5 pages of 16 tokens, and 1 more"):
            model(tiny.tokens()[:, 32:], **tiny.cached(model, cache))
    assert torch.equal(cache.pages.pages, before) and cache.get_seq_length() == 32


class Recorded:
    """Of each step of beam search: the tokens so far of each beam, and what came out for the next one."""

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append((ids.clone(), scores.clone()))
        return scores


def beam_error() -> float:
    """The largest relative error of a step, of log probabilities less their mean."""
    model, seen_steps = made("llama"), Recorded()
    model.set_attn_implementation(FULL)
    with stats.collect() as seen:
        generated(model, pages(model), torch.ones(2, 27, dtype=torch.long), num_beams=3, logits_processor=[seen_steps])
    assert counts(seen.result()) == (24, 0) and len(seen_steps.steps) == 12
    model.set_attn_implementation("sdpa")
    errors = []
    for ids, scores in seen_steps.steps:
        with torch.no_grad():
            want = model(ids).logits[:, -1].float()
        got = scores.view(len(ids), -1).float()
        errors.append(tiny.relative(got - got.mean(1, True), want - want.mean(1, True)))
    return max(errors)


def test_beam_search_copies_pages() -> None:
    assert beam_error() < BOUND


def test_sequences_in_another_order() -> None:
    """Also more of them, and fewer: the pages of each are its own."""
    model, ids = made("mistral_8"), tiny.tokens()
    order = torch.tensor([1, 0])

    def way(change: Callable[[Any], None], rows: list[int]) -> Way:
        def function(model: Any, cache: Callable[[Any], Any]) -> torch.Tensor:
            held = cache(model)
            model(ids[:, :30], **tiny.cached(model, held))
            change(held)
            return torch.cat([model(ids[rows, i : i + 1], **tiny.cached(model, held)).logits for i in range(30, 40)], 1)

        return function

    for change, rows in (
        (lambda held: held.reorder_cache(order), [1, 0]),
        (lambda held: held.reorder_cache(torch.tensor([0, 0])), [0, 1]),
        (lambda held: held.batch_repeat_interleave(2), [0, 1, 1, 0]),
        (lambda held: held.batch_select_indices(torch.tensor([1])), [1]),
        (lambda held: held.crop(-3), [0, 1]),
    ):
        error, served = error_of("llama", way(change, rows))
        assert error < BOUND and counts(served) == (22, 0)
    cache = pages(model)
    model.set_attn_implementation(FULL)
    with torch.no_grad():
        first = model(ids, **tiny.cached(model, cache)).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, **tiny.cached(model, cache)).logits, first)


def user_mask(end: int) -> torch.Tensor:
    return torch.ones(tiny.TOKENS, tiny.TOKENS, dtype=torch.bool).tril()[None, None, end - 10 : end, :end]


def own_masks(model: Any, cache: Callable[[Any], Any]) -> torch.Tensor:
    held = cache(model)
    parts = [
        model(tiny.tokens()[:, end - 10 : end], attention_mask=user_mask(end), **tiny.cached(model, held)).logits
        for end in (10, 20, 30, 40)
    ]
    return torch.cat(parts, 1)


def test_masks_of_other_patterns_run_on_what_the_pages_hold() -> None:
    """With the error of the pages, and counted: a mask of the user's own, and padding between tokens."""
    error, served = error_of("llama", own_masks)
    assert counts(served) == (0, 8) and 0 < error < BOUND
    for name in ("llama", "mistral_8", "gpt_oss"):
        error, served = error_of(name, in_parts(24, 30, 31, 40, mask=HOLE))
        assert counts(served) == (2, 6), str(served)  # the first call has its padding on the right
        assert {key.what for key in served.counts if key.kind == "fallback"} == {"mask"}
        assert 0 < error < BOUND


def test_a_later_mask_may_hide_what_the_pages_hold() -> None:
    def way(model: Any, cache: Callable[[Any], Any]) -> torch.Tensor:
        held, ids = cache(model), tiny.tokens()
        model(ids[:, :39], **tiny.cached(model, held))
        return model(ids[:, 39:], attention_mask=tiny.padding(True), **tiny.cached(model, held)).logits

    error, served = error_of("llama", way)
    assert counts(served) == (2, 2) and 0 < error < BOUND


def test_without_a_kernel_transformers_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> Any:
        raise NoKernelError("none is built")

    monkeypatch.setattr(attention_of_pages, "attention_with_kvcache", none)
    for name in ("mistral_8", "gemma2"):
        error, served = error_of(name, WAYS["left_chunked"][0])
        assert counts(served) == (0, 10) and 0 < error < BOUND
        assert {key.what for key in served.counts} == {"no_kernel"}


@pytest.mark.parametrize("scale", ["static", "pow2"])
def test_values_narrower_than_keys(scale: str) -> None:
    """As the attention function gets them, in fp16, in two calls."""
    model = made("llama")
    model.set_attn_implementation(FULL)
    module = model.model.layers[1].self_attn
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, 64), (2, 64), (2, 16))
    q, k, v = (moved(torch.randn(2, h, 21, d, generator=draw, device=CPU).half()) for h, d in sizes)
    cache = pages(model, v_scale=scale)
    found = []
    for part in (slice(0, 20), slice(20, 21)):
        got = cache.update(k[:, :, part], v[:, :, part], 1)
        with torch.no_grad(), stats.collect() as seen:
            found.append(route.full(module, q[:, :, part], *got, None)[0])
        assert counts(seen.result()) == (1, 0)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    assert tiny.relative(torch.cat(found, 1), want.transpose(1, 2)) < 0.04


def test_float32_runs_on_what_the_pages_hold() -> None:
    """Append takes it; attention has no kernel for such queries, and says so."""
    model = tiny.make(wide("llama"), torch.float32)
    want, _ = run(model, "sdpa", in_parts(39, 40), tiny.dynamic)
    got, served = run(model, FULL, in_parts(39, 40), pages)
    assert {key.what for key in served.counts} == {"dtype"} and 0 < tiny.relative(got, want) < BOUND


def test_autocast_is_seen() -> None:
    model = tiny.make(wide("llama"), torch.float32)
    found = []
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for name, cache in (("sdpa", tiny.dynamic), (FULL, pages)):
            found.append(run(model, name, WAYS["decode"][0], cache))
    (want, _), (got, served) = found
    assert counts(served) == (8, 0) and 0 < tiny.relative(got, want) < BOUND


def test_what_is_refused_by_name() -> None:
    model, ids = tiny.make(wide("llama")), tiny.tokens()

    def call(ids: torch.Tensor, cache: Any, **more: Any) -> None:
        with torch.no_grad():
            model(ids, **tiny.cached(model, cache), **more)

    for name in ("sdpa", "eager", FLASH):
        model.set_attn_implementation(name)
        with pytest.raises(UnsupportedError, match=f"the model has '{name}'"):
            call(ids, pages(model))
    model.set_attn_implementation(FULL)
    with pytest.raises(UnsupportedError, match="no gradients"):
        model(ids, **tiny.cached(model, pages(model)))
    cache = pages(model)
    call(ids, cache, attention_mask=tiny.padding(True))
    with pytest.raises(UnsupportedError, match="an earlier mask called padding"):
        call(ids[:, :1], cache)
    cache = pages(model)
    call(ids, cache)
    with pytest.raises(UnsupportedError, match="2 sequences, and the batch has 1"):
        call(ids[:1], cache)
    with pytest.raises(UnsupportedError, match="2 sequences, and the batch has 3"):
        call(ids[:1].expand(3, -1), cache, attention_mask=LONE[[0, 1, 1]])
    with pytest.raises(UnsupportedError, match="negative"):
        pages(model).crop(3)
    with pytest.raises(UnsupportedError, match="append quantises"):
        model.double()
        call(ids, pages(model))
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        ft.PagedCache(transformers.WhisperConfig())
    with pytest.raises(UnsupportedError, match="linear_attention"):
        ft.PagedCache(transformers.LlamaConfig(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2))
    with pytest.raises(UnsupportedError, match="share keys"):
        ft.PagedCache(transformers.LlamaConfig(num_kv_shared_layers=1))
    model = made("llama")
    model.set_attn_implementation(FULL)
    ends = {f"cu_seq_lens_{what}": torch.tensor([0, 19, 40], dtype=torch.int32) for what in "qk"}
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        call(ids[:1], pages(model), **ends)
    deepseek = made("deepseek")  # makes its keys from what it keeps, after the cache has returned
    with pytest.raises(UnsupportedError, match="did not reach attention"):
        run(deepseek, FULL, in_parts(39, 40), pages)


def test_a_compiled_model_is_refused() -> None:
    """At the latest in its second call; until then all keys are those of the call."""
    model = tiny.make(lambda: tiny._causal("LlamaConfig", num_hidden_layers=1, head_dim=64))
    model.set_attn_implementation(FULL)
    torch.compiler.reset()
    compiled = torch.compile(model.forward, backend="eager")
    cache = pages(model)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"torch\.compile"):
        for ids in tiny.tokens().split((39, 1), 1):
            compiled(ids, **tiny.cached(model, cache))
    torch.compiler.reset()


def shifted_table(step: Any) -> Any:
    return replace(step, table=step.table.roll(1, 1))


def shorter(step: Any) -> Any:
    return replace(step, used=step.used - 1)


def wrong_slots(step: Any) -> Any:
    return replace(step, slots=step.slots.roll(1))


def mixed(step: Any) -> Any:
    return replace(step, table=step.table.flip(0))


@pytest.mark.parametrize("fault", [shifted_table, shorter, wrong_slots, mixed])
def test_a_fault_in_a_step_is_seen(fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = pool.Pool.step
    monkeypatch.setattr(pool.Pool, "step", lambda self, *args: fault(right(self, *args)))
    assert error_of("mistral_8", WAYS["left_chunked"][0])[0] > 2 * BOUND


def test_a_window_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_of_pages._serve

    def wider(stored: Any, step: Any, query: Any, band: Any, *rest: Any) -> Any:
        return right(stored, step, query, replace(band, left=-1), *rest)

    monkeypatch.setattr(attention_of_pages, "_serve", wider)
    assert error_of("mistral_8", WAYS["chunked"][0])[0] > 2 * BOUND


def test_beams_that_keep_their_pages_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.Pool, "take", lambda *args: None)
    assert beam_error() > 2 * BOUND
