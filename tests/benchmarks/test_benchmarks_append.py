"""The benchmark of append without a card: its operands and what counts as a result."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.append import FORMATS, PAGE, TOKENS, by_kernel, by_torch, different, make


@pytest.mark.parametrize("format", FORMATS)
def test_all_tokens_are_written_and_a_byte_is_noticed(format: str) -> None:
    for tokens in TOKENS[:2]:
        data = make(tokens, format, "cpu")
        wanted = by_torch(data).clone()
        pages = data.slots // PAGE
        assert len(set(data.slots.tolist())) == tokens and wanted[0].any(-1).sum() == len(set(pages.tolist()))
        assert different(wanted, by_torch(data)) == 0.0
        data.pages.view(-1)[5] ^= 1
        assert different(wanted, data.pages) == math.inf


def test_where_there_is_no_kernel_it_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="does not take"):
        by_kernel(make(1, "native", "cpu"))


def test_slots_of_a_prefill_are_pages_in_a_row() -> None:
    data = make(2048, "nhd", "cpu")
    assert torch.equal(data.slots, torch.arange(2048)) and data.cache.num_pages == 2048 // PAGE
