"""What vLLM asks of a backend: what it supports, and its classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..pages import CARDS, HEAD_DIMS
from .impl import Impl
from .steps import DTYPES, MetadataBuilder

from vllm.v1.attention.backend import AttentionBackend, MultipleOf  # isort: skip  (steps.py says where there is none)


class FP8CutlassBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
    """Decoder attention on e4m3 pages of vLLM's layout, in any order of its axes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that it is registered as."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """FP8 alone; not the dtype of the model, which None means."""
        return kv_cache_dtype in DTYPES

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in CARDS

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *rest: Any, **more: Any
    ) -> str | None:
        """vLLM prints the reason."""
        if kv_cache_dtype not in DTYPES:
            return "fp8cutlass needs --kv-cache-dtype fp8"
        if head_size not in HEAD_DIMS:
            return f"fp8cutlass has kernels of head size {', '.join(map(str, HEAD_DIMS))}"
        return None
