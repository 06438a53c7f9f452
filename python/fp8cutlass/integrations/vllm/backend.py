"""What vLLM asks of a backend: what it supports, and the metadata of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..pages import CARDS, HEAD_DIMS, refuse

try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionMetadata,
        AttentionMetadataBuilder,
        MultipleOf,
    )
except ImportError as error:
    raise ImportError(
        f"fp8cutlass.integrations.vllm.backend is for vLLM 0.28 or newer, which cannot be imported: {error}"
    ) from error

DTYPES = ("fp8", "fp8_e4m3")  # of a cache
DOOR = "vllm"


@dataclass
class Metadata(AttentionMetadata):
    """A step. Tensors are vLLM's own, on the device: nothing is computed from them on the host."""

    num_actual_tokens: int  # rows of the query that are computed; padding of a graph may be among them
    max_query_len: int
    max_seq_len: int  # an upper bound
    query_start_loc: torch.Tensor  # (requests + 1,) int32
    seq_lens: torch.Tensor  # (requests,) int32, tokens of this step included
    block_table: torch.Tensor  # (requests, most blocks) int32
    slot_mapping: torch.Tensor  # (tokens,) int64
    causal: bool


class MetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc, unused-ignore]
    """Keeps references. One batch may have decodes, drafts to be verified and prefills, in any order."""

    # The call waits for no number of the device, and its launch depends on no length. NEVER stands until a capture has
    # been seen to run on a card (tests/gpu/test_gpu_engines.py): vLLM then captures the rest of the model, piece by
    # piece, and calls attention between the pieces.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of a step. UnsupportedError for cascade attention and masks of other forms."""
        common = common_attn_metadata
        refuse(
            DOOR,
            f"cascade attention (a common prefix of {common_prefix_len} tokens)" if common_prefix_len else None,
            "causality by request" if isinstance(common.causal, torch.Tensor) else None,
            "reference sliding windows" if getattr(common, "rswa_prefix_lens", None) is not None else None,
            "prefixes that see one another" if getattr(common, "mm_req_doc_ranges", None) else None,
        )
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        """The same step on the pages of another group of layers."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


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
        from .impl import Impl

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
