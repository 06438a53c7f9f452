"""What the adapters have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from where import ON_CARD, randn

import fp8cutlass
from fp8cutlass import stats
from fp8cutlass.integrations import dense, flash, sage, set_minimum_length
from fp8cutlass.stats import Reason


def printed(code: str) -> str:
    """What a fresh process prints that finds this package."""
    environment = os.environ | {"PYTHONPATH": str(Path(fp8cutlass.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_imports_no_adapter() -> None:
    code = "import fp8cutlass, sys; print([name for name in sys.modules if name.startswith('fp8cutlass.integrations')])"
    assert printed(code) == "[]"


def test_adapters_need_none_of_their_libraries_to_be_imported() -> None:
    code = (
        "import sys; from fp8cutlass.integrations import comfy, diffusers, flash, provider, sage, sdpa; "
        "print([name for name in ('diffusers', 'transformers', 'comfy', 'timm') if name in sys.modules])"
    )
    assert printed(code) == "[]"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_work_is_that_of_the_products(layout: str, causal: bool) -> None:
    q, k = randn(2, 6, 40, 64, seed=1), randn(2, 3, 24, 64, seed=2)
    v = k[..., :32]
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    work = 2 * 6 * 40 * 24 * (64 + 32)
    assert dense.effort(q, k, v, causal, layout) == (work // 2 if causal else work)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("least", "served"), [(None, not ON_CARD), (0, True), (40, True), (41, False)])
def test_the_minimum_length_is_one_of_query_tokens(layout: str, least: int | None, served: bool) -> None:
    q, k = randn(1, 6, 40, 64, seed=1), randn(1, 6, 24, 64, seed=2)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    set_minimum_length(least)  # None: a card has a minimum that was measured
    try:
        with stats.collect() as seen:
            out = dense.attend("test", "", q, k, k, layout=layout)  # type: ignore[arg-type]
        assert (out is not None) == served
        assert dense.attend("test", "", q, k, k, layout=layout, short=True) is not None  # type: ignore[arg-type]
    finally:
        set_minimum_length(None)
    assert {key.what for key in seen.result().counts} == {"" if served else "short"}


@pytest.mark.parametrize(("least", "served"), [(24, True), (25, False)])
def test_with_a_boolean_mask_the_minimum_is_one_of_keys_too(least: int, served: bool) -> None:
    q, k = randn(1, 6, 40, 64, seed=1), randn(1, 6, 24, 64, seed=2)
    set_minimum_length(least)
    try:
        assert dense.attend("test", "", q, k, k) is not None
        mask = torch.ones(40, 24, dtype=torch.bool, device=q.device).tril()
        assert (dense.attend("test", "", q, k, k, attn_mask=mask) is not None) == served
    finally:
        set_minimum_length(None)


@pytest.mark.parametrize("precision", ["fast", "int8"])
def test_the_minimum_depends_on_the_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(dense, "short_of", lambda *given: asked.append(given) or "short")
    q = randn(1, 2, 40, 64, seed=1)
    given = {} if precision == "fast" else {"precision": precision}
    assert dense.attend("test", "", q, q, q, accuracy=dense.accuracy_of("test", given)) is None
    assert [of[-1] for of in asked] == [precision]


def test_why_a_call_is_refused() -> None:
    q = randn(1, 2, 8, 64, seed=1)
    wide = randn(1, 2, 8, 320, seed=1)
    assert dense.refusal(q, q, q) is None
    for arguments, reason in (
        ((q, q, q, torch.ones(8, 8)), Reason.MASK),
        ((q, q, q, None, 0.1), Reason.DROPOUT),
        ((q.clone().requires_grad_(), q, q), Reason.GRAD),
        ((q.float(), q, q), Reason.DTYPE),
        ((q, q, q.half()), Reason.DTYPE),
        ((q.to("meta"), q, q), Reason.DEVICE),
        ((q[0, 0], q, q), Reason.LAYOUT),
        ((wide, wide, wide), Reason.HEAD_DIM),
    ):
        assert dense.refusal(*arguments) == reason


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("masked", [False, True])
def test_functions_of_other_libraries_compile_to_one_graph(dynamic: bool | None, masked: bool) -> None:
    """Sizes may be symbols. torch's attention takes none for a bool."""
    mask = torch.ones(40, 40, dtype=torch.bool).tril() if masked else None

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = sage.sageattn(q, k, v, attn_mask=mask)
        return out if masked else out + flash.flash_attn_func(q, k, v, causal=True)

    q, k, v = (randn(2, 40, 40, 64, seed=seed) for seed in range(3))
    torch._dynamo.reset()
    with torch.no_grad(), stats.collect() as seen:
        out = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, k, v)
    assert torch.equal(out, step(q, k, v))
    kinds = {(key.door, key.kind) for key in seen.result().counts}
    assert kinds == ({("sage", "served")} if masked else {("sage", "served"), ("flash", "served")})
