"""Masks that hide nothing: QwenImage and HunyuanVideo pass one in every call."""

from __future__ import annotations

import weakref

import torch

# (mask, version of it when it was looked at, whether it hides nothing) of the last mask of each shape that models pass
# to many layers.
_seen: dict[tuple[int, ...], tuple[weakref.ref[torch.Tensor], int, bool]] = {}
MOST = 64  # entries


def visible_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask, or None if it hides nothing and adds nothing.

    Looking waits for the device, once for each mask that is not the last one of its shape. Nobody looks under
    torch.compile and while a CUDA graph is captured.
    """
    if mask is None or torch.compiler.is_compiling():
        return mask
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return mask
    shape = tuple(mask.shape)
    version = 0 if mask.is_inference() else mask._version
    known = _seen.get(shape)
    if known is not None and known[0]() is mask and known[1] == version and not mask.is_inference():
        hides_nothing = known[2]
    else:
        hides_nothing = bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
        if len(_seen) >= MOST:
            _seen.clear()
        _seen[shape] = weakref.ref(mask), version, hides_nothing
    return None if hides_nothing else mask
