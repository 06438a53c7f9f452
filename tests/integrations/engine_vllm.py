"""The parts of vLLM that the adapter touches, as stand-ins: names and signatures of 0.33.0, written for these tests."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

VERSION = "0.33.0"
_paths: dict[Any, str] = {}


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


class AttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support


class AttentionBackend:
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"


class AttentionImpl:
    supports_quant_query_input = False
    supports_dcp = False


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self) -> str:
        return _paths.get(self, self.value)

    def is_overridden(self) -> bool:
        return self in _paths

    def get_class(self) -> Any:
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Callable[[Any], Any]:
    assert class_path is not None and not is_mamba
    _paths[backend] = class_path
    return lambda x: x


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    rswa_prefix_lens: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None


class Attention(torch.nn.Module):
    """The layer: its scales."""

    def __init__(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        super().__init__()
        self._q_scale, self._k_scale, self._v_scale = torch.tensor(1.0), k_scale, v_scale


def reshape_and_cache_flash(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                            slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor,
                            v_scale: torch.Tensor) -> None:  # fmt: skip
    """vLLM's kernel, by torch operations: caches (blocks, block size, kv_heads, head_size) uint8; scales of one
    number or one for each KV head; a slot of -1 is padding."""
    assert kv_cache_dtype in ("fp8", "fp8_e4m3")
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], key_cache.shape[1]
    for room, x, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        scaled = x[: len(kept)][kept].float() / scale.reshape(-1, 1)
        room[slots // size, slots % size] = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """These in sys.modules for a test, and after it none of the adapter's modules that read them."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules[__name__]
    for name in ("backend", "impl", "steps"):
        sys.modules.pop(f"fp8cutlass.integrations.vllm.{name}", None)


def modules() -> dict[str, ModuleType]:
    """By name, for sys.modules."""
    _paths.clear()
    backend = ("AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadata",
               "AttentionMetadataBuilder", "MultipleOf")  # fmt: skip
    registry = ("AttentionBackendEnum", "register_backend")
    content = {
        "vllm": (), "vllm._custom_ops": ("reshape_and_cache_flash",), "vllm.v1": (), "vllm.v1.attention": (),
        "vllm.v1.attention.backend": backend,
        "vllm.v1.attention.backends": (), "vllm.v1.attention.backends.registry": registry,
    }  # fmt: skip
    made = {}
    for name, names in content.items():
        made[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update({n: globals()[n] for n in names})
    vars(made["vllm"])["_custom_ops"] = made["vllm._custom_ops"]
    return made
