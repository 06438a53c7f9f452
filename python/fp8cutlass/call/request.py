"""The arguments of a call of ``attention``, as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache.packed import PackedKV
from .options import Options

DEFAULTS = Options()
POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
TENSORS = ("query", "key", "value", "attn_mask", "q_descale", "k_descale", "v_descale", "out_descale", "out", "sinks")


@dataclass(frozen=True)
class Request:
    """The arguments of ``attention``, unchecked; ``attention`` documents them.

    Where key is a PackedKV, ``enter.opened`` puts it into ``packed`` and a tensor into its place.
    """

    query: torch.Tensor
    key: Any
    value: Any = None
    attn_mask: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    out_descale: Any = None
    out: Any = None
    options: Options = DEFAULTS
    packed: PackedKV | None = None
    sinks: Any = None

    def bhsd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value viewed as (..., H, S, D)."""
        if self.options.layout == "bhsd":
            return self.query, self.key, self.value
        q, k, v = (x.transpose(-3, -2) if x.dim() > 2 else x for x in (self.query, self.key, self.value))
        return q, k, v


def request_of(*args: Any, **kwargs: Any) -> Request:
    """The request of ``attention(*args, **kwargs)``; TypeError for arguments that it does not have."""
    if len(args) > len(POSITIONAL):
        raise TypeError(f"attention() takes {len(POSITIONAL)} positional arguments at most, got {len(args)}")
    given = dict(zip(POSITIONAL, args, strict=False))
    for name in kwargs:
        if name in given:
            raise TypeError(f"attention() got multiple values for argument {name!r}")
        if name not in TENSORS and name not in Options._fields:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    given.update(kwargs)
    for name in ("query", "key"):
        if name not in given:
            raise TypeError(f"attention() misses the argument {name!r}")
    options = Options(**{name: given.pop(name) for name in Options._fields if name in given})
    return Request(**given, options=options)
