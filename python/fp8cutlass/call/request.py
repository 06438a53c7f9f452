"""One call of ``attention``, as given and as understood."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from ..cache.packed import HELD, PackedKV
from ..errors import UnsupportedError


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


def open_packed(request: Request, packed: PackedKV) -> None:
    """Bring a request whose key is packed into the form of one on tensors, in place, so that everything that is known
    of calls holds for it: ``like`` stands for key and value, and what packing has settled is filled in.

    UnsupportedError for arguments that say otherwise.
    """
    wrong = []
    if request.value is not None:
        wrong.append(f"value must be None where key is a PackedKV, which holds it, got {type(request.value).__name__}")
    for name in HELD:
        given, held = getattr(request, name), getattr(packed, name)
        if not any(type(given) is type(fits) and given == fits for fits in (held, getattr(Request, name))):
            wrong.append(
                f"{name}={given!r} is not what key was packed with, {name}={held!r}: leave it out, or pack again"
            )
    if wrong:
        raise UnsupportedError(*wrong)
    like = packed.like.transpose(1, 2) if request.layout == "bshd" else packed.like
    request.packed, request.key, request.value = packed, like, like
    for name in HELD:
        setattr(request, name, getattr(packed, name))
