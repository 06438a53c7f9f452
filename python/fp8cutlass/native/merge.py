"""The kernel that merges the results of attention over two parts of the keys."""

from __future__ import annotations

import torch

from .._ops import compiled
from ..errors import UnsupportedError
from . import extension

COLUMNS = 4  # of a row, that are read at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def merges(out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor) -> bool:
    """Whether the kernel takes them, (B, H, S, D) and (B, H, S) of one shape: plain tensors without gradients, on a
    card that something is built for, with rows that it can read."""
    given = (out, lse, to, to_lse)
    if torch.compiler.is_compiling() or any(type(x) is not torch.Tensor or not x.is_cuda for x in given):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    if out.dtype != torch.float32 or to.dtype not in DTYPES or not (_has_rows(out) and _has_rows(to)):
        return False
    if any(size > 1 and step == 0 for x in (out, lse) for size, step in zip(x.shape, x.stride(), strict=True)):
        return False
    try:
        return bool(extension.device_arch(out.device))
    except UnsupportedError:
        return False


def _has_rows(x: torch.Tensor) -> bool:
    steps = (step for size, step in zip(x.shape[:3], x.stride(), strict=False) if size > 1)
    aligned = x.shape[3] % COLUMNS == 0 and all(step % COLUMNS == 0 for step in steps)
    return x.stride(3) == 1 and aligned and x.data_ptr() % (COLUMNS * x.element_size()) == 0


def merge(out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor) -> None:
    """Merge ``to`` into ``out``, its LSE into ``lse``. :func:`merges` says whether it can; nothing is waited for."""
    extension.load()
    compiled().merge(out, lse, to, to_lse)
