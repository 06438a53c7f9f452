"""supports_kvcache and explain_kvcache say what attention_with_kvcache does, and launch nothing.

Regressions these catch: a yes for a call that is refused, a no without the call's words, an answer that appends, a
kernel that the launch would not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import Batch, make
from test_kvcache import refused

from fp8cutlass import PagedKVCache, UnsupportedError, attention_with_kvcache, explain_kvcache, supports_kvcache
from fp8cutlass.call.kvexplain import KVProblem, answer, chosen, describe
from fp8cutlass.call.kvlaunch import rows_of
from fp8cutlass.choose import target as targets
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir
from fp8cutlass.native import extension
from fp8cutlass.native.decode import kernel_for

CUDA = torch.device("cuda", 0)


def call(batch: Batch, **changes: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    given = {"page_table": batch.table, "cache_seqlens": batch.lengths, "cu_seqlens_q": batch.ends} | changes
    return (given.pop("q", batch.q), given.pop("cache", batch.cache)), given


def test_yes_where_the_call_runs() -> None:
    batch = make([70, 40, 128], [2, 1, 5], format="nhd")
    args, kwargs = call(batch, num_splits=3, window_size=(20, 0))
    assert supports_kvcache(*args, **kwargs) == (True, "the emulator of decode")
    said = explain_kvcache(*args, **kwargs)
    assert "emulator" in said and "one a head, beside the cache" in said and "in 3 parts" in said
    assert "20 keys before and 0 after" in said and "pages of 64 tokens" in said
    attention_with_kvcache(*args, **kwargs)


def test_no_with_the_words_of_the_call() -> None:
    batch = make([70, 40, 128], [2, 1, 5])
    batch.table = batch.table[:, :2]
    for change, _ in refused(batch):
        args, kwargs = call(batch, **change)
        with pytest.raises(UnsupportedError) as error:
            attention_with_kvcache(*args, **kwargs)
        assert supports_kvcache(*args, **kwargs) == (False, str(error.value))
        said = explain_kvcache(*args, **kwargs)
        assert said.startswith("no kernel: ") and all(reason in said for reason in error.value.reasons)
    for ask in (supports_kvcache, explain_kvcache):
        with pytest.raises(TypeError):
            ask(batch.q, batch.cache, cache_leftpad=batch.lengths)
    wanting = batch.q.clone().requires_grad_()
    assert "requires_grad" in supports_kvcache(*call(batch, q=wanting)[0], **call(batch)[1])[1]


def test_nothing_is_appended() -> None:
    batch = make([70, 40], [1, 1])
    before = batch.cache.pages.clone()  # type: ignore[union-attr]
    k = torch.ones(2, 1, 2, 64).half()
    args, kwargs = call(batch, k=k, v=k)
    assert supports_kvcache(*args, **kwargs)[0] and explain_kvcache(*args, **kwargs)
    assert torch.equal(batch.cache.pages, before)  # type: ignore[arg-type]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """An H200 that is not here, with the release profile built."""
    at = Target(generated_dir(), "sm90a", 132)
    monkeypatch.setattr(extension, "built_dir", generated_dir)
    with extension.assume(((9, 0), "H200", 132)):
        targets._target.cache_clear()
        yield at
    targets._target.cache_clear()


PROBLEM = KVProblem(sequences=8, tokens=8, heads=32, kv_heads=8, head_dim=128, page_size=64)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("tokens", "most"), [(8, None), (8, 1), (40, None), (64, 16), (9, None), (0, None)])
def test_the_kernel_is_that_of_the_launch(card: Target, head_dim: int, tokens: int, most: int | None) -> None:
    problem = replace(PROBLEM, head_dim=head_dim, tokens=tokens, most_q=most)
    kernel, _ = kernel_for(card.directory, card.arch, head_dim, rows_of(tokens, 8, 4, most), few=True)
    assert chosen(problem, card) == kernel and answer(problem, CUDA).startswith(f"{kernel.id} (")
    served, said = describe(problem, CUDA)
    assert served and f"kernel:    {kernel.id}\n" in said and said.endswith("built: yes")
    assert ("by max_seqlen_q" in said) == (most is not None)


def test_no_kernel_for_a_head_dim_or_a_device(card: Target) -> None:
    served, said = describe(replace(PROBLEM, head_dim=80), CUDA)
    assert not served and said.startswith("no kernel: decode on sm90a") and said.endswith("got 80")
    with pytest.raises(UnsupportedError, match="got 80"):
        answer(replace(PROBLEM, head_dim=80), CUDA)
    nobody = "attention_with_kvcache has no kernel for meta"
    assert describe(PROBLEM, torch.device("meta")) == (False, f"no kernel: {nobody}")
    cache = PagedKVCache(4, 2, 64, device="meta")
    q, table = torch.zeros(1, 1, 4, 64, device="meta").half(), torch.zeros(1, 2, dtype=torch.int32, device="meta")
    given: dict[str, Any] = {"page_table": table, "cache_seqlens": 3}
    assert supports_kvcache(q, cache, **given) == (False, nobody)
    assert "no kernel for meta" in explain_kvcache(q, cache, **given)


def test_not_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise UnsupportedError("nothing is built")

    monkeypatch.setattr(extension, "built_dir", nothing)
    with extension.assume(((9, 0), "H200", 132)):
        targets._target.cache_clear()
        served, said = describe(PROBLEM, CUDA)
        assert served and said.endswith("built: no; nothing is built") and "decode_sm90a_d128_r8" in said
        with pytest.raises(UnsupportedError, match="nothing is built"):
            answer(PROBLEM, CUDA)
    targets._target.cache_clear()
