"""torchao's low-precision attention of a model, with this package in the place of FlashAttention-3.

Regressions these catch: operands or descales in another form than torchao gives them; the name of FlashAttention-3 that
torchao activates and gives back; a call that runs elsewhere and is not counted.

torchao quantises with Triton on a card. Here it gets our quantisation, with the descales that it makes: float32
(B, H_kv) of each of query, key and value. The function of torch that it then calls takes tensors of a card alone. Here
its place has the operator that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import relative_l2
from where import CPU, DEVICE, moved

from fp8cutlass import quantize, stats
from fp8cutlass.integrations import provider

pytest.importorskip("triton")  # torchao imports it, and nothing here runs it
pytest.importorskip("torchao.prototype.attention")

from torchao.prototype.attention.shared_utils import attention, setup  # noqa: E402

QUANTIZED = torch.ops.aten._scaled_dot_product_flash_attention.quantized


class Model(torch.nn.Module):
    """Attention of its input's thirds, (B, H, S, 3 D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*x.chunk(3, -1), is_causal=True)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """Wrapped as torchao's ``apply_low_precision_attention`` does, which asks for a card first."""

    def by_head(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [quantize(x, granularity="head") for x in operands]
        return *(x for x, _ in pairs), *(descale.float() for _, descale in pairs)

    def quantized(*operands: torch.Tensor, is_causal: bool, scale: float | None, **descales: torch.Tensor) -> Any:
        given = [descales[f"{name}_descale"] for name in "qkv"]
        return QUANTIZED(*operands, *given, 0.0, is_causal, False, scale=scale or None)[0]

    monkeypatch.setattr(attention, "_fp8_sdpa_quantize", by_head)
    monkeypatch.setattr(attention, "_scaled_dot_product_attention_quantized", quantized)
    before = torch._inductor.config.pre_grad_custom_pass
    provider.register("FA3", device=DEVICE.type)
    yield setup.setup_fp8_backend(Model().eval(), "FA3")
    torch._inductor.config.pre_grad_custom_pass = before
    torch.nn.attention.register_flash_attention_impl(
        "FA3", register_fn=torch.nn.attention._fa3.register_flash_attention_fa3
    )


def test_a_model_of_torchao_is_served(model: torch.nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    x = moved(torch.randn(2, 4, 40, 192, generator=draw, device=CPU).bfloat16())
    x = (x * torch.tensor([1.0, 3.0, 5.0]).repeat_interleave(64)).bfloat16()
    plain = F.scaled_dot_product_attention
    want = Model()(x.double())
    with torch.no_grad(), stats.collect() as seen:
        out = model(x)
    result = seen.result()
    assert (result.served.calls, result.fallback.calls) == (1, 0), str(result)
    assert out.dtype == torch.bfloat16 and 0.005 < relative_l2(out, want) < 0.08
    assert F.scaled_dot_product_attention is plain and torch.equal(Model()(x), Model()(x))
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_without_the_provider_torchao_finds_no_kernel(model: torch.nn.Module) -> None:
    """So the result above is ours."""
    torch.nn.attention.register_flash_attention_impl("FA3", register_fn=lambda **_: None)
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        model(torch.randn(1, 2, 16, 192, dtype=torch.bfloat16))
