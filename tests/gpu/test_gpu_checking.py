"""FP8CUTLASS_CHECK=1 on a card: numbers that lie are refused by name, and neither a capture nor a right call is."""

from __future__ import annotations

import pytest
import torch
from paged_cases import make

import fp8cutlass
from fp8cutlass import UnsupportedError
from fp8cutlass.checking import VARIABLE

pytestmark = pytest.mark.gpu


@pytest.fixture
def there() -> tuple[object, dict[str, torch.Tensor]]:
    batch = make([700, 40, 130], [1, 1, 1], (8, 2), 128)
    cache = fp8cutlass.PagedKVCache(batch.cache.num_pages, 2, 128, device="cuda")
    cache.pages.copy_(batch.cache.pages)  # type: ignore[union-attr, arg-type]
    given = {"page_table": batch.table.cuda(), "cache_seqlens": batch.lengths.cuda(), "cu_seqlens_q": batch.ends.cuda()}
    return (batch.q.cuda(), cache), given


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", ["page_table", "cache_seqlens", "cu_seqlens_q"])
def test_a_number_that_lies(name: str, checked: bool, there: tuple, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    monkeypatch.setenv(VARIABLE, "1" if checked else "0")
    args, given = there
    fp8cutlass.attention_with_kvcache(*args, **given)
    wild = given[name].clone()
    wild.view(-1)[1] = 10**6 if name != "cu_seqlens_q" else 3
    given = given | {name: wild}
    if name == "page_table":
        given[name][0, :] = 10**6
    if checked:
        with pytest.raises(UnsupportedError, match="pages|keys|must rise"):
            fp8cutlass.attention_with_kvcache(*args, **given)
    else:
        assert fp8cutlass.attention_with_kvcache(*args, **given).isfinite().any()


def test_slots_and_ragged_ends(there: tuple, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    monkeypatch.setenv(VARIABLE, "1")
    _, cache = there[0]
    k = torch.zeros(2, 2, 128).half().cuda()
    with pytest.raises(UnsupportedError, match="slot_mapping"):
        cache.append(k, k, torch.tensor([3, 3]).cuda())
    q, ends = torch.randn(8, 2, 64).half().cuda(), torch.tensor([0, 8, 3], dtype=torch.int32).cuda()
    with pytest.raises(UnsupportedError, match="cu_seqlens_q must rise"):
        fp8cutlass.attention_varlen(q, q, q, ends, torch.tensor([0, 4, 8], dtype=torch.int32).cuda(), 8, 8)


def test_a_capture_is_not_waited_for(there: tuple, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    monkeypatch.setenv(VARIABLE, "1")
    args, given = there
    eager = fp8cutlass.attention_with_kvcache(*args, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8cutlass.attention_with_kvcache(*args, **given)
    graph.replay()
    assert torch.equal(out, eager)
