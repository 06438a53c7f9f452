"""`use_fp8` around models of timm and open_clip, which call torch's attention and torch's MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from reference import relative_l2
from where import drawn

from fp8cutlass import stats
from fp8cutlass.integrations.sdpa import use_fp8


def library(name: str) -> Any:
    """The library, or a skip where it is not installed or does not fit the installed torch."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs {name} ({error})")


def both(run: Callable[[], torch.Tensor]) -> tuple[float, dict[str, int]]:
    """The relative error, and the counted calls."""
    with torch.no_grad():
        before = run()
        with use_fp8(), stats.collect() as seen:
            out = run()
    counted = {key.what or key.kind: count.calls for key, count in seen.result().counts.items()}
    return relative_l2(out, before.double()), counted


def test_a_vision_transformer_of_timm() -> None:
    timm = library("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 2, "num_classes": 9}
    model = drawn(lambda: timm.models.VisionTransformer(**sizes).bfloat16().eval())
    image = drawn(lambda: torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))
    error, counted = both(lambda: model.forward_features(image))
    assert 0 < error < 0.04 and counted == {"served": 2}


def test_the_towers_of_open_clip() -> None:
    """The text tower has a mask that is added to the scores: it stays torch's."""
    open_clip = library("open_clip")
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(layers=2, width=128, head_width=64, patch_size=8, image_size=32)
    text = open_clip.CLIPTextCfg(context_length=16, vocab_size=50, width=128, heads=2, layers=2)
    model = drawn(lambda: open_clip.CLIP(64, vision, text).bfloat16().eval())
    image = drawn(lambda: torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))
    tokens = drawn(lambda: torch.randint(1, 49, (2, 16)))
    error, counted = both(lambda: model.encode_image(image))
    assert 0 < error < 0.04 and counted == {"served": 2}
    error, counted = both(lambda: model.encode_text(tokens))
    assert error == 0 and counted == {"mask": 2}
