"""Torch dtypes, the names that manifest and table have for them, and FP8 as float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from .manifest import INTEGER

DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # of FP8 operands
HALF_DTYPES = (torch.bfloat16, torch.float16)  # of operands that are quantised inside
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
OUT_NAMES = {dtype: name for name, dtype in OUT_DTYPES.items()}


@dataclass(frozen=True)
class Operand:
    """What a kernel reads.

    Attributes:
        qk, v: the dtypes of Q and K, and of V.
        shared: of "q", "k" and "v" what shares a descale, where that is not what the scaling mode says.
    """

    qk: torch.dtype
    v: torch.dtype
    shared: Mapping[str, str] = field(default_factory=dict)

    def granularity(self, mode: Mapping[str, str]) -> dict[str, str]:
        """What shares a descale in "q", "k" and "v"; ``mode`` is a scaling mode of the manifest."""
        return {**mode, **self.shared}


OPERANDS = {  # by the dtype of a variant
    "e4m3": Operand(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": Operand(torch.float8_e5m2, torch.float8_e5m2),
    "s8": Operand(torch.int8, torch.float8_e4m3fn, {"k": "group"}),
    "s8u8": Operand(torch.int8, torch.int8, {"k": "group", "v": "token"}),
}
INTEGER_SCALING = "block"  # the scaling mode of operands that become integers


def operand_name(dtype: torch.dtype, precision: str) -> str:
    """The dtype of a variant for a call on operands of ``dtype``."""
    return DTYPE_NAMES.get(dtype) or INTEGER.get(precision, "e4m3")


@cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    """Of all bytes."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x.float()`` of numbers of one byte. On a CPU, where torch converts FP8 one by one, they are looked up."""
    if x.device.type != "cpu" or not x.dtype.is_floating_point or x.dtype.itemsize > 1:
        return x.float()
    return _values(x.dtype).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)
