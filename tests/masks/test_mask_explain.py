"""What ``explain`` says of a call with a mask on a card that is not here, with fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8cutlass import BlockMask, explain
from fp8cutlass.native import extension


def told(arch: tuple[int, int], head_dim: int, mask: Any = None, **options: Any) -> str:
    """For 16 heads of 2,048 tokens, on a card of this capability."""
    with extension.assume((arch, "a card", 132)), FakeTensorMode():
        q, k, v = (torch.empty(1, 16, 2048, head_dim, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
        if mask is None:
            mask = torch.empty(2048, 2048, dtype=torch.bool, device="cuda:0")
        if mask in ("packed", "blocks"):
            sizes = (1, 1, 16, 16), (1, 1, 16), (1, 1, 16, 16, 512)
            tensors = [torch.empty(size, dtype=torch.int32, device="cuda:0") for size in sizes]
            bits = tensors[2] if mask == "packed" else None
            mask = BlockMask(*tensors[:2], bits, torch.empty((2048, 2048, 0), dtype=torch.int32, device="cuda:0"))
        return str(explain(q, k, v, mask, **options))


@pytest.mark.parametrize("mask", [None, "packed", "blocks"])
@pytest.mark.parametrize(("head_dim", "kernel"), [(64, "d64"), (80, "d128"), (128, "d128")])
def test_the_kernel_for_lists_of_tiles(head_dim: int, kernel: str, mask: Any) -> None:
    """Two tiles at a time where registers allow it and blocks were not given."""
    text, keys = told((9, 0), head_dim, mask), 256 if head_dim == 64 and mask != "blocks" else 128
    assert text.startswith(f"kernel:    sm90a_fwd_{kernel}_m128n{keys}w8") and "_block_blocks_e4m3_bf16_linear_" in text
    assert "why:       the kernel for lists of tiles of its class" in text and "known when it runs" in text
    assert ("padding:" in text) == (head_dim == 80)


def test_the_kernel_of_an_ada_card() -> None:
    text = told((8, 9), 64, "packed")
    assert text.startswith("kernel:    sm89_fwd_d64_") and "_block_blocks_e4m3_bf16_linear" in text


@pytest.mark.parametrize(
    ("arch", "head_dim", "options"),
    [((8, 9), 256, {}), ((9, 0), 256, {}), ((9, 0), 64, {"softcap": 5.0}), ((9, 0), 64, {"precision": "high"})],
)
def test_what_has_no_kernel_says_what_has(arch: tuple[int, int], head_dim: int, options: dict[str, Any]) -> None:
    text = told(arch, head_dim, **options)
    assert text.startswith("no kernel") and "boolean masks and BlockMask" in text
