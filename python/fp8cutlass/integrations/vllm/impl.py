"""The attention of a layer of vLLM, and its writes to the cache."""

from __future__ import annotations

from typing import Any

import torch

from ...cache.paged import PagedKVCache
from ..pages import Pair, attend, refuse
from .steps import DOOR, DTYPES, Metadata

from vllm.v1.attention.backend import AttentionImpl  # isort: skip  (steps.py says where there is none)


class Impl(AttentionImpl):  # type: ignore[misc, unused-ignore]
    """One layer's attention. The query stays in 16 bits: it is not quantised by vLLM."""

    supports_quant_query_input: bool = False
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refuse(
            DOOR,
            "ALiBi" if alibi_slopes is not None else None,
            f"attention type {attn_type}" if attn_type != "decoder" else None,
            f"a cache of {kv_cache_dtype}: it takes {' and '.join(DTYPES)}" if kv_cache_dtype not in DTYPES else None,
            f"sinks of shape {tuple(sinks.shape)} for {num_heads} heads"
            if sinks is not None and tuple(sinks.shape) != (num_heads,)
            else None,
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.left = -1 if sliding_window is None else sliding_window - 1  # vLLM's window has the token itself
        self.softcap, self.sinks = logits_soft_cap or 0.0, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    @staticmethod
    def pages(kv_cache: torch.Tensor) -> Pair:
        """K and V of a cache (blocks, kv_heads, block size, 2 * head_size) with any strides, as they lie: (blocks,
        block size, kv_heads, head_size) each."""
        k, v = kv_cache.transpose(1, 2).chunk(2, 3)
        return k, v

    @staticmethod
    def descales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's own tensors, which it may yet write to."""
        return layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of ``query`` (T, H, D) over the pages to ``output`` (T, H, D) or (T, H * D), and return it.

        Keys and values are in the pages already (``do_kv_cache_update``). Rows of padding become 0 or stay as they are.
        """
        fused = output_scale is not None or output_block_scale is not None
        refuse(DOOR, "output that is quantised in the same kernel" if fused else None)
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        step, tokens = attn_metadata, attn_metadata.num_actual_tokens
        right = 0 if step.causal else self.left
        rows = (tokens, self.num_heads, self.head_size)
        attend(
            DOOR,
            type(layer).__name__,
            query[:tokens].view(rows),
            self.pages(kv_cache),
            self.descales(layer),
            step.plans,
            out=output[:tokens].view(rows),
            page_table=step.block_table,
            lengths=step.seq_lens,
            ends=step.query_start_loc,
            longest_q=step.max_query_len,
            longest_k=step.max_seq_len,
            scale=self.scale,
            window=(self.left, right),
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantise keys and values (T or more, Hkv, D) and write them to their slots; a slot of -1 is padding.

        On a card vLLM's own kernel does it, elsewhere torch operations.
        """
        if key.is_cuda:
            from vllm import _custom_ops as ops

            k, v = self.pages(kv_cache)
            ops.reshape_and_cache_flash(
                key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        tokens = slot_mapping.shape[0]
        k_descale, v_descale = self.descales(layer)
        cache = PagedKVCache.from_tensor(self.pages(kv_cache), k_descale=k_descale, v_descale=v_descale)
        cache.append(key[:tokens], value[:tokens], slot_mapping)
