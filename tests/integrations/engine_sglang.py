"""The parts of SGLang that the adapter touches, as stand-ins: names and signatures of 0.5.23, made for tests."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

VERSION = "0.5.23"
ATTENTION_BACKENDS: dict[str, Callable[[Any], Any]] = {}
CHOICES: list[str] = []


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return False


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                **kwargs: Any) -> torch.Tensor:  # fmt: skip
        decode = forward_batch.forward_mode == ForwardMode.DECODE
        way = self.forward_decode if decode else self.forward_extend  # type: ignore[attr-defined]
        return way(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


@dataclass
class KVWriteLoc:
    loc: torch.Tensor

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor  # int64
    seq_lens: torch.Tensor  # int64
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None


class RadixAttention(torch.nn.Module):
    """The layer."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int,
                 logit_cap: float = 0.0, v_head_dim: int = -1, sliding_window_size: int = -1,
                 is_cross_attention: bool = False, logit_capping_method: str = "tanh",
                 attn_type: AttentionType = AttentionType.DECODER) -> None:  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.is_cross_attention = sliding_window_size, is_cross_attention
        self.logit_capping_method, self.attn_type, self.xai_temperature_len = logit_capping_method, attn_type, -1
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None


class MHATokenToKVPool:
    """Slots of one layer, as bytes; every byte a NaN of e4m3 at first."""

    is_quantized_kv_cache = False

    def __init__(self, size: int, page_size: int, head_num: int, head_dim: int, layout: str = "nhd") -> None:
        self.size, self.page_size, self.kv_cache_layout = size, page_size, layout
        slots = size + page_size
        shape = (slots, head_num, head_dim)
        if layout == "hnd":
            shape = (slots // page_size, head_num, page_size, head_dim)
        self.buffers = [torch.full(shape, 0xFF, dtype=torch.uint8) for _ in range(2)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.view(torch.float8_e4m3fn) for x in self.buffers)
        return k, v

    def set_kv_buffer(self, layer: Any, loc_info: KVWriteLoc, cache_k: torch.Tensor, cache_v: torch.Tensor,
                      k_scale: Any = None, v_scale: Any = None) -> None:  # fmt: skip
        loc = loc_info.loc
        for room, x, scale in zip(self.buffers, (cache_k, cache_v), (k_scale, v_scale), strict=True):
            bytes8 = (x if scale is None else x / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            if self.kv_cache_layout == "hnd":
                room[loc // self.page_size, :, loc % self.page_size] = bytes8
            else:
                room[loc] = bytes8


def runner_of(pool: Any, requests: int, context: int, **changed: Any) -> SimpleNamespace:
    """What a backend is made from."""
    return SimpleNamespace(
        **{
            "token_to_kv_pool": pool, "page_size": pool.page_size, "kv_cache_dtype": torch.float8_e4m3fn,
            "use_mla_backend": False, "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
            "model_config": SimpleNamespace(context_len=context, is_encoder_decoder=False),
            "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(requests, context, dtype=torch.int32)),
        }
        | changed
    )  # fmt: skip


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def decorator(fn: Any) -> Any:
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


def add_attention_backend_choices(choices: list[str]) -> None:
    CHOICES.extend(choices)


def modules() -> dict[str, ModuleType]:
    """By name, for sys.modules."""
    ATTENTION_BACKENDS.clear()
    CHOICES.clear()
    layers, srt = "sglang.srt.layers", "sglang.srt"
    content = {
        "sglang": (), srt: (), layers: (), f"{layers}.attention": (), f"{srt}.mem_cache": (),
        f"{layers}.attention.base_attn_backend": ("AttentionBackend",),
        f"{layers}.attention.attention_registry": ("ATTENTION_BACKENDS", "register_attention_backend"),
        f"{srt}.mem_cache.memory_pool": ("KVWriteLoc",),
        f"{srt}.server_args": ("add_attention_backend_choices",),
    }  # fmt: skip
    made = {}
    for name, names in content.items():
        made[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update({n: globals()[n] for n in names})
    return made
