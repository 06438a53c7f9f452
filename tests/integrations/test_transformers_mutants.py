"""Attention functions with a fault, each of which the tests of the right ones would notice; and what models pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from where import DEVICE

from fp8cutlass import stats

transformers = pytest.importorskip("transformers")
ft = pytest.importorskip("fp8cutlass.integrations.transformers")

from fp8cutlass.integrations.transformers import band as bands  # noqa: E402
from fp8cutlass.integrations.transformers import masks, route, serve  # noqa: E402

FULL, FLASH = ft.register()
BOUND = 0.06
Function = Callable[..., Any]


def error(build: Function, way: Function, function: Function | None = None, *, masked: bool = True) -> float:
    """The error of an attention function against torch's, in a model and a way to run it."""
    model = tiny.make(build)
    name = FULL
    if function is not None:
        name = "fp8mutant" if masked else "fp8maskless"
        transformers.AttentionInterface.register(name, function)
        if masked:
            transformers.AttentionMaskInterface.register(name, masks.full_mask)
    found = []
    for implementation in ("eager" if build in BY_EAGER else "sdpa", name):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(way(model))
    return tiny.relative(found[1], found[0])


def low_cap() -> Any:
    """gemma2 with logits beyond its cap. A random start leaves them near 0.01, where a cap changes nothing."""
    model = tiny.CAUSAL["gemma2"]()
    for layer in model.model.layers:
        with torch.no_grad():
            layer.self_attn.q_proj.weight.mul_(64.0)
        layer.self_attn.attn_logit_softcapping = 0.25
    return model


LLAMA, MISTRAL, GPT_OSS = (tiny.CAUSAL[name] for name in ("llama", "mistral_8", "gpt_oss"))
BY_EAGER = [*(tiny.CAUSAL[name] for name in tiny.BY_EAGER), low_cap]


def without(*names: str) -> Function:
    """The function that does not see some keywords."""
    return lambda *given, **more: route.full(*given, **{k: v for k, v in more.items() if k not in names})


def never_causal(module: Any, *given: Any, **more: Any) -> Any:
    return route.full(SimpleNamespace(is_causal=False), *given, **more)


def causal_beside_a_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
    return route.full(SimpleNamespace(is_causal=True), query, key, value, None, **{**more, "is_causal": True})


def chunked(model: Any) -> torch.Tensor:
    return tiny.WAYS["chunked"](model)


@pytest.mark.parametrize(
    ("build", "way", "function", "masked", "least"),
    [
        pytest.param(LLAMA, tiny.WAYS["prefill"], never_causal, True, 0.5, id="never causal"),
        pytest.param(tiny.OTHERS["clip_text"][0], tiny.OTHERS["clip_text"][1], without("is_causal"), True, 0.1,
                     id="the keyword is_causal is not seen"),
        pytest.param(GPT_OSS, tiny.WAYS["prefill"], without("s_aux"), True, 0.1, id="sinks are not seen"),
        pytest.param(low_cap, tiny.WAYS["prefill"], without("softcap"), True, 0.1, id="softcap is not seen"),
        pytest.param(tiny.CAUSAL["gemma3"], tiny.WAYS["prefill"], without("scaling"), True, 0.1,
                     id="scaling is not seen"),
        pytest.param(LLAMA, tiny.WAYS["left"], route.full, False, 0.1, id="no mask function"),
        pytest.param(LLAMA, chunked, causal_beside_a_mask, True, 0.1, id="causal beside a mask"),
    ],
)  # fmt: skip
def test_faulty_functions(build: Function, way: Function, function: Function, masked: bool, least: float) -> None:
    """The right function is within the bound, the faulty one far beyond."""
    assert error(build, way) < BOUND
    found = error(build, way, function, masked=masked)
    assert found > least, found


def ends_of_an_empty_cache(band: bands.Band, rows: int, keys: int) -> Any:
    """Rows aligned with the last key, though the cache is not written that far."""
    return replace(band, shift=keys - rows), 0, keys


def no_padding(band: bands.Band, *given: Any) -> bands.Band:
    return band


def wider(original: Function) -> Function:
    """Windows of one more key."""

    def recognise(function: Any) -> Any:
        found = original(function)
        if found is None or found[0].left < 0:
            return found
        return replace(found[0], left=found[0].left + 1), found[1]

    return recognise


def no_window(original: Function) -> Function:
    def recognise(function: Any) -> Any:
        found = original(function)
        return found if found is None else (replace(found[0], left=-1), found[1])

    return recognise


def one_sequence(band: bands.Band, index: torch.Tensor) -> bands.Band:
    return band


@pytest.mark.parametrize(
    ("build", "way", "module", "name", "fault"),
    [
        pytest.param(LLAMA, "static", serve, "cut", ends_of_an_empty_cache, id="the end of an empty cache"),
        pytest.param(LLAMA, "left", masks, "padded", no_padding, id="padding is not seen"),
        pytest.param(MISTRAL, "prefill", masks, "recognise", wider(masks.recognise), id="a window of one key more"),
        pytest.param(MISTRAL, "prefill", masks, "recognise", no_window(masks.recognise), id="no window"),
        pytest.param(LLAMA, "packed", masks, "of_sequences", one_sequence, id="sequences see one another"),
        pytest.param(LLAMA, "chunked", masks, "tagged_shift", None, id="chunks aligned with the first key"),
    ],
)
def test_faulty_bands(
    build: Function, way: str, module: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is noticed as an error beyond the bound."""
    if name == "tagged_shift":
        original = route.tagged

        def fault(mask: torch.Tensor) -> Any:
            found = original(mask)
            return None if found is None else replace(found, shift=0)

        module, name = route, "tagged"
    monkeypatch.setattr(module, name, fault)
    assert error(build, tiny.WAYS[way]) > BOUND


def test_a_note_that_outlives_a_change_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that edits its mask in place is served by the edited mask."""
    original = masks.full_mask

    def edited(**given: Any) -> Any:
        mask = original(**{**given, "allow_is_causal_skip": False})
        mask[..., 1:7] = False
        mask[..., 0] = True
        return mask

    transformers.AttentionMaskInterface.register("fp8edited", edited)
    transformers.AttentionInterface.register("fp8edited", route.full)
    model = tiny.make(LLAMA)
    model.set_attn_implementation("fp8edited")
    found = []
    for version in (lambda tensor: 0, bands.version_of):
        monkeypatch.setattr(bands, "version_of", version)
        with torch.no_grad(), stats.collect() as seen:
            found.append(model(tiny.tokens(1)).logits)
        found.append(seen.result().fallback.calls)
    assert (found[1], found[3]) == (0, 2) and tiny.relative(found[0], found[2]) > BOUND


# What a model passes beside q, k, v and the mask, None left out, that changes results. Recorded with transformers 5.24.
PASSED: dict[str, set[str]] = {
    "llama": {"scaling"},
    "mistral_8": {"scaling", "sliding_window"},
    "gemma2": {"scaling", "sliding_window", "softcap"},
    "gemma3": {"scaling", "sliding_window"},
    "gpt_oss": {"scaling", "sliding_window", "s_aux"},
    "deepseek": {"scaling"},
    "bert": {"scaling"},
    "vit": {"scaling"},
    "clip_text": {"scaling", "is_causal"},
    "clip_vision": {"scaling"},
    "whisper": {"scaling"},
    "t5": {"scaling", "position_bias"},
    "modernbert": {"scaling", "sliding_window"},
    "qwen2_vision": {"scaling", "is_causal"},
}


@pytest.mark.parametrize("case", PASSED)
def test_what_models_pass(case: str) -> None:
    """A keyword that is new falls back when models run. Here it is noticed when transformers is updated."""
    build, way = tiny.OTHERS[case] if case in tiny.OTHERS else (tiny.CAUSAL[case], tiny.WAYS["prefill"])
    passed: set[str] = set()

    def record(*given: Any, **more: Any) -> Any:
        passed.update(name for name, value in more.items() if value is not None)
        return route.full(*given, **more)

    transformers.AttentionInterface.register("fp8record", record)
    transformers.AttentionMaskInterface.register("fp8record", masks.full_mask)
    model = tiny.make(build)
    model.set_attn_implementation("fp8record")
    with torch.no_grad(), stats.collect() as seen:
        way(model)
    assert not {key for key in seen.result().counts if key.what == "keyword"}
    harmless = serve.HARMLESS | serve.HARMLESS_IF_FALSE | {"dropout"}
    assert passed - harmless == PASSED[case]


def test_a_new_keyword_is_not_served() -> None:
    model = tiny.make(LLAMA)
    model.set_attn_implementation(FULL)
    with torch.no_grad(), stats.collect() as seen:
        model(tiny.tokens(), a_new_one=torch.ones(1))
    assert {(key.kind, key.what) for key in seen.result().counts} == {("fallback", "keyword")}


def test_masks_are_what_they_are_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no mask gets a note, and masks fall back."""
    from transformers import masking_utils

    assert masks.KNOWN and masks._known()
    other = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *given, **more: ~other(*given, **more))
    assert not masks._known()
    monkeypatch.undo()
    monkeypatch.setattr(masks, "KNOWN", False)
    model = tiny.make(MISTRAL)
    model.set_attn_implementation(FULL)
    with torch.no_grad(), stats.collect() as seen:
        tiny.WAYS["prefill"](model)
    assert {key.what for key in seen.result().counts} == {"mask"}


@pytest.mark.parametrize("function", ["chunked", "custom"])
def test_patterns_that_are_no_band(function: str) -> None:
    """Both ways give them the whole mask."""
    from transformers import masking_utils

    made = {
        "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        "custom": lambda batch, head, q, k: (k <= q) | (k < 3),
    }[function]
    assert masks.recognise(made) is None
    given = {"mask_function": made, "allow_is_causal_skip": False, "device": DEVICE}
    want = masking_utils.sdpa_mask(1, 9, 9, **given)
    for mask in (masks.full_mask, masks.flash_mask):
        found = mask(batch_size=1, q_length=9, kv_length=9, **given)
        assert torch.equal(found, want) and bands.tagged(found) is None


def test_names() -> None:
    """transformers reads a meaning from some; other names with "flash" are still refused."""
    for wrong in ("", "my_flash", "sdpa_fp8", "flex", "a/b", "a:b", "paged|a"):
        with pytest.raises(ValueError, match="another meaning"):
            ft.register(wrong)
    assert ft.register("fp8mine") == ("fp8mine", "fp8mine_flash")
    model = tiny.make(LLAMA)
    for name in ("fp8mine", "fp8mine_flash"):
        model.set_attn_implementation(name)
    for name in (FULL, FLASH):  # also from the start
        config = transformers.LlamaConfig(**tiny.DECODER)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        assert made.config._attn_implementation == name
    transformers.AttentionInterface.register("their_flash", lambda *given, **more: None)
    with pytest.raises(ValueError, match="Could not find"):
        model.set_attn_implementation("their_flash")


def test_a_paged_cache_falls_to_whoever_can_read_it() -> None:
    q = torch.randn(1, 4, 3, 32).bfloat16()
    with stats.collect() as seen, pytest.raises(Exception):  # noqa: B017 - transformers' own error, whatever it is
        route.flash(SimpleNamespace(is_causal=True), q, q, q, None, block_table=torch.zeros(1, 1), softcap=1.0)
    assert {key.what for key in seen.result().counts} == {"paged"}
