"""``plan_attention``: a plan changes no bit, serves the calls that it was made for and no other, and can be traced.

Regressions these catch: a plan of other lengths, shapes or windows that is taken in silence; a refusal that comes after
tokens are written; a plan that torch.compile cannot make or take; a launch that cuts again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import Batch, make
from test_kvcache import call_of
from test_kvcache_launch import AT, OnHost, host, kernel  # noqa: F401  (fixtures)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8cutlass import UnsupportedError, attention_with_kvcache, explain_kvcache, plan_attention, supports_kvcache
from fp8cutlass.call import kvcache, kvplan
from fp8cutlass.choose import target as targets
from fp8cutlass.manifest import generated_dir
from fp8cutlass.native import extension

KEYS, ROWS = [70, 40, 128], [2, 1, 5]


def of(batch: Batch, **changes: Any) -> dict[str, Any]:
    """The arguments of a plan and of its call."""
    given = {"page_table": batch.table, "cache_seqlens": batch.lengths, "cu_seqlens_q": batch.ends}
    return given | changes


def planned(batch: Batch, **changes: Any) -> Any:
    return plan_attention(batch.q.shape, batch.cache, **of(batch, **changes))


def test_a_plan_changes_no_bit() -> None:
    batch = make(KEYS, ROWS)
    for changes in ({}, {"window_size": (20, 0)}, {"causal": False}, {"num_splits": 1}, {"max_seqlen_q": 5}):
        plan = planned(batch, **changes)
        without = attention_with_kvcache(batch.q, batch.cache, **of(batch, **changes), return_lse=True)
        found = attention_with_kvcache(batch.q, batch.cache, **of(batch, **changes), return_lse=True, plan=plan)
        assert all(torch.equal(a, b) for a, b in zip(without, found, strict=True))
    assert "3 sequences, 8 query tokens" in repr(plan)


def refusals(batch: Batch) -> dict[str, tuple[dict[str, Any], str]]:
    """What differs between a plan of ``batch`` and a call, and the words of the error."""
    wide, other = make(KEYS, ROWS, (8, 2)), make(KEYS[:2], ROWS[:2])
    return {
        "heads": ({"q": wide.q, "cache": wide.cache}, "heads of q 4, the call has 8"),
        "sequences": (
            {"q": other.q, "cache": other.cache, **of(other)}, "sequences 3, the call has 2"),
        "a window": ({"window_size": (20, 0)}, "sees before its own -1, the call has 20"),
        "no mask": ({"causal": False}, "after its own 0, the call has -1"),
        "whole": ({"num_splits": 1}, "num_splits=1 False, the call has True"),
        "room": ({"page_table": batch.table[:, :2]}, "has room for"),
        "lengths": ({"cache_seqlens": batch.lengths - 1}, r"plan was made for \[70, 40, 128\] keys"),
        "no plan": ({"plan": 3}, "plan must be what plan_attention returns, got int"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals(make(KEYS, ROWS)))
def test_a_plan_of_another_call_is_refused_by_name(name: str) -> None:
    batch = make(KEYS, ROWS)
    change, said = refusals(batch)[name]
    given = {"q": batch.q, "cache": batch.cache, "plan": planned(batch), **of(batch)} | change
    with pytest.raises(UnsupportedError, match=said):
        attention_with_kvcache(**given)
    assert not supports_kvcache(**given)[0]


def test_a_plan_of_the_keys_before_new_ones_is_refused_before_they_are_written() -> None:
    batch = make([70, 40], [1, 1])
    k = torch.ones(2, 1, 2, 64).half()
    before = batch.cache.pages.clone()  # type: ignore[union-attr]
    given = of(batch, cu_seqlens_q=None) | {"q": batch.q[:, None], "cache": batch.cache, "k": k, "v": k}
    shape = given["q"].shape
    with pytest.raises(UnsupportedError, match="the call has"):
        attention_with_kvcache(**given, plan=plan_attention(shape, batch.cache, **of(batch, cu_seqlens_q=None)))
    assert torch.equal(batch.cache.pages, before)  # type: ignore[arg-type]
    after = of(batch, cu_seqlens_q=None, cache_seqlens=batch.lengths + 1)
    attention_with_kvcache(**given, plan=plan_attention(shape, batch.cache, **after))


def test_what_a_call_refuses_its_plan_refuses() -> None:
    batch = make(KEYS, ROWS)
    for change, said in (
        ({"page_table": batch.table.long()}, "page_table must be"),
        ({"cache_seqlens": batch.lengths * 9}, "pages hold"),
        ({"window_size": (1,)}, "window_size"),
        ({"num_splits": -1}, "num_splits"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            planned(batch, **change)
    with pytest.raises(UnsupportedError, match="q must be"):
        plan_attention((3, 64), batch.cache, **of(batch))
    pair = (batch.cache.views().k, batch.cache.views().v)
    assert plan_attention(batch.q, pair, **of(batch)).form == planned(batch).form


def test_torch_compile_makes_and_takes_a_plan() -> None:
    torch._dynamo.reset()
    batch = make(KEYS, ROWS)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given = of(batch, cache_seqlens=lengths)
        plan = plan_attention(q.shape, batch.cache, **given)
        one = attention_with_kvcache(q, batch.cache, **given, plan=plan)
        return attention_with_kvcache(one, batch.cache, **given, plan=plan)  # type: ignore[arg-type]

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q: torch.Tensor, plan: Any) -> torch.Tensor:
        return attention_with_kvcache(q, batch.cache, **of(batch), plan=plan)  # type: ignore[return-value]

    one = attention_with_kvcache(batch.q, batch.cache, **of(batch))
    wanted = attention_with_kvcache(one, batch.cache, **of(batch))  # type: ignore[arg-type]
    assert torch.equal(step(batch.q, batch.lengths), wanted)
    assert torch.equal(layer(batch.q, planned(batch)), one)
    assert counter.frame_count == 2


def test_explain_says_who_cuts() -> None:
    batch = make(KEYS, ROWS)
    extra = {"q": batch.q, "cache": batch.cache}
    assert "plan" not in explain_kvcache(**extra, **of(batch))
    assert "by its plan" in explain_kvcache(**extra, **of(batch), plan=planned(batch))


def test_a_planned_launch_is_the_second_alone(host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """On a card, with the kernels' sources: the plan's cuts are those of the call."""
    batch = make(KEYS, ROWS)
    form = kvplan.Form(batch.q.device, 3, 8, 4, 2, 64, batch.table.shape[1] * 64, -1, 0, False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(kvplan, "target", lambda device: AT)
        work = kvplan.planned(form, batch.lengths, batch.ends, None)
    assert host.made == ["cut"]
    plain, _ = kvcache.on_card(call_of(batch), AT)
    found, _ = kvcache.on_card(call_of(batch, work=work), AT)
    assert host.made == ["cut", "cut", "decode", "decode"] and torch.equal(plain, found)


def test_the_operator_of_a_plan_on_tensors_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fake kernel knows how much memory the cut takes."""
    monkeypatch.setattr(extension, "built_dir", generated_dir)
    with extension.assume(((9, 0), "H200", 132)), FakeTensorMode():
        targets._target.cache_clear()
        lengths = torch.empty(8, dtype=torch.int32, device="cuda")
        work = torch.ops.fp8cutlass.plan_attention(lengths, None, 8, 4096, 32, 8, 128, -1, 0, False, None)
        assert work.dtype == torch.uint8 and work.numel() == 256 * (25 + 17) + 2 * 132 * 4 * 8 * 130
    targets._target.cache_clear()
