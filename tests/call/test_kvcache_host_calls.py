"""What Python does of a call of ``attention_with_kvcache`` on a card, counted: functions of the package, and operations
of torch, from the arguments to the extension's operator, which is a stub here.

Regressions these catch: descales that are spread or filled, a page table, lengths or queries that are copied, a cast of
sinks, a result that is copied to ``out``, views that are made anew, checks that run again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operators import stated
from test_host_calls import functions, operations

from fp8cutlass import PagedKVCache, UnsupportedError, attention_with_kvcache, plan_attention
from fp8cutlass.api import kvcache
from fp8cutlass.cache import kernel as cache_kernel
from fp8cutlass.call import kvappend, kvmemo, kvmemo_append
from fp8cutlass.call import kvcache as call_kvcache
from fp8cutlass.call import kvplan as plans
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir
from fp8cutlass.native import extension

Call = Callable[[], Any]
FIELDS = tuple(
    re.findall(r"^X\(\w+, (\w+),", (Path(__file__).parents[2] / "csrc" / "decode.def").read_text(), flags=re.MULTILINE)
)
AT = Target(generated_dir(), "sm90a", 132)
# Operations without a kernel: views, memory, and the numbers of the first argument, which are the host's.
HOST_ONLY = {
    "aten::" + name
    for name in "empty view select slice as_strided transpose unflatten expand reshape _reshape_alias alias new_empty "
    "unsqueeze unbind lift_fresh detach_ to".split()
}


class Card:
    """The extension's operators: ``given`` are the tensors of each launch."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.cuts = 0
        self.out = torch.empty(0)
        self.refuses = ""
        self.appended: list[tuple[Any, ...]] = []
        self.decode = SimpleNamespace(default=SimpleNamespace(_op=self._attend))
        self.append = Append(self)

    def cut(self, *given: Any) -> None:
        self.cuts += 1

    def _attend(self, *given: Any) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.given.append(given)
        return self.out


class Append:
    """The operator that appends, by its packet or by its overload. It makes each length one more."""

    def __init__(self, card: Card) -> None:
        self.card, self.default = card, SimpleNamespace(_op=self)

    def __call__(self, *given: Any) -> None:
        if self.card.refuses:
            raise RuntimeError(self.card.refuses)
        self.card.appended.append(given)
        torch.add(given[APPEND.index("lengths")], ONE, out=given[APPEND.index("used")])


ONE = torch.ones(1, dtype=torch.int32)
APPEND = [argument.name for argument in stated()["append"].arguments]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card()
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", made, raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(extension, "decode_fields", lambda: FIELDS)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for module in (call_kvcache, kvmemo, plans):
        monkeypatch.setattr(module, "target", lambda device: AT)
    for module in (kvcache, plans, kvappend):
        monkeypatch.setattr(module, "looks_at", lambda x: False, raising=False)
    monkeypatch.setattr(cache_kernel, "_there", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kvmemo.forget()
    yield made
    kvmemo.forget()


def arguments(queries: int = 1) -> dict[str, Any]:
    """Two sequences in pages of 64 tokens, heads 8 on 2, head_dim 64."""
    q = torch.randn(2, queries, 8, 64).bfloat16()
    table = torch.zeros(2, 5, dtype=torch.int32)[:, :3]  # of more columns: not contiguous
    return {"q": q, "page_table": table, "cache_seqlens": torch.tensor([100, 7], dtype=torch.int32)}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.zeros(2, 4, 64, 2, 64).to(torch.float8_e4m3fn)
    return k, v


def calls() -> dict[str, Call]:
    given = arguments()
    fused = torch.randn(2, 1, 12, 64).bfloat16()[:, :, 2:10]  # of a projection of Q, K and V
    ragged = {"q": given["q"][:, 0], "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}
    descale = torch.tensor([0.5])
    whole = torch.zeros(2, 192, 2, 64).to(torch.float8_e4m3fn)
    call = partial(attention_with_kvcache, **given)
    native, engine = PagedKVCache(4, 2, 64, layers=3), PagedKVCache(4, 2, 64, format="nhd", k_descale=0.5)
    return {
        "native": partial(call, cache=native),
        "native, another layer": partial(call, cache=native, layer=2),
        "nhd": partial(call, cache=engine),
        "a pair": partial(call, cache=pair()),
        "descales of tensors": partial(call, cache=pair(), k_descale=descale, v_descale=descale),
        "numbers": partial(call, cache=pair(), k_descale=0.5, v_descale=0.25),
        "descales of heads": partial(call, cache=pair(), k_descale=descale.expand(2), v_descale=torch.rand(2, 2)),
        "of a projection": partial(call, cache=pair(), q=fused),
        "ragged": partial(call, cache=pair(), **ragged),
        "sinks": partial(call, cache=pair(), sinks=torch.randn(8).bfloat16()),
        "no table": partial(call, cache=(whole, whole), page_table=None),
        "out": partial(call, cache=native, out=torch.empty(2, 1, 8, 64).bfloat16()),
        "a plan": partial(call, cache=native, plan=plan_attention(given["q"], native, **_of_plan(given))),
    }


def _of_plan(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("page_table", "cache_seqlens")}


def test_no_operation_of_torch_is_between_a_call_and_its_launch(card: Card) -> None:
    """Also of the first one, but that what the card runs is looked at: it may make views."""
    for what, call in calls().items():
        card.out = torch.empty(2, 1, 8, 64).bfloat16().view((2, 8, 64) if what == "ragged" else (2, 1, 8, 64))
        if what != "out":  # the first call copies there what the operator made
            found = {name for name in operations(call) if name.startswith("aten::")}
            assert found <= HOST_ONLY, (what, found - HOST_ONLY)
        else:
            call()
        call()  # the first known one of a layer makes its views
        assert not operations(call), what
        assert card.given[-1][1].data_ptr() == card.given[-2][1].data_ptr()


def test_a_known_call_enters_few_functions(card: Card) -> None:
    for what, call in calls().items():
        card.out = torch.empty(2, 1, 8, 64).bfloat16()
        if what == "ragged":
            card.out = card.out[:, 0]
        call(), call()
        entered = functions(call)
        once = ["attention_with_kvcache", "signature", "checked", "look_up", "run", "__call__", "_delivered"]
        once += ["get", "__getitem__", "encode"]  # of os.environ, by `checked`
        paged = what.startswith(("native", "nhd", "out", "a plan"))
        assert sum(entered.values()) == len(once) + paged, (what, entered)
    kvmemo.forget()
    assert sum(functions(calls()["a pair"]).values()) > 40  # the long way


def test_the_operator_gets_the_same_in_both_ways(card: Card) -> None:
    """What is made of a known call's arguments is what the long way makes."""
    for what, call in calls().items():
        card.out = torch.empty(2, 1, 8, 64).bfloat16()
        if what == "ragged":
            card.out = card.out[:, 0]
        call(), call()
        long, short = card.given[-2:]
        assert torch.equal(long[0], short[0])  # the numbers
        assert long[1].flatten().tolist() == short[1].flatten().tolist()
        for a, b in zip(long[2:13], short[2:13], strict=True):
            same = a is b is None or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
            assert same, what
        assert (short[13] is None) == (what != "out")


def test_a_plan_is_the_cut_of_all_layers(card: Card) -> None:
    given, cache = arguments(), PagedKVCache(4, 2, 64, layers=3)
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    plan = plan_attention(tuple(given["q"].shape), cache, **_of_plan(given))
    assert card.cuts == 1 and plan.work.numel() > 0
    for _ in range(2):
        for layer in range(3):
            attention_with_kvcache(cache=cache, layer=layer, plan=plan, **given)
            assert card.given[-1][12] is plan.work
    attention_with_kvcache(cache=cache, **given)
    assert card.given[-1][12] is None and card.cuts == 1


def test_what_the_operator_refuses_takes_the_long_way(card: Card) -> None:
    given, cache = arguments(), pair()
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    call = partial(attention_with_kvcache, cache=cache, **given)
    call(), call()
    card.refuses = "fp8cutlass: page_table must be int32"
    with pytest.raises(RuntimeError, match="page_table must be int32"):  # the long way has nothing against it
        call()
    with pytest.raises(UnsupportedError, match=r"page_table must be \(2, pages\) int32"):
        call(page_table=given["page_table"].long())
    before = len(card.given)
    card.refuses = "fp8cutlass: kernel decode failed to launch on CUDA device 0: misaligned address"
    with pytest.raises(RuntimeError, match="misaligned"):
        call()
    assert len(card.given) == before


@pytest.mark.parametrize(
    "change",
    [
        {"causal": 1},
        {"num_splits": True},
        {"window_size": (True, 0)},
        {"return_lse": 0},
        {"softcap": False},
    ],
    ids=str,
)
def test_types_count(card: Card, change: dict[str, Any]) -> None:
    """1 is not True: what the long way refuses is not known either."""
    given, cache = arguments(), pair()
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    plain = {name: type(x)(x) for name, x in change.items()}
    call = partial(attention_with_kvcache, cache=cache, **given)
    call(**{name: _counterpart(x) for name, x in plain.items()})
    with pytest.raises(Exception, match=r"must be|got"):
        call(**change)


def _counterpart(x: Any) -> Any:
    """Equal, and of the right type."""
    if isinstance(x, tuple):
        return tuple(int(y) for y in x)
    return {"1": True, "True": 1, "0": False, "False": 0.0}[str(x)]


def test_calls_that_are_never_known(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    for cache in (PagedKVCache(4, 2, 64, hadamard=True), PagedKVCache(4, 2, 64, k_mean=torch.ones(2, 64))):
        attention_with_kvcache(cache=cache, **given)
    attention_with_kvcache(cache=pair(), **given | {"cache_seqlens": 7})
    monkeypatch.setenv("FP8CUTLASS_CHECK", "1")
    attention_with_kvcache(cache=pair(), **given)
    assert not kvmemo._known


def test_a_cache_that_is_changed_is_seen(card: Card) -> None:
    given, cache = arguments(), PagedKVCache(4, 2, 64, format="nhd")
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    call = partial(attention_with_kvcache, cache=cache, **given)
    call(), call()
    assert cache.pages is not None
    cache.pages, cache.k_descale = cache.pages.clone(), torch.full((1, 2), 0.5)
    call()
    assert card.given[-1][2].data_ptr() == cache.pages.data_ptr() != card.given[-2][2].data_ptr()
    assert card.given[-1][7].tolist() == [0.5, 0.5]


TURN = {"rotary_cos": torch.rand(500, 16), "rotary_sin": torch.rand(500, 16)}
RAGGED = ("ragged", "ends of their own", "a ragged turn")


def appending() -> dict[str, Call]:
    """One new token a sequence; a bound on the tokens where the ends of queries do not tell."""
    given = arguments()
    k, v = torch.randn(2, 2, 1, 2, 64).bfloat16()
    qkv = torch.randn(2, 1, 12, 64).bfloat16()
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    ragged = {"q": given["q"][:, 0], "cu_seqlens_q": ends, "k": k[:, 0], "v": v[:, 0], "max_seqlen_q": 1}
    call = partial(attention_with_kvcache, **given, k=k, v=v)
    grown = PagedKVCache(4, 2, 64, layers=3, v_scale="pow2")
    engine = PagedKVCache(4, 2, 64, format="nhd", k_descale=0.5, v_descale=torch.tensor([0.25, 0.5]))
    return {
        "native": partial(call, cache=PagedKVCache(4, 2, 64, layers=3), layer=2),
        "a descale that grows": partial(call, cache=grown),
        "nhd": partial(call, cache=engine),
        "of a projection": partial(call, cache=engine, q=qkv[:, :, :8], k=qkv[:, :, 8:10], v=qkv[:, :, 10:]),
        "lse": partial(call, cache=engine, return_lse=True),
        "several": partial(call, cache=engine, k=k.repeat(1, 3, 1, 1), v=v.repeat(1, 3, 1, 1)),
        "a turn": partial(call, cache=engine, **TURN),
        "a turn without a mask": partial(call, cache=engine, **TURN, causal=False, rotary_interleaved=False),
        "a ragged turn": partial(call, cache=grown, **ragged, **TURN),
        "ragged": partial(call, cache=grown, **ragged),
        "ends of their own": partial(call, cache=grown, **ragged, cu_seqlens_k_new=ends.clone()),
    }


@pytest.mark.parametrize("what", appending())
def test_what_is_appended_is_the_same_in_both_ways(what: str, card: Card) -> None:
    """The tokens, where they go, their descales and the lengths; the kernel of decode then gets the new lengths."""
    call = appending()[what]
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    if what in RAGGED:
        card.out = card.out[:, 0]
    call(), call()
    assert len(kvmemo._known) == 1 and len(card.appended) == len(card.given) == 2
    long, short = (dict(zip(APPEND, given, strict=True)) for given in card.appended)
    for name, a in long.items():
        b = short[name]
        if not isinstance(a, torch.Tensor):
            assert a == b and type(a) is type(b), name
        elif name.endswith("_descale"):  # by sequences, and for all of them
            assert torch.equal(a, b.expand(a.shape)), name
        elif name in ("cu_seqlens", "used"):
            assert torch.equal(a, b) and a.dtype == b.dtype and b.is_contiguous(), name
        else:
            assert a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype, name
            assert all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1), name
    assert [given[5].tolist() for given in card.given] == [[101, 8]] * 2
    assert torch.equal(card.given[0][1].flatten(), card.given[1][1].flatten())  # the queries
    given = call.keywords["q"]
    assert torch.equal(card.given[0][1].flatten(), given.flatten()) is ("turn" not in what)


def test_a_known_call_that_appends_makes_no_numbers(card: Card) -> None:
    """But for the room for the lengths, and what the stub does with them."""
    stub = {"aten::add", "aten::empty_like"}
    for what, call in appending().items():
        if "turn" in what:  # of queries by torch operations
            continue
        card.out = torch.empty(2, 1, 8, 64).bfloat16()
        if what in RAGGED:
            card.out = card.out[:, 0]
        call(), call()
        found = {name for name in operations(call) if name.startswith("aten::")}
        assert found - HOST_ONLY - {"aten::flatten", "aten::empty_strided"} <= stub, (what, found)


@pytest.mark.parametrize(
    "change",
    [
        {"rotary_cos": torch.ones(500, 32), "rotary_sin": torch.zeros(500, 32).double()},
        {"k": torch.randn(2 * 128 + 1).bfloat16()[1:].view(2, 1, 2, 64)},
        {"cache": PagedKVCache(4, 2, 64, hadamard=True)},
        {"page_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
        {"cache_seqlens": torch.zeros(4, dtype=torch.int32)[::2]},
        {"q": torch.randn(2, 8, 4, 64).bfloat16().transpose(1, 2)},
        {"q": torch.randn(2, 1, 8, 128).bfloat16()[..., ::2]},
        {"out": torch.empty(2 * 8 * 64 + 4).bfloat16()[4:].view(2, 1, 8, 64)},
        {"k": torch.randn(2, 129, 2, 64).bfloat16(), "v": torch.randn(2, 129, 2, 64).bfloat16()},
        {"sinks": torch.zeros(16)[::2]},
        {"out": torch.empty(2, 1, 8, 128).bfloat16()[..., :64]},
        {"q": torch.randn(2 * 8 * 64 + 1).bfloat16()[1:].view(2, 1, 8, 64)},
        {
            "q": torch.randn(2, 4, 8, 64).bfloat16(),
            **dict.fromkeys("kv", torch.randn(2, 2, 4, 64).bfloat16().transpose(1, 2)),
        },
    ],
    ids=[
        "a wide turn",
        "unaligned",
        "a rotation",
        "columns apart",
        "lengths apart",
        "heads of queries before tokens",
        "columns of queries apart",
        "out unaligned",
        "many new tokens",
        "sinks apart",
        "out apart",
        "queries unaligned",
        "heads before tokens",
    ],
)
def test_appending_that_is_never_known(card: Card, change: dict[str, Any]) -> None:
    card.out = torch.empty(change["q"].shape if "q" in change else (2, 1, 8, 64)).bfloat16()
    call = appending()["native"]
    call(**{"layer": 0, **change})
    assert not kvmemo._known


def test_ends_are_not_made_inside_of_a_graph(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would own them, and other calls read them."""
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    appending()["native"]()
    assert not kvmemo._known
    assert kvmemo_append._ends(3, torch.device("cpu"))[:4].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("name", ["sinks", "out"])
def test_nothing_is_written_before_a_call_is_refused(name: str, card: Card) -> None:
    """What the kernel of decode would refuse tells a call apart from those that are known."""
    card.out = torch.empty(2, 1, 8, 64).bfloat16()
    good = {"sinks": torch.zeros(8), "out": torch.empty(2, 1, 8, 64).bfloat16()}[name]
    wrong = {"sinks": torch.zeros(7), "out": torch.empty(2, 1, 8, 64)}[name]
    call = partial(appending()["native"], **{name: good})
    call(), call()
    before = len(card.appended)
    assert before == 2 and len(kvmemo._known) == 1
    with pytest.raises(UnsupportedError, match=name):
        call(**{name: wrong})
    assert len(card.appended) == before


@pytest.mark.parametrize(
    "change",
    [{"cache_seqlens": torch.tensor(5, dtype=torch.int32)}, {"page_table": torch.tensor(0, dtype=torch.int32)}],
    ids=["lengths", "table"],
)
def test_too_few_dimensions_are_refused_by_name(change: dict[str, Any], card: Card) -> None:
    with pytest.raises(UnsupportedError):
        appending()["native"](**change)


def test_ends_of_a_captured_graph_outlive_other_steps(card: Card) -> None:
    """A replay reads them where they lay."""
    first = kvmemo_append._ends(1, torch.device("cpu"))
    for step in range(2, 300):
        kvmemo_append._ends(step, torch.device("cpu"))
    assert kvmemo_append._ends(1, torch.device("cpu")) is first


@pytest.mark.parametrize("each", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 1])
def test_tokens_of_equal_sequences_stand_where_those_of_ragged_ones_do(each: int, step: int) -> None:
    lengths = torch.tensor([100, 0, 7], dtype=torch.int32)
    ends = torch.arange(4, dtype=torch.int32) * each
    want = kvappend.positions(ends, lengths, 3 * each, step)
    assert torch.equal(kvappend.positions(None, lengths, 3 * each, step).long(), want)
