"""The arguments of a call of ``attention``, as given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cache.packed import HELD, PackedKV
from ..errors import UnsupportedError
from .options import Options

DEFAULTS = Options()
POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
TENSORS = ("query", "key", "value", "attn_mask", "q_descale", "k_descale", "v_descale", "out_descale", "out")


@dataclass(frozen=True)
class Request:
    """The arguments of ``attention``, unchecked; ``attention`` documents them.

    Where key is a PackedKV, :func:`opened` puts it into ``packed`` and a tensor into its place.
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

    def bhsd(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value viewed as (B, H, S, D); the tensors are known to have four dimensions."""
        if self.options.layout == "bhsd":
            return self.query, self.key, self.value
        return self.query.transpose(1, 2), self.key.transpose(1, 2), self.value.transpose(1, 2)


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


def opened(request: Request) -> Request:
    """The request itself; where its key is packed one on tensors, so that everything that is known of calls holds for
    it: ``like`` stands for key and value, and what packing has settled is filled in.

    UnsupportedError for arguments that say otherwise.
    """
    packed = request.key
    if not isinstance(packed, PackedKV):
        return request
    wrong = []
    if request.value is not None:
        wrong.append(f"value must be None where key is a PackedKV, which holds it, got {type(request.value).__name__}")
    for name in HELD:
        given, held = getattr(request.options, name), getattr(packed, name)
        if not any(type(given) is type(fits) and given == fits for fits in (held, getattr(DEFAULTS, name))):
            wrong.append(
                f"{name}={given!r} is not what key was packed with, {name}={held!r}: leave it out, or pack again"
            )
    if wrong:
        raise UnsupportedError(*wrong)
    like = packed.like.transpose(1, 2) if request.options.layout == "bshd" else packed.like
    options = request.options._replace(**{name: getattr(packed, name) for name in HELD})
    return replace(request, key=like, value=like, packed=packed, options=options)
