"""The decode kernels on the host against their emulator, and over the pages that PagedKVCache writes.

Regressions these catch: an emulator that specifies something else than the kernels compute; a page whose bytes the
kernels read in another order than append wrote them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_host
import pytest
import torch
from decode_host import FAR, Kernel
from paged_cases import make, refusals

from fp8cutlass.call.kvcache import KVCall, run

LENGTHS, QUERIES = (140, 0, 17, 330, 64), [1, 2, 0, 5, 3]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"left": 70},
    "two-sided window": {"left": 40, "right": 1},
    "no mask": {"right": FAR},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, 9.0])},
    "fp16": {"dtype": torch.float16},
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel("decode_sm90a_d64_r8", tmp_path_factory.mktemp("decode"))


def call_of(b: decode_host.Batch) -> KVCall:
    ends = [-1 if end == FAR else end for end in (b.left, b.right)]
    descales = (b.k_descale, b.v_descale) if b.k_token is None or b.v_page is None else (b.k_token, b.v_page)
    return KVCall(
        b.q, b.k, b.v, *descales, b.table, b.lengths, b.cu_q, b.sinks, None, b.scale, *ends, b.softcap, 1, False, True
    )


def compare(kernel: Kernel, b: decode_host.Batch, **how: Any) -> None:
    """bf16 outputs: equal but for the roundings of P and of the output, and for approximate instructions."""
    result, (out, lse) = kernel.run(b, **how), run(call_of(b))
    assert torch.equal(result.lse.isinf(), lse.isinf()) and torch.equal(result.out.isnan(), out.isnan())
    seen = ~lse.isinf()
    assert (result.lse - lse)[seen].abs().max() < 2e-5 * lse[seen].abs().max().clamp_min(1.0)
    unit = 2.0**-7  # of bf16, where one of two near a tie is rounded down
    largest = out.float().nan_to_num().abs().amax(-1, keepdim=True)
    off = (result.out.float() - out.float()).nan_to_num().abs()
    assert (off <= unit * out.float().nan_to_num().abs() + 2.0**-10 * largest).all()
    assert (off > 0).float().mean() < 0.2  # bf16 hides most of the roundings of P


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ctas", [1, 9])
def test_a_kernel_and_its_emulator(kernel: Kernel, name: str, ctas: int) -> None:
    b = decode_host.batch(LENGTHS, QUERIES, (4, 2), 64, **OPTIONS[name])
    if name == "fp16":  # P's rounding shows
        b = replace(b, q=b.q * 0.25)
        result, (out, _) = kernel.run(b, ctas=ctas), run(call_of(b))
        assert (result.out.float() - out.float()).norm() <= 5e-4 * out.float().norm()
        return
    compare(kernel, b, ctas=ctas)


def test_descales_of_tokens_and_pages(kernel: Kernel) -> None:
    b = decode_host.batch(LENGTHS, QUERIES, (4, 2), 64)
    pages, random = b.k.shape[0], torch.Generator().manual_seed(9)
    b.k_descale.fill_(1.0), b.v_descale.fill_(1.0)
    token = torch.rand(pages, 16, 2, generator=random) + 0.5
    page = 2.0 ** torch.randint(-9, 12, (pages, 2), generator=random).float()
    compare(kernel, replace(b, k_token=token, v_page=page), ctas=9)


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"v_scale": "pow2"}, {"page_size": 16}, {"page_size": 128, "v_scale": "pow2"}, {"format": "nhd"},
        {"format": "hnd", "page_size": 32},
    ],
    ids=str,
)  # fmt: skip
def test_pages_that_append_has_written(kernel: Kernel, arguments: dict[str, Any]) -> None:
    """Poisoned pages, filled by append, read by the kernel by strides: the gates of attention_with_kvcache."""
    batch = make(list(LENGTHS), QUERIES, (4, 2), 64, **arguments)
    views, ones = batch.cache.views(), torch.ones(len(LENGTHS), 2)
    static = [d[0].expand(len(LENGTHS), -1).contiguous() for d in (batch.cache.k_descale, batch.cache.v_descale)]
    given = static if views.k_descale is None else [ones, ones]
    b = decode_host.Batch(
        batch.q, views.k, views.v, batch.table, batch.lengths, batch.ends, *given, views.k_descale, views.v_descale,
        scale=batch.q.shape[2] ** -0.5,
    )  # fmt: skip
    result = kernel.run(b, ctas=9)
    assert refusals(result.out, result.lse, batch.references(), batch.rows) == []
    assert not math.isnan(float(result.out.float().sum()))


def test_the_gate_sees_another_rounding_of_p(tmp_path: Path) -> None:
    """A kernel whose P has 8 bits less is no kernel of this emulator."""
    edit = ("softmax.cuh", "constexpr float kBias = 15.f;", "constexpr float kBias = -16.f;")
    broken = Kernel("decode_sm90a_d64_r8", tmp_path / "kernel", [edit])
    b = decode_host.batch((3000,), [1], (4, 2), 64, right=FAR, dtype=torch.float16)
    b = replace(b, q=b.q * 0.05)
    result, (out, _) = broken.run(b), run(call_of(b))
    assert (result.out.float() - out.float()).norm() > 5e-4 * out.float().norm()
