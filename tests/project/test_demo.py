"""The example that `make demo` runs: a real encoder keeps its embeddings with its attention exchanged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

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
    minilm = load_minilm()
    try:
        encoder = minilm.load(torch.device(device))
    except minilm.ModelMissing as error:
        pytest.skip(str(error))
    original = encoder.encode(minilm.SENTENCES, "sdpa")
    ours = encoder.encode(minilm.SENTENCES, "fp8cutlass")
    cosines = (original * ours).sum(-1)
    assert float(cosines.min()) >= 0.998
    assert not torch.equal(original, ours), "the attention was not exchanged"
    packed = encoder.encode_packed(minilm.SENTENCES)
    assert float((original * packed).sum(-1).min()) >= 0.998
    assert not torch.equal(original, packed)


def test_what_the_function_does_not_do_is_refused() -> None:
    """A causal model gets its mask; what would change results is named."""
    minilm = load_minilm()
    module = SimpleNamespace(is_causal=True)
    q, k, v = (torch.randn(1, 2, 9, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    out, _ = minilm._attention(module, q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert float((out - want).float().norm() / want.float().norm()) < 0.1
    for name in minilm.CHANGE_RESULTS:
        with pytest.raises(ValueError, match=f"the model asks for {name}"):
            minilm._attention(module, q, k, v, None, **{name: 1})
