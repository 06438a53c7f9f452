"""The arguments of ``attention``: for type checkers the words that are accepted and what comes back; and what is wrong
with some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import torch

from ..call.options import RULES, one_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache.packed import PackedKV
    from ..masks.block_mask import BlockMask

Descale = torch.Tensor | float | None
Layout = Literal["bhsd", "bshd"]
Scaling = Literal["tensor", "head", "block", "token"]
Precision = Literal["fast", "balanced", "accurate", "high", "int8", "int8_full"]
Alignment = Literal["top_left", "bottom_right"]
Fallback = Literal["error", "sdpa"]
Backward = Literal["none", "flash"]


def wrong_values(given: Mapping[str, object]) -> list[str]:
    """What is wrong with options, by name, whatever the tensors are."""
    found = [
        one_of(name, x, get_args(Scaling)) if name == "scaling" else RULES[name](name, x) for name, x in given.items()
    ]
    return [reason for reason in found if reason is not None]


class Keywords(TypedDict, total=False):
    """Those that may only be given by name, but for ``return_lse`` and ``return_amax``."""

    layout: Layout
    q_descale: Descale
    k_descale: Descale
    v_descale: Descale
    scaling: Scaling
    precision: Precision
    smooth_k: bool | None
    hadamard: bool | None
    out_dtype: torch.dtype | None
    out_descale: Descale
    causal_alignment: Alignment
    causal_offset: int | None
    window_size: tuple[int, int]
    softcap: float
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    kernel: str | None
    fallback: Fallback
    backward: Backward


class Positional(TypedDict, total=False):
    """Those of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor | PackedKV
    value: torch.Tensor | None
    attn_mask: torch.Tensor | BlockMask | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class Arguments(Positional, Keywords, total=False):
    """All of them."""

    return_lse: bool | Literal["merge"]
    return_amax: bool


__all__ = [
    "Alignment",
    "Arguments",
    "Backward",
    "Descale",
    "Fallback",
    "Keywords",
    "Layout",
    "Precision",
    "Scaling",
    "Unpack",
]
