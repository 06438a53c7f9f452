"""The example that `make demo` runs: a real encoder keeps its embeddings with its attention exchanged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp8cutlass import integrations, stats

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_minilm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLES / "minilm.py")
    if spec is None or spec.loader is None:
        raise ImportError("examples/minilm.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["minilm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_embeddings_survive_fp8_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(integrations, "_minimum", None)  # which the example sets
    minilm = load_minilm()
    try:
        encoder = minilm.load(torch.device(device))
    except minilm.ModelMissing as error:
        pytest.skip(str(error))
    original = encoder.encode(minilm.SENTENCES, "sdpa")
    with stats.expect(min_share=1.0):
        ours = encoder.encode(minilm.SENTENCES, "fp8cutlass")
    cosines = (original * ours).sum(-1)
    assert float(cosines.min()) >= 0.998
    assert not torch.equal(original, ours), "the attention was not exchanged"
    with stats.expect(min_share=1.0):
        packed = encoder.encode_packed(minilm.SENTENCES)
    assert float((original * packed).sum(-1).min()) >= 0.998
    assert not torch.equal(original, packed)
