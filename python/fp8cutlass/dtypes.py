"""Torch dtypes and the names that manifest and table have for them."""

from __future__ import annotations

import torch

DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}  # of FP8 operands
HALF_DTYPES = (torch.bfloat16, torch.float16)  # of operands that are quantised inside
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
OUT_NAMES = {dtype: name for name, dtype in OUT_DTYPES.items()}
