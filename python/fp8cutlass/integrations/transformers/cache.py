"""A cache for keys and values that do not change while text is generated: those of cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...api.pack import pack_kv
from ...errors import UnsupportedError
from .serve import note_packed


class _PackedLayer(DynamicLayer):
    """Keys and values as they came, and beside them what the kernels read."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, Hkv, S, D) each; the keys and values so far."""
        if self.is_initialized:
            super().update(key_states, value_states, *args, **kwargs)
        else:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        self._pack()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in another order, as beam search takes them."""
        super().reorder_cache(beam_idx)
        self._pack()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, as at the start of beam search."""
        super().batch_repeat_interleave(repeats)
        self._pack()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some of the rows."""
        super().batch_select_indices(indices)
        self._pack()

    def _pack(self) -> None:
        """What cannot be packed is served as any other call is, or runs by transformers."""
        batch, heads, _, head_dim = self.keys.shape
        try:
            packed = pack_kv(self.keys, self.values, query_shape=(batch, heads, 1, head_dim))
        except UnsupportedError:
            return
        note_packed(self.keys, self.values, packed)


class PackedCrossAttentionCache(Cache):
    """Quantises and packs the keys and values of cross-attention once, for all tokens that are generated.

    For the second place in ``EncoderDecoderCache(DynamicCache(config=model.config), PackedCrossAttentionCache())``.
    It keeps the original keys and values too, for calls that are not served: 1.5 times the memory of bf16 alone.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_PackedLayer)
