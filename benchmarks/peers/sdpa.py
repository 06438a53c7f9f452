"""torch's scaled_dot_product_attention in bf16, pinned to one backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..data import Data
from .base import Contender, Refused

BACKENDS = {
    "cudnn": ("cudnn_bf16", SDPBackend.CUDNN_ATTENTION),
    "flash": ("fa2_bf16", SDPBackend.FLASH_ATTENTION),  # torch carries FlashAttention-2
}


class TorchSdpa:
    precision = "bf16"

    def __init__(self, backend: str) -> None:
        self.name, self._backend = BACKENDS[backend]

    def available(self) -> str | None:
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def prepare(self, data: Data) -> list[Contender]:
        shape = data.shape

        def launch() -> torch.Tensor:
            with sdpa_kernel(self._backend), torch.no_grad():
                return F.scaled_dot_product_attention(
                    data.q,
                    data.k,
                    data.v,
                    is_causal=shape.causal,
                    scale=data.scale,
                    enable_gqa=shape.heads != shape.kv_heads,
                )

        try:
            launch()
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Refused(f"torch has no {self.name} kernel for {shape.label}") from error
            raise
        return [Contender(self.name, self.precision, launch)]
