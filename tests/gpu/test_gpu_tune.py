"""`fp8cutlass.tune` on the card: real times, and calls that go by them, the remembered ones too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference import randn

from fp8cutlass import attention, explain, tune
from fp8cutlass.call import memo as eager
from fp8cutlass.choose import dispatch, tuned

pytestmark = pytest.mark.gpu


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "mine.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    dispatch.forget()
    yield path
    monkeypatch.undo()
    dispatch.forget()
    eager.forget()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=lambda heads: f"{heads[0]}to{heads[1]}")
def test_a_tuned_call_runs_the_fastest_kernel(heads: tuple[int, int], causal: bool, file: Path) -> None:
    q = randn(1, heads[0], 300, 64, seed=0, device="cuda")
    k, v = (randn(1, heads[1], 300, 64, seed=seed, device="cuda") for seed in (1, 2))
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    for _ in range(2):  # remembered
        attention(q, k, v, **options)
    found = tune(q, k, v, **options)
    assert found.path == file and len(found.candidates) > 1
    assert [candidate.refused for candidate in found.candidates if candidate.refused] == []
    assert all(0 < candidate.us < 1e6 for candidate in found.candidates)
    text = explain(q, k, v, **options)
    assert f"kernel:    {found.kernel}\n" in text
    assert f"measured on {torch.cuda.get_device_name()} by fp8cutlass.tune, in {file}" in text
    assert torch.equal(attention(q, k, v, **options), attention(q, k, v, kernel=found.kernel, **options))
