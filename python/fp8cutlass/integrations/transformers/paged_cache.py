"""``PagedCache``: a cache of transformers whose keys and values lie in pages of FP8."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...cache.paged import PagedKVCache
from ...errors import UnsupportedError
from . import route
from .paged import Waiting, offer
from .pool import Pool, Stored

LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


class _PagedLayer(CacheLayerMixin):
    """One layer. It keeps all tokens, those before a window included."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, stored: Stored, config: Any) -> None:
        super().__init__()
        self.stored, self.config = stored, config
        self.waiting: Waiting | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first append makes the pages."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, Hkv, S, D) each, which come back with a note. Attention appends them, as it knows what is padding."""
        if torch.compiler.is_compiling():
            raise UnsupportedError("a PagedCache does not go with torch.compile")
        name = self.config._attn_implementation
        if ALL_ATTENTION_FUNCTIONS.get(name) is not route.full:
            raise UnsupportedError(
                f"a PagedCache needs attn_implementation='fp8cutlass', the model has {name!r}: call register(), then "
                "model.set_attn_implementation('fp8cutlass')"
            )
        self.settle()
        self.waiting = offer(self.stored, key_states)
        self.is_initialized = True
        return key_states, value_states

    def settle(self) -> None:
        """Refuse to go on where the keys of the last forward pass did not arrive."""
        if self.waiting is not None and not self.waiting.done:
            raise UnsupportedError(
                f"the keys of layer {self.stored.layer} did not reach attention as the cache returned them: a "
                "PagedCache serves neither such a model nor torch.compile"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys with ``query_length`` more, and the first one."""
        return self.stored.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.stored.seen

    def get_max_length(self) -> int:
        """None."""
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def reset(self) -> None:
        """Forget all tokens."""
        self.stored.clear()
        self.waiting = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise UnsupportedError(f"crop takes a negative number, of tokens to remove, got {tokens_to_remove}")
        self.stored.crop(-tokens_to_remove)


class PagedCache(Cache):
    """Keys and values of a decoder in pages of FP8, for ``generate`` and single calls under ``fp8cutlass``.

    Pages are given to sequences as they grow. Tokens that the attention mask calls padding take none.

    Args:
        config: the model's own, ``model.config``.
        num_pages: of each layer; None for as many as are needed: they double when they are full.
        page_size: tokens of a page, a multiple of 16.
        v_scale, v_descale: as in :class:`~fp8cutlass.PagedKVCache`.

    Raises:
        UnsupportedError: an encoder-decoder, layers that share keys, layers that are no attention.
    """

    def __init__(
        self,
        config: Any,
        num_pages: int | None = None,
        page_size: int = 64,
        *,
        v_scale: str = "pow2",
        v_descale: torch.Tensor | float | None = None,
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError("a PagedCache is for decoders; the keys of an encoder-decoder's two kinds differ")
        text = config.get_text_config(decoder=True)
        wrong = sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYERS))
        if wrong:
            raise UnsupportedError(f"a PagedCache has layers of {', '.join(LAYERS)}, the model also {', '.join(wrong)}")
        if getattr(text, "num_kv_shared_layers", 0):
            raise UnsupportedError("a PagedCache does not serve layers that share keys")
        count = text.num_hidden_layers
        self._pool = Pool(count, num_pages, page_size, v_scale, v_descale)
        self._stored = [Stored(self._pool, i) for i in range(count)]
        super().__init__(layers=[_PagedLayer(stored, text) for stored in self._stored])

    @property
    def pages(self) -> PagedKVCache | None:
        """What holds the keys and values; None before the first token. It is another one after it has grown."""
        return self._pool.cache

    def page_table(self) -> torch.Tensor:
        """(sequences, pages) int32, on the CPU; 0 where a sequence has no more."""
        return self._pool.table(torch.device("cpu"))

    def lengths(self, layer: int = 0) -> list[int]:
        """Tokens of each sequence in a layer, padding not included."""
        return list(self._stored[layer].lengths)

    def reset(self) -> None:
        """Forget all tokens. The pages stay allocated."""
        super().reset()
        self._pool.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequences in another order, as beam search takes them. Whole pages are copied."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._take([i for i in range(self._batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some of the sequences, by number or as bool."""
        self._take(torch.arange(self._batch(), device="cpu")[indices.cpu()].tolist())

    def _batch(self) -> int:
        return len(self._stored[0].lengths)

    def _take(self, sequences: list[int]) -> None:
        for layer in self.layers:
            layer.settle()
        known = [stored.lengths for stored in self._stored if stored.lengths]
        if known:
            longest = [max(own) for own in zip(*known, strict=True)]
            self._pool.take(sequences, [longest[i] for i in sequences])
        for stored in self._stored:
            stored.take(sequences)
