"""`fallback="sdpa"`: torch's attention for what no kernel serves, with a warning, and no way round an error."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import randn, relative_l2

from fp8cutlass import BlockMask, UnsupportedError, attention, quantize

E4M3 = torch.float8_e4m3fn
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "python")}


def call(**changes: Any) -> dict[str, Any]:
    """A call that works, with changes."""
    x = randn(1, 4, 16, 64, seed=1)
    return {"query": x, "key": x, "value": x} | changes


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.ones(16, 24, dtype=torch.bool).tril(3)},
        {"attn_mask": BlockMask.from_dense(torch.ones(16, 24, dtype=torch.bool).tril(3))},
        {"attn_mask": torch.linspace(-9, 9, 16 * 24).view(16, 24)},
        {"is_causal": True, "causal_alignment": "bottom_right", "dropout_p": 0.0, "kernel": None},
        {"layout": "bshd"},
        {"scale": 0.3},
    ],
)
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_fallback_runs_sdpa_and_says_so(arguments: dict[str, Any], kind: str) -> None:
    """What is no kernel's (here head_dim 320) is torch's, on the dequantised operands."""
    head_dim = 320
    shapes = [(2, 4, 16, head_dim), (2, 4, 24, head_dim), (2, 4, 24, head_dim)]
    q, k, v = (randn(*shape, seed=seed) for seed, shape in enumerate(shapes))
    if arguments.get("layout") == "bshd":
        view = [x.transpose(1, 2) for x in (q, k, v)]
    else:
        view = [q, k, v]
    mask, causal = arguments.get("attn_mask"), arguments.get("is_causal", False)
    if isinstance(mask, BlockMask):
        mask = mask.dense()
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.bfloat16()
    if causal:
        mask = torch.ones(16, 24, dtype=torch.bool).tril(8)
    extra: dict[str, Any] = {}
    if kind == "fp8":
        pairs = [quantize(x, granularity="head") for x in (q, k, v)]
        extra = {f"{name}_descale": pair[1] for name, pair in zip("qkv", pairs, strict=True)} | {"scaling": "head"}
        q, k, v = ((x8.float() * d[:, :, None, None]).bfloat16() for x8, d in pairs)
        view = [x8.transpose(1, 2) if arguments.get("layout") == "bshd" else x8 for x8, _ in pairs]
    want = F.scaled_dot_product_attention(q, k, v, mask, scale=arguments.get("scale"))
    with pytest.warns(UserWarning, match="falls back to torch"):
        got = attention(*view, fallback="sdpa", **arguments, **extra)
    got = got.transpose(1, 2) if arguments.get("layout") == "bshd" else got
    assert relative_l2(got, want) < 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*view, fallback="sdpa", **arguments, **extra)  # the same reasons warn once


def test_fallback_does_not_touch_what_a_kernel_serves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = attention(**call(), fallback="sdpa")
    assert torch.equal(got, attention(**call()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (call(query=randn(3, 4, 16, 64, seed=1), key=randn(2, 4, 16, 64, seed=2)), "batch size"),
        (
            call(**{n: randn(1, 4, 16, 64, seed=3).to(E4M3) for n in ("query", "key", "value")}, dropout_p=0.5),
            "q_descale is missing",
        ),
        (call(dropout_p=0.5, return_lse=True), "cannot serve return_lse"),
        (call(dropout_p=0.5, out_dtype=E4M3, out_descale=1.0), "cannot serve out_dtype"),
    ],
)
def test_fallback_is_no_way_round_an_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        attention(**arguments, fallback="sdpa")


def test_a_patched_sdpa_ends_in_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that puts `attention` into the place of SDPA gets torch's attention as the fallback, not itself."""
    q = randn(1, 4, 16, 320, seed=9)
    want = F.scaled_dot_product_attention(q, q, q)
    patched = partial(attention, fallback="sdpa")
    monkeypatch.setattr(F, "scaled_dot_product_attention", patched)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", patched)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
    code = (
        "import torch, torch.nn.functional as F\n"
        "def early(*a, **k): raise RuntimeError('patched before the import')\n"
        "F.scaled_dot_product_attention = early\n"
        "import fp8cutlass\n"
        "q = torch.zeros(1, 1, 4, 320)\n"
        "print(fp8cutlass.attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), fallback='sdpa').shape)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == "torch.Size([1, 1, 4, 320])\n", done.stderr


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("masked", [True, False])
def test_compile_keeps_one_graph_and_warns_while_tracing(masked: bool, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    q = randn(1, 4, 16, 320, seed=4)
    mask = torch.ones(16, 16, dtype=torch.bool).tril() if masked else None

    def step(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return attention(q, q, q, mask, fallback="sdpa")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with pytest.warns(UserWarning, match="falls back to torch's attention: head_dim"):
        got = compiled(q, mask)
    assert torch.equal(got, step(q, mask))
