"""Copies in words of 8 bytes: the same bytes as torch's copies, whatever tensors begin and end at.

Regressions these catch: words taken of rows that begin between them, and copies that fall back to single elements."""

from __future__ import annotations

import pytest
import torch

from fp8cutlass import memory
from fp8cutlass.memory import WORD, as_bytes, concatenated, copy_into, in_one, words

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
CUTS = {  # of (2, 3, 16, 24): a view, and whether it consists of words in any dtype
    "whole": (lambda x: x, True),
    "rows": (lambda x: x[:, :, 3:9], True),
    "columns": (lambda x: x[..., 8:16], True),
    "odd_columns": (lambda x: x[..., 3:14], False),
    "transposed": (lambda x: x.transpose(1, 2), True),
    "rows_apart": (lambda x: x.transpose(2, 3), False),
}


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORTH", 0)


def drawn(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bytes, NaN among them."""
    size = (2, 3, 16, 24 * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_copies_are_torchs(dtype: torch.dtype, cut: str) -> None:
    some, by_words = CUTS[cut]
    a, b = some(drawn(dtype)), some(drawn(dtype, 1))
    if by_words or dtype.itemsize < WORD.itemsize:
        assert (words(a, b)[0].dtype is WORD) is by_words
    for dim in range(4):
        want = torch.cat([as_bytes(a), as_bytes(b)], dim)
        assert torch.equal(bits(concatenated([a, b], dim)), bits(want))
        assert concatenated([a], dim).data_ptr() != a.data_ptr()
    room = torch.zeros_like(a)
    copy_into(room, a)
    assert torch.equal(bits(room), bits(a))


def test_bytes_of_several_dtypes_follow_one_another() -> None:
    """Also after a tensor whose bytes are not a multiple of 8."""
    a, b, c = drawn(torch.uint8)[0, 0, 0, :5], drawn(torch.uint8, 1)[..., 3:14], drawn(torch.uint8, 2)[:, :, 2:4]
    found = in_one([a, b, c])
    assert torch.equal(found, torch.cat([x.flatten() for x in (a, b, c)]))
    wide, narrow = drawn(torch.float32)[:, 1:], drawn(torch.bfloat16, 1)
    assert torch.equal(in_one([wide, narrow]), torch.cat([bits(wide).flatten(), bits(narrow).flatten()]))


def test_no_words_where_gradients_are_wanted() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    assert words(x, x)[0] is x and concatenated([x, x], 0).requires_grad


def test_small_tensors_are_copied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(torch.uint8)
    monkeypatch.setattr(memory, "WORTH", x.numel())
    assert words(x)[0].dtype is WORD
    monkeypatch.setattr(memory, "WORTH", x.numel() + 1)
    assert words(x)[0] is x
