"""``supports`` and ``explain``: what ``attention`` would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ..call.explain import describe
from ..call.request import request_of
from ..call.supports import answer
from ..choose.target import integers_up_to, masked_up_to
from . import jagged

if TYPE_CHECKING:
    from .arguments import Arguments, Unpack


def supports(*args: Any, **kwargs: Unpack[Arguments]) -> tuple[bool, str]:
    """Say whether ``attention(*args, **kwargs)`` would run, and by which kernel or why not. Nothing is launched.

    ``fallback`` is not considered. An argument that ``attention`` does not have is a TypeError here too. torch.compile
    traces it; the answer then names no kernel. An answer that was given before takes less time than a call.
    """
    if jagged.is_jagged(args[0] if args else kwargs.get("query")):
        return jagged.served(request_of(*args, **kwargs))
    return answer(args, kwargs)  # type: ignore[arg-type]


def widest_masked(device: torch.device) -> int:
    """The widest head_dim whose boolean masks a device has kernels for; 0 where it has none."""
    return masked_up_to(device.type, device.index)


def widest_integer(device: torch.device, precision: Literal["int8", "int8_full"]) -> int:
    """The widest head_dim that a device has kernels of 8-bit integers for; 0 where it has none."""
    return integers_up_to(device.type, device.index, precision)


def explain(*args: Any, **kwargs: Unpack[Arguments]) -> str:
    """Describe what ``attention(*args, **kwargs)`` would run, as text of a few lines: the kernel, the criterion and the
    evidence behind the choice (``model`` or ``measured``), the runner-up, and whether the kernel is built for the
    device; or every reason why there is none. Nothing is launched.
    """
    request = request_of(*args, **kwargs)
    if jagged.is_jagged(request.query):
        served, text = jagged.served(request)
        return f"kernel:    {text}" if served else f"no kernel: {text}"
    return describe(request)
