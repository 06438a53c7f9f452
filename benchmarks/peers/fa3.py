"""FlashAttention-3 through the ``fa3-fwd`` wheel, in FP8 and bf16, operands (B, S, H, D) as it prefers them."""

from __future__ import annotations

import importlib

import torch

from fp8cutlass import quantize

from ..data import Data
from ..machine import version_of
from .base import Contender

MODULE = "fa3_fwd_interface"


class FlashAttention3:
    """FP8 with a descale for each (batch, kv head), which is the finest that it takes; bf16 output in both."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.name = f"fa3_{precision}"

    def available(self) -> str | None:
        try:
            importlib.import_module(MODULE)
        except (ImportError, OSError) as error:
            return f"fa3-fwd cannot be imported: {error}"
        return None

    def version(self) -> str:
        return f"fa3-fwd {version_of('fa3-fwd')}"

    def prepare(self, data: Data) -> list[Contender]:
        attention = importlib.import_module(MODULE).flash_attn_func
        # (B, H, S, D) views of (B, S, H, D) memory: quantisation keeps the order.
        halves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (data.q, data.k, data.v)]
        fp8 = self.precision == "fp8"
        operands, descales = self._quantise(halves) if fp8 else (halves, {})
        q, k, v = (x.transpose(1, 2) for x in operands)

        def launch() -> torch.Tensor:
            return attention(q, k, v, softmax_scale=data.scale, causal=data.shape.causal, **descales)

        quantise = (lambda: self._quantise(halves)) if fp8 else None
        return [Contender(self.name, self.precision, launch, quantise, layout="bshd")]

    @staticmethod
    def _quantise(halves: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        q, k, v = halves
        batch, kv_heads = k.shape[:2]
        # Query heads that share a kv head share a descale; the tensor's serves where there are several.
        q8, q_descale = quantize(q, granularity="head" if q.shape[1] == kv_heads else "tensor")
        k8, k_descale = quantize(k, granularity="head")
        v8, v_descale = quantize(v, granularity="head")
        q_descale = q_descale.expand(batch, kv_heads)
        return [q8, k8, v8], {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
