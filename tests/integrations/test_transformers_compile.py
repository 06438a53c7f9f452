"""The attention functions for transformers in models that torch.compile traces as one graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import torch._dynamo.testing

from fp8cutlass import stats

pytest.importorskip("transformers")
ft = pytest.importorskip("fp8cutlass.integrations.transformers")
FULL, FLASH = ft.register()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ONES = torch.ones(2, tiny.TOKENS, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "name", "more", "served"),
    [
        ("llama", FULL, {"use_cache": True}, 2),
        ("mistral_8", FULL, {"use_cache": True}, 2),
        ("mistral_8", FLASH, {"use_cache": True}, 2),
        ("llama", FULL, {"use_cache": True, "attention_mask": ONES}, 0),  # it may hold padding
        ("llama", FLASH, {"use_cache": True, "attention_mask": ONES}, 0),
        ("mistral_8", FULL, {"use_cache": False}, 0),  # without a cache positions may start again
    ],
)
def test_one_graph(model: str, name: str, more: dict[str, Any], served: int) -> None:
    """Compiled once, counted at each run, equal to eager torch; what cannot be known while tracing falls back."""
    made = tiny.make(tiny.CAUSAL[model])
    made.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = made(tiny.tokens(), **more).logits
    made.set_attn_implementation(name)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda ids: made(ids, **more).logits, backend=counter, fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), stats.collect() as seen:
            got = compiled(tiny.tokens())
        assert (seen.result().served.calls, seen.result().fallback.calls) == (served, 2 - served)
    assert counter.frame_count == 1
    error = tiny.relative(got, want)
    assert (0 < error < 0.06) if served else error == 0
    assert {key.what for key in seen.result().counts} == ({""} if served else {"mask"})


def test_a_layer_compiled_alone_sees_the_note_on_its_mask() -> None:
    """The mask is made outside, by eager code."""
    made = tiny.make(tiny.CAUSAL["mistral_8"])
    made.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = made(tiny.tokens()).logits
    made.set_attn_implementation(FULL)
    for layer in made.model.layers:
        layer.compile(backend="aot_eager")
    with torch.no_grad(), stats.collect() as seen:
        got = made(tiny.tokens()).logits
    assert (seen.result().served.calls, seen.result().fallback.calls) == (2, 0)
    assert tiny.relative(got, want) < 0.06


def test_a_missing_kernel_is_found_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As windows on Ada: the graph holds what torch does instead."""
    from fp8cutlass.errors import NoKernelError
    from fp8cutlass.integrations.transformers import serve

    def attention(*given: Any, **more: Any) -> Any:
        raise NoKernelError("no kernel for this card", "another reason")

    made = tiny.make(tiny.CAUSAL["mistral_8"])
    made.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = made(tiny.tokens()).logits
    monkeypatch.setattr(serve, "attention", attention)
    made.set_attn_implementation(FULL)
    compiled = torch.compile(lambda ids: made(ids).logits, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), stats.collect() as seen:
        assert torch.equal(compiled(tiny.tokens()), want)
    assert {key.what for key in seen.result().counts} == {"window"} and seen.result().fallback.calls == 2


@pytest.mark.parametrize("name", ["sdpa", FULL])
def test_a_compiled_step_on_a_static_cache(name: str) -> None:
    """How far the cache is filled, only its numbers tell: the step falls back, and is that of sdpa."""
    made = tiny.make(tiny.CAUSAL["llama"])
    made.set_attn_implementation("sdpa")
    ids = tiny.tokens()
    with torch.no_grad():
        want = made(ids).logits[:, -1]
        cache = tiny.static(made)
        made(ids[:, :-1], **tiny.cached(made, cache))
        made.set_attn_implementation(name)
        step = torch.compile(
            lambda last: made(last, **tiny.cached(made, cache)).logits, backend="aot_eager", fullgraph=True
        )
        with stats.collect() as seen:
            got = step(ids[:, -1:])[:, -1]
    assert tiny.relative(got, want) < 0.02
    assert {key.what: count.calls for key, count in seen.result().counts.items()} == (
        {} if name == "sdpa" else {"mask": 2}
    )
