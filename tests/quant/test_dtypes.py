"""FP8 as float32, by a table on the CPU.

Regressions these catch: a byte whose number is another one than torch says, NaN and infinities among them; a view whose
elements are read in another order; a shape that is lost.
"""

from __future__ import annotations

import pytest
import torch

from fp8cutlass.dtypes import widened

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def bits(x: torch.Tensor) -> torch.Tensor:
    """So that a NaN equals itself."""
    return x.view(torch.int32)


@pytest.mark.parametrize("dtype", FP8)
def test_every_byte_is_what_torch_says(dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert torch.equal(bits(widened(x)), bits(x.float()))


@pytest.mark.parametrize("dtype", FP8)
def test_views_keep_their_order_and_shape(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5, 8).to(dtype)
    for view in (x, x.transpose(1, 2), x[:, ::2, 1:], x[:0], x[0, 0, 0, 0], x[:1].expand(6, -1, -1, -1)):
        assert torch.equal(widened(view), view.float())


def test_other_numbers_are_converted() -> None:
    for x in (torch.tensor([-128, 127], dtype=torch.int8), torch.tensor([1.5]).half()):
        assert torch.equal(widened(x), x.float())


def test_a_tensor_without_data_has_none_looked_up() -> None:
    assert widened(torch.empty(2, 3, dtype=torch.float8_e4m3fn, device="meta")).shape == (2, 3)
