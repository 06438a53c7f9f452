"""The metadata of a step of vLLM, and who builds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from ..pages import Plans, refuse

try:
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
except ImportError as error:
    raise ImportError(
        f"fp8cutlass.integrations.vllm is for vLLM 0.28 or newer, which cannot be imported: {error}"
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
    plans: Plans = field(default_factory=Plans)  # of its layers


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
