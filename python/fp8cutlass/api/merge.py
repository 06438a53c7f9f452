"""``merge_attention``: one result of two that were attended over different keys."""

from __future__ import annotations

from typing import Any

import torch

from ..call.merge import merge_into, merged
from ..call.options import one_of
from ..errors import UnsupportedError

LAYOUTS = ("bhsd", "bshd")


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    layout: str = "bhsd",
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over all keys of two results over a part of them each, in float32.

    The weights are those of the LSEs: ``out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)``. A row that saw
    no key in either part stays 0, its LSE -inf. On a card a kernel does it: with ``inplace`` and a bf16 ``out_b`` it
    moves 10 bytes an element. Torch operations, which move 18, do it elsewhere, under torch.compile, with gradients,
    and where D or a step of ``out`` is no multiple of 4.

    Args:
        out_a, out_b: (B, H, S, D), or (B, S, H, D) with ``layout="bshd"``; bf16, fp16 or float32.
        lse_a, lse_b: (B, H, S) float32, natural logarithms: of ``attention(..., return_lse="merge")``, or both of
            ``return_lse=True``. One of each kind would shift the weights by some percent.
        inplace: write into ``out_a`` and ``lse_a``, which are float32, and return them.

    Raises:
        UnsupportedError: shapes, dtypes or devices do not fit.
    """
    _check(out_a, lse_a, out_b, lse_b, layout, inplace)
    first, second = (x if layout == "bhsd" else x.transpose(1, 2) for x in (out_a, out_b))
    if inplace:
        merge_into(first, lse_a, second, lse_b)
        return out_a, lse_a
    out, lse = merged(first, lse_a, second, lse_b)
    return out if layout == "bhsd" else out.transpose(1, 2), lse


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, layout: str, inplace: bool) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    wrong = [
        f"{name} must be a torch.Tensor, got {type(x).__name__}"
        for name, x in named.items()
        if not isinstance(x, torch.Tensor)
    ]
    if (reason := one_of("layout", layout, LAYOUTS)) is not None:
        wrong.append(reason)
    if not wrong and out_a.dim() != 4:
        wrong.append(f"out_a must have 4 dimensions, got shape {tuple(out_a.shape)}")
    if wrong:
        raise UnsupportedError(*wrong)
    rows = out_a.shape[:3] if layout == "bhsd" else (out_a.shape[0], out_a.shape[2], out_a.shape[1])
    halves = (torch.bfloat16, torch.float16, torch.float32)
    for name, x in named.items():
        shape, dtypes = (tuple(out_a.shape), halves) if name.startswith("out") else (tuple(rows), (torch.float32,))
        if tuple(x.shape) != shape:
            wrong.append(f"{name} must have shape {shape}, got {tuple(x.shape)}")
        if x.dtype not in dtypes or (inplace and name == "out_a" and x.dtype != torch.float32):
            accepted = (
                "torch.float32 with inplace=True" if name == "out_a" and inplace else " or ".join(map(str, dtypes))
            )
            wrong.append(f"{name} must be {accepted}, got {x.dtype}")
        if x.device != out_a.device:
            wrong.append(f"{name} is on {x.device}, out_a is on {out_a.device}")
    if wrong:
        raise UnsupportedError(*wrong)
