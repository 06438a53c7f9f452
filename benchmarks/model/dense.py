"""Ways to attend without a cache: torch's SDPA by one backend, FlashAttention-3 in bf16, ours, float32, and none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8cutlass import attention

from ..peers.base import Refused
from ..peers.fa3 import MODULE
from .layers import Attend

BACKENDS = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
HOST_SDPA = "sdpa"  # on the CPU, whatever torch takes
OURS, FA3, WITHOUT = "ours", "fa3_bf16", "without"
SCORES = 1 << 26  # of a chunk of the float32 attention


@dataclass(frozen=True)
class Way:
    """One attention under the name of its rows."""

    name: str
    precision: str
    attend: Attend


Source = Callable[[], Way]  # what it raises is the reason why there is no such way


def sdpa_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, backend: SDPBackend | None
) -> torch.Tensor:
    """SDPA of (B, S, H, D) tensors by a backend, or the one that torch takes. Refused where it takes no such call."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)
    try:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise Refused(f"torch has no {backend.name} kernel for {tuple(q.shape)} on {tuple(k.shape)}") from error
        raise


def sdpa(name: str) -> Way:
    backend = BACKENDS.get(name)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        return sdpa_call(q, k, v, causal, backend)

    return Way(name, "bf16", attend)


def fa3() -> Way:
    function = importlib.import_module(MODULE).flash_attn_func

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        out = function(q, k, v, causal=causal)
        return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)

    return Way(FA3, "bf16", attend)


def ours() -> Way:
    """Whole calls from bf16, quantisation included."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
    ) -> torch.Tensor:
        grouped = q.shape[2] != k.shape[2]
        return cast(torch.Tensor, attention(q, k, v, is_causal=causal, enable_gqa=grouped, layout="bshd"))

    return Way(OURS, "fp8", attend)


def no_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
) -> torch.Tensor:
    """Queries for results: what is left of a forward is all that is not attention."""
    return q


def exact(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, cross: bool = False
) -> torch.Tensor:
    """Attention in float32, rounded to bf16: the reference, some rows at a time. Causal is aligned with the end."""
    (batch, tokens, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rows = max(1, SCORES // (group * keys))
    position = torch.arange(keys, device=q.device)
    for b in range(batch):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            key, value = k[b, :, h].float(), v[b, :, h].float()
            for at in torch.arange(tokens, device=q.device).split(rows):
                scores = q[b, at, own].float() @ key.T * width**-0.5  # (rows, group, keys)
                if causal:
                    scores.masked_fill_(position > (at + keys - tokens)[:, None, None], -torch.inf)
                out[b, at, own] = (scores.softmax(-1) @ value).to(out.dtype)
    return out
