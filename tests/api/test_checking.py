"""FP8CUTLASS_CHECK: where a call looks at numbers that only a card knows. tests/gpu/test_gpu_checking.py has a card.

Regressions these catch: a check that waits for a card unasked, or in a capture; a call that looks at nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_cases import make

from fp8cutlass import UnsupportedError, attention_varlen, checking
from fp8cutlass.api import kvcache as calls
from fp8cutlass.api import varlen
from fp8cutlass.cache import paged
from fp8cutlass.call import kvappend


class OnCard:
    """What a tensor on a card says of itself."""

    is_cuda = True
    device = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(("value", "looks"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_a_card_is_asked_where_that_is_wanted(value: str | None, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checking.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(checking.VARIABLE, value)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert checking.looks_at(OnCard()) is looks  # type: ignore[arg-type]
    assert checking.looks_at(torch.zeros(1)) and not checking.looks_at(torch.zeros(1, device="meta"))
    capturing = True
    assert not checking.looks_at(OnCard())  # type: ignore[arg-type]


def test_nothing_is_looked_at_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checking.VARIABLE, "1")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not checking.looks_at(torch.zeros(1)) and not checking.looks_at(OnCard())  # type: ignore[arg-type]


def wild_pages() -> None:
    batch = make([70, 40], [1, 1])
    batch.run(page_table=batch.table.clamp(max=10**6) + 10**6)


def far_lengths() -> None:
    make([70, 40], [1, 1]).run(cache_seqlens=torch.tensor([70, 10**6], dtype=torch.int32))


def falling_ends() -> None:
    make([70, 40], [1, 1]).run(cu_seqlens_q=torch.tensor([0, 2, 1], dtype=torch.int32))


def falling_ends_of_a_ragged_batch() -> None:
    q = torch.randn(8, 2, 64).half()
    ends = torch.tensor([0, 8, 3], dtype=torch.int32)
    attention_varlen(q, q, q, ends, torch.tensor([0, 4, 8], dtype=torch.int32), 8, 8)


def slots_out_of_range() -> None:
    batch = make([70], [1])
    batch.cache.append(batch.k[0][:1], batch.v[0][:1], torch.tensor([10**6]))


def pages_that_are_not_there() -> None:
    cache = make([70], [1]).cache
    cache.copy_pages(torch.tensor([0]), torch.tensor([99]))


def a_page_to_reset_that_is_not_there() -> None:
    make([70], [1]).cache.reset(torch.tensor([99]))


def two_tokens_for_a_slot() -> None:
    """Two sequences that end in one page."""
    batch = make([70], [1])
    k = torch.zeros(2, 1, 2, 64).half()
    table, lengths = batch.table.repeat(2, 1), torch.tensor([70, 70], dtype=torch.int32)
    ends = torch.tensor([0, 1, 1], dtype=torch.int32)
    batch.run(page_table=table, cache_seqlens=lengths, cu_seqlens_q=ends, k=k, v=k)


CALLS: dict[Callable[[], None], tuple[Any, str]] = {
    wild_pages: (calls, "page_table of sequence 0 must name pages"),
    far_lengths: (calls, "sequence 1 has 1000000 keys"),
    falling_ends: (calls, "cu_seqlens_q must rise"),
    falling_ends_of_a_ragged_batch: (varlen, "cu_seqlens_q must rise"),
    slots_out_of_range: (paged, "slot_mapping must be -1 to"),
    pages_that_are_not_there: (paged, "dst must be 0 to"),
    a_page_to_reset_that_is_not_there: (paged, "pages must be 0 to"),
    two_tokens_for_a_slot: (kvappend, "has a number twice"),
}


@pytest.mark.parametrize("wrong", CALLS, ids=lambda f: f.__name__)
def test_each_check_asks_whether_it_may_look(wrong: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it may, the call is refused by name. Where it may not, as on a card, it is clamped or ignored."""
    module, text = CALLS[wrong]
    with pytest.raises(UnsupportedError, match=text):
        wrong()
    monkeypatch.setattr(module, "looks_at", lambda x: False)
    if module is not varlen:  # whose emulator is a slice of what it is given
        wrong()
