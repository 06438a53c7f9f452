"""A model whose layers accelerate has wrapped: hooks that move tensors, and mixed precision.

Regressions these catch: a hook that hides a layer from the attention function; float32 weights under accelerate's
autocast that are not served.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from where import DEVICE, ON_CARD

from fp8cutlass import stats

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
ft = pytest.importorskip("fp8cutlass.integrations.transformers")

FULL, _ = ft.register()


def compared(model: Any, run: Any) -> tuple[float, int, int]:
    """The relative error against sdpa, and calls that were served and not."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = run()
        model.set_attn_implementation(FULL)
        with stats.collect() as seen:
            got = run()
    result = seen.result()
    return tiny.relative(got, want), result.served.calls, result.fallback.calls


def test_layers_with_hooks_are_served() -> None:
    model = tiny.make(tiny.CAUSAL["llama"])
    plain = tiny.WAYS["prefill"](model).detach()
    accelerate.cpu_offload(model, execution_device=DEVICE)
    assert all(hasattr(layer.self_attn.q_proj, "_hf_hook") for layer in model.model.layers)
    error, served, left = compared(model, lambda: tiny.WAYS["prefill"](model))
    assert 0 < error < 0.06 and (served, left) == (2, 0)
    assert tiny.relative(tiny.WAYS["prefill"](model).detach(), plain) < 0.06


def test_mixed_precision_is_served() -> None:
    """Weights and rotary embeddings are float32; accelerate runs the model under autocast."""
    model = tiny.make(tiny.CAUSAL["llama"], torch.float32)
    accelerator = accelerate.Accelerator(cpu=not ON_CARD, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    error, served, left = compared(model, lambda: prepared(tiny.tokens()).logits)
    assert 0 < error < 0.06 and (served, left) == (2, 0)
