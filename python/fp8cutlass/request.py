"""One call of ``attention``, as given and as understood."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .packed import PackedKV


@dataclass
class Request:
    """The arguments of ``attention``, unchecked; ``attention`` documents them. Where key is a PackedKV, ``make_plan``
    puts it into ``packed`` and a tensor into its place."""

    query: torch.Tensor
    key: Any
    value: Any = None
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    _: KW_ONLY
    layout: str = "bhsd"
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    scaling: str = "block"
    precision: str = "fast"
    smooth_k: bool = False
    hadamard: bool = False
    out_dtype: torch.dtype | None = None
    out_descale: Any = None
    return_lse: bool = False
    return_amax: bool = False
    causal_alignment: str = "top_left"
    out: torch.Tensor | None = None
    kernel: str | None = None
    fallback: str = "error"
    packed: PackedKV | None = field(default=None, init=False)

    def bhsd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value viewed as (B, H, S, D); the tensors are known to have four dimensions."""
        if self.layout == "bhsd":
            return self.query, self.key, self.value
        return self.query.transpose(1, 2), self.key.transpose(1, 2), self.value.transpose(1, 2)


@dataclass
class Plan:
    """A request that has passed every check.

    ``half`` says that query, key and value are bf16 or fp16, which the operator quantises. ``precision`` is what it is
    asked for.
    """

    q: torch.Tensor  # (B, H, Sq, D) view
    k: torch.Tensor  # (B, Hkv, Sk, D) view
    v: torch.Tensor
    half: bool
    granularity: tuple[str, str, str]
    precision: str
    scale: float
    causal_offset: int
    out_dtype: torch.dtype
