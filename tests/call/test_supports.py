"""`supports`: a kept answer must be that of the call that is asked about, and torch.compile traces the question.

Regressions these catch: an answer kept for another call, device or state of the program; a question that a graph breaks
on; an answer that takes as long as a call.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from reference import randn
from torch.nn.attention.bias import causal_lower_right

from fp8cutlass import PackedKV, UnsupportedError, attention, pack_kv, quantize, supports
from fp8cutlass.call import supports as module
from fp8cutlass.call.settle import settle
from fp8cutlass.native import extension

Q, K, V = (randn(2, 4, rows, 64, seed=seed) for seed, rows in enumerate((16, 40, 40)))
FP8 = [quantize(x, granularity="head") for x in (Q, K, V)]
DESCALES = {f"{name}_descale": d for name, (_, d) in zip("qkv", FP8, strict=True)}
PACKED = pack_kv(K, V)


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    module.forget()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each question that is answered the long way."""
    seen: list[int] = []
    monkeypatch.setattr(module, "settle", lambda request: seen.append(1) or settle(request))
    return seen


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((Q, K, V), {}),
    ((Q, K, V), {"is_causal": True, "scale": 0.3}),
    ((Q, K, V, None, 0.5), {}),
    ((Q, K, V, torch.ones(16, 40, dtype=torch.bool)), {}),
    ((Q, PACKED), {}),
    ((Q, PACKED), {"is_causal": 1}),
    (tuple(x for x, _ in FP8), {**DESCALES, "scaling": "head"}),
    (tuple(x for x, _ in FP8), {}),
    ((Q[0], K[0], V[0, ..., :32]), {"window_size": (3, 0)}),
    ((Q.float(), K.float(), V.float()), {}),
    ((Q, K, V), {"kernel": "nothing"}),
]


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_an_answer_is_looked_up_and_stays_the_same(at: int, asked: list[int]) -> None:
    args, kwargs = CALLS[at]
    first = supports(*args, **kwargs)
    assert supports(*args, **kwargs) == first and len(asked) == 1
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    assert supports(*copies, **kwargs) == first and len(asked) == 1
    try:
        attention(*args, **kwargs)
        assert first[0]
    except UnsupportedError as error:
        assert first == (False, str(error))


CHANGES: list[dict[str, Any]] = [
    {"query": Q[:, :, :5]},
    {"key": K.half(), "value": V.half()},
    {"value": V.to("meta")},
    {"query": Q.clone().requires_grad_()},
    {"attn_mask": torch.ones(1)},
    {"attn_mask": causal_lower_right(16, 40)},
    {"is_causal": 1},
    {"is_causal": True},
    {"dropout_p": 0.25},
    {"scale": torch.tensor([0.1])},
    {"scale": True},
    {"window_size": (2, True)},
    {"window_size": [2, -3]},
    {"window_size": (2.0, 1)},
    {"q_descale": 1.0},
    {"out_descale": 1.0},
    {"out": torch.zeros(1)},
    {"layout": ["bhsd"]},
    {"precision": "high"},
    {"kernel": "nothing"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_no_answer_is_taken_for_another_call(change: dict[str, Any]) -> None:
    plain = {"query": Q, "key": K, "value": V}
    base = supports(**plain)
    fresh = []
    for call in (plain | change, plain):
        module.forget()
        fresh.append(supports(**call))
    module.forget()
    assert base == fresh[1]
    supports(**plain)
    assert supports(**plain | change) == fresh[0] and supports(**plain) == base


def test_the_state_of_the_program_counts() -> None:
    grad = Q.clone().requires_grad_()
    assert not supports(grad, K, V)[0]
    with torch.no_grad():
        assert supports(grad, K, V)[0]
    assert not supports(Q.float(), K, V)[0]
    with torch.autocast("cpu"):
        assert supports(Q.float(), K, V)[0]
    assert not supports(Q.float(), K, V)[0] and supports(Q, K, V)[0]
    with torch.autograd.forward_ad.dual_level():
        assert not supports(Q, K, V)[0]
    meta = [x.to("meta") for x in (Q, K, V)]
    before = supports(*meta)
    with extension.assume(((9, 0), "NVIDIA H200", 132)):
        supports(*meta)
        assert len(module._answers) >= 2
    assert supports(*meta) == before


def test_an_out_is_looked_at_each_time() -> None:
    """Its memory may be the query's, which no metadata tells."""
    assert supports(Q, K, V, out=torch.empty_like(Q))[0]
    assert not supports(Q, K, V, out=Q)[0]


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 3)
    for keys in range(1, 9):
        supports(Q, K[:, :, :keys], V[:, :, :keys])
    assert len(module._answers) <= 3


def test_a_known_answer_takes_less_than_the_checks() -> None:
    """A call on a card launches at least one kernel after these; the best of many, as other programs run here too."""

    def best(ask: Any) -> float:
        times = []
        for _ in range(200):
            begun = time.perf_counter()
            ask()
            times.append(time.perf_counter() - begun)
        return min(times)

    def anew() -> None:
        module.forget()
        supports(Q, K, V)

    assert 3 * best(lambda: supports(Q, K, V)) < best(anew)


# ---- torch.compile --------------------------------------------------------------------------------------------------


def adapter(q: torch.Tensor, k: Any, v: Any = None, **options: Any) -> Any:
    """What an integration does: ask, then call the one or the other."""
    if supports(q, k, v, **options)[0]:
        return attention(q, k, v, **options), 1
    return q * 2, 0


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("at", range(len(CALLS)))
def test_the_question_is_traced(at: int, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    args, kwargs = CALLS[at]
    if args[0].dtype == torch.float8_e4m3fn and not kwargs or kwargs.get("is_causal") == 1 and len(args) == 2:
        pytest.skip("the other branch multiplies by 2, which FP8 does not")
    compiled = torch.compile(adapter, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    if len(args) > 3:
        kwargs = {**kwargs, **dict(zip(("attn_mask", "dropout_p"), args[3:], strict=False))}
    got, want = compiled(*args[:3], **kwargs), adapter(*args[:3], **kwargs)
    assert got[1] == want[1] and torch.equal(got[0], want[0])


@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_answers_for_many_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(adapter, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, rows, keys in ((3, 37, 130), (5, 64, 300), (7, 129, 257)):
        q, k = randn(batch, 4, rows, 40, seed=1), randn(batch, 4, keys, 40, seed=2)
        got, served = compiled(q, k, k)
        assert served == 1 and torch.equal(got, attention(q, k, k))


def test_what_no_kernel_reads_is_said_while_tracing() -> None:
    torch._dynamo.reset()

    def ask(q: torch.Tensor, packed: PackedKV) -> tuple[bool, str]:
        return supports(q, packed, kernel="nothing")

    served, why = torch.compile(ask, fullgraph=True, backend="aot_eager")(Q, PACKED)
    assert not served and "nothing" in why and "manifest" in why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(lambda q: supports(q, q, q), fullgraph=True, backend="aot_eager")(Q)[0]
