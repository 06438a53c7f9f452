"""The attention backend of a model runner of SGLang."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..pages import HEAD_DIMS, Pair, attend, refuse
from .steps import Held, Slots, Step

try:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
except ImportError as error:
    raise ImportError(
        f"fp8cutlass.integrations.sglang.backend is for SGLang 0.5.23 or one like it, which cannot be imported: {error}"
    ) from error

DOOR = "sglang"
LAYOUTS = ("nhd", "hnd")  # of a pool


class FP8CutlassBackend(AttentionBackend):  # type: ignore[misc, unused-ignore]
    """Decoder attention on pools of e4m3 tokens, in pages of 1 token or more. The rest is refused by name."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        self.pool, self.page_size = pool, int(runner.page_size)
        self.layout: str = getattr(pool, "kv_cache_layout", "unknown")
        refuse(
            DOOR,
            f"a cache of {runner.kv_cache_dtype}: it takes --kv-cache-dtype fp8_e4m3"
            if runner.kv_cache_dtype != torch.float8_e4m3fn
            else None,
            "multi-head latent attention" if runner.use_mla_backend else None,
            "encoder-decoder models" if runner.model_config.is_encoder_decoder else None,
            "speculative decoding" if runner.spec_algorithm.is_speculative() else None,
            f"a pool of layout {self.layout}: {' and '.join(LAYOUTS)} are read" if self.layout not in LAYOUTS else None,
            "a pool with scales of blocks" if getattr(pool, "is_quantized_kv_cache", False) else None,
        )
        self.slots = Slots(runner.req_to_token_pool.req_to_token, self.page_size, runner.model_config.context_len)
        self.held: Held | None = None  # where CUDA graphs are in use
        self.forward_metadata: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step that no graph runs. On a card nothing is waited for."""
        batch = forward_batch
        known = batch.seq_lens_cpu
        longest_k = self.slots.context if known is None or not len(known) else int(max(known))
        lengths = batch.seq_lens.int()
        if batch.forward_mode.is_decode_or_idle():
            ends = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=lengths.device)
            longest_q = 1
        else:
            verify = batch.forward_mode.is_target_verify() or batch.forward_mode.is_draft_extend_v2()
            refuse(DOOR, "speculative decoding" if verify else None)
            ends = F.pad(batch.extend_seq_lens.cumsum(0), (1, 0)).int()
            rows = batch.extend_seq_lens_cpu
            longest_q = longest_k if rows is None else int(max(rows))
        table = self.slots.pages_of(batch.req_pool_indices, longest_k)
        self.forward_metadata = Step(lengths, ends, table, longest_q, longest_k)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tensors for graphs of up to ``max_bs`` requests."""
        self.held = Held(self.slots, max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture or a replay of decode."""
        mode = forward_batch.forward_mode
        refuse(DOOR, None if mode.is_decode_or_idle() else f"CUDA graphs of {mode}")
        if self.held is None:
            raise RuntimeError("init_cuda_graph_state was not called")
        self.forward_metadata = self.held.step(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Inside a capture: each replay reads the lengths and slots of its own step."""
        if self.held is None:
            raise RuntimeError("init_cuda_graph_state was not called")
        count = forward_batch.batch_size
        if self.forward_metadata is not None:
            self.forward_metadata.plans.clear()  # of the lengths before
        self.held.fill(forward_batch.req_pool_indices[:count], forward_batch.seq_lens[:count])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request of padding. Its result is not read."""
        return 1

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       **rest: Any) -> torch.Tensor:  # fmt: skip
        """(T, H * D) of a prefill, of a chunk of one, or of a batch with decodes."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **rest)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       **rest: Any) -> torch.Tensor:  # fmt: skip
        """(T, H * D) of a step with one token a request."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **rest)

    def _forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool,
                 sinks: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:  # fmt: skip
        refuse(DOOR, *_wrong(layer), *(f"the argument {name}" for name, x in rest.items() if x is not None))
        step = self.forward_metadata
        if step is None:
            raise RuntimeError("init_forward_metadata was not called")
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        left = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        out = attend(
            DOOR,
            type(layer).__name__,
            q.reshape(-1, layer.tp_q_head_num, layer.head_dim),
            self.pages(layer),
            (_descale(layer.k_scale), _descale(layer.v_scale)),
            step.plans,
            page_table=step.table,
            lengths=step.lengths,
            ends=step.ends,
            longest_q=step.longest_q,
            longest_k=step.longest_k,
            scale=layer.scaling,
            window=(max(left, -1), 0),
            softcap=layer.logit_cap or 0.0,
            sinks=sinks,
        )
        return out.reshape(out.shape[0], -1)

    def pages(self, layer: Any) -> Pair:
        """The layer's K and V as they lie."""
        k, v = (_split(x, self.page_size) for x in self.pool.get_kv_buffer(layer.layer_id))
        return (k.transpose(1, 2), v.transpose(1, 2)) if self.layout == "hnd" else (k, v)


def _split(x: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots (slots, Hkv, D) as pages."""
    return x.unflatten(0, (-1, page_size)) if x.dim() == 3 else x


def _descale(scale: torch.Tensor | float | None) -> torch.Tensor | float:
    """A checkpoint without scales has 1."""
    if isinstance(scale, torch.Tensor):
        return scale.detach().float().reshape(-1)
    return 1.0 if scale is None else float(scale)


def _wrong(layer: Any) -> list[str]:
    """What a layer asks for and is not served."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    capped = (layer.logit_cap or 0.0) > 0 and layer.logit_capping_method != "tanh"
    asked = (
        (f"attention type {kind}", kind != "decoder"),
        ("cross-attention", layer.is_cross_attention),
        (f"values of width {layer.v_head_dim} and keys of {layer.head_dim}", layer.v_head_dim != layer.head_dim),
        (f"head size {layer.head_dim}: {', '.join(map(str, HEAD_DIMS))} are served", layer.head_dim not in HEAD_DIMS),
        (f"logits capped by {layer.logit_capping_method}", capped),
        ("a temperature by length", getattr(layer, "xai_temperature_len", -1) > 0),
    )
    return [reason for reason, wrong in asked if wrong]
