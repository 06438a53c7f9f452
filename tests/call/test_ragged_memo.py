"""Calls of ``attention_varlen`` that were made before: which take the short way, and that it asks the operator for what
the long way asks it for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operators import stated

from fp8cutlass import UnsupportedError, attention_varlen
from fp8cutlass.call import ragged, ragged_memo
from fp8cutlass.choose.target import Target
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.native import extension

api = import_module("fp8cutlass.api.varlen")
AT = Target(generated_dir(), "sm90a", 132)
FP8 = torch.float8_e4m3fn
NAMES = ("attend_ragged", "attend_ragged_fp8")


class Card:
    """The operators of ragged batches: ``given`` are the arguments of each launch, by name."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.refuses = ""
        for name in NAMES:
            setattr(self, name, SimpleNamespace(default=SimpleNamespace(_op=partial(self._attend, name))))

    def _attend(self, name: str, *arguments: Any) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.given.append(dict(zip([a.name for a in stated()[name].arguments], arguments, strict=True)))
        q, k = arguments[1], arguments[2]
        if self.given[-1]["lse"] is not None:
            self.given[-1]["lse"].fill_(1.0)
        return torch.full((q.shape[0], q.shape[1], -(-k.shape[2] // 64) * 64), 0.5).bfloat16()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card()
    monkeypatch.setattr(torch.ops, "fp8cutlass_C", made, raising=False)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for module in (ragged, ragged_memo):
        monkeypatch.setattr(module, "target", lambda device: AT)
    monkeypatch.setattr(api, "looks_at", lambda x: False)
    ragged_memo.forget()
    yield made
    ragged_memo.forget()


class Subclass(torch.Tensor):
    pass


def arguments(tokens: int = 300, sequences: int = 3, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Heads 4 on 2; as many keys as rows, and 7 more."""
    q, k, v = (torch.randn(n, h, head_dim).to(dtype) for n, h in ((tokens, 4), (tokens + 7, 2), (tokens + 7, 2)))
    ends = torch.arange(sequences + 1, dtype=torch.int32)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": ends * (tokens // sequences), "cu_seqlens_k": ends * 5,
        "max_seqlen_q": tokens, "max_seqlen_k": tokens,
    }  # fmt: skip


def fused(tokens: int) -> dict[str, Any]:
    """Of a projection of Q, K and V."""
    found = arguments(tokens)
    qkv = torch.randn(tokens, 8, 64).bfloat16()
    found.update(q=qkv[:, :4], k=qkv[:, 4:6], v=qkv[:, 6:])
    return found


def quantised(tokens: int, *shapes: tuple[int, ...]) -> dict[str, Any]:
    descales = dict(zip(api.DESCALES, (torch.rand(s) for s in shapes), strict=True))
    return {**arguments(tokens, dtype=FP8), **descales}


def used(tokens: int) -> dict[str, Any]:
    return arguments(tokens) | {n: torch.tensor([1, 2, 3], dtype=torch.int32) for n in ("seqused_q", "seqused_k")}


FORMS: dict[str, Any] = {
    "plain": arguments,
    "of a projection": fused,
    "seqused": used,
    "options": lambda n: arguments(n) | {"causal": True, "softmax_scale": -0.3, "return_lse": True},
    "a window": lambda n: arguments(n) | {"window_size": (40, 0), "causal_alignment": "top_left"},
    "fp16": lambda n: arguments(n, dtype=torch.float16) | {"out_dtype": torch.bfloat16, "precision": "accurate"},
    "a cap": lambda n: arguments(n) | {"softcap": 30.0},
    "sinks": lambda n: arguments(n) | {"sinks": torch.randn(4), "return_lse": True},
    "padded by the kernel": lambda n: arguments(n, head_dim=80),
    "short sequences": lambda n: arguments(n, sequences=n // 3),
    "kept in shared memory": lambda n: arguments(n, sequences=n // 3) | {"max_seqlen_k": 5},
    "the same in two sizes": lambda n: arguments(n, sequences=n // 3) | {"max_seqlen_k": n // 4},
    "fp8": lambda n: quantised(n, (1,), (1,), (1,)),
    "fp8 by head": lambda n: quantised(n, (3, 4), (3, 2), (3, 2)),
    "fp8, few keys at first": lambda n: quantised(1000 * n - 299700, (1,), (1,), (1,)),
    "fp8, few keys later": lambda n: quantised(2700 // (n - 299), (1,), (1,), (1,)),
}


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("others", [300, 309])
def test_the_short_way_asks_for_what_the_long_way_does(
    form: str, others: int, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other tensors than those of the first call, and of another number of tokens."""
    first, second = FORMS[form](300), FORMS[form](others)
    want = outputs(attention_varlen(**second))
    ragged_memo.forget()
    attention_varlen(**first)
    assert len(ragged_memo._known) == 1
    monkeypatch.setattr(api, "_checked", lambda *given: pytest.fail("the long way"))
    got = outputs(attention_varlen(**second))
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(got, want, strict=True))
    by_long, _, by_short = card.given
    assert by_long.keys() == by_short.keys()
    for name, x in by_long.items():
        y = by_short[name]
        if not isinstance(x, torch.Tensor):
            assert x == y and type(x) is type(y), name
        elif name == "lse":
            assert x.shape == y.shape
        else:
            assert x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride(), name


def test_short_sequences_take_a_kernel_that_keeps_k_and_v(card: Card) -> None:
    """By max_seqlen_k, which calls that are known differ in."""
    for most in (5, 64, 65, 120, 2000, 5):
        attention_varlen(**arguments() | {"max_seqlen_k": most})
    assert len(ragged_memo._known) == 1
    residents = load_manifest(AT.directory).residents
    taken = [residents[x["resident"]] if x["resident"] >= 0 else None for x in card.given]
    assert [r and (r.keys, r.head_dim, r.source) for r in taken] == [
        (64, 64, "bf16"), (64, 64, "bf16"), (128, 64, "bf16"), (128, 64, "bf16"), None, (64, 64, "bf16"),
    ]  # fmt: skip
    others = ({"precision": "accurate"}, {"window_size": (9, 0)}, {"softcap": 3.0}, {"out_dtype": torch.float16})
    for other in others:
        attention_varlen(**arguments() | {"max_seqlen_k": 5} | other)
        assert card.given[-1]["resident"] == -1


GROUPS = {  # the arguments of `signature`
    0: ("q", "k", "v"),
    1: ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    2: ("q_descale", "k_descale", "v_descale"),
    3: ("sinks",),
    4: ("max_seqlen_q", "max_seqlen_k"),
    5: (
        "softmax_scale", "causal", "window_size", "causal_alignment", "precision", "out_dtype", "return_lse", "kernel",
        "softcap",
    ),
}  # fmt: skip


def test_every_argument_is_in_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not would be ignored by all calls but the first; nor may two change places."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ragged_memo, "signature", lambda *given: seen.append(given))
    monkeypatch.setattr(api, "_checked", lambda *given: pytest.fail("checked"))
    of = {name: group for group, names in GROUPS.items() for name in names}
    assert list(of) and set(of) == set(inspect.signature(attention_varlen).parameters)
    for name, group in of.items():
        seen.clear()
        value = object()
        with pytest.raises(pytest.fail.Exception):
            attention_varlen(**{**arguments(), name: value})
        (given,) = seen
        at = [given[group] is value] if group == 3 else [x is value for x in given[group]]
        assert at == [other == name for other in GROUPS[group]], name
        assert not any(x is value for i, x in enumerate(given) if i != group)


def test_each_of_them_tells_calls_apart(card: Card) -> None:
    """Two calls that differ in one argument, and not in a number of tokens, have two signatures."""
    plain = {**arguments(), **dict.fromkeys(("seqused_q", "seqused_k", *api.DESCALES, "sinks"))}
    defaults = {n: p.default for n, p in inspect.signature(attention_varlen).parameters.items()}
    plain = defaults | plain
    ends = torch.zeros(3, dtype=torch.int32)
    changes: dict[str, list[Any]] = {
        "q": [plain["q"].half(), torch.randn(300, 4, 128).bfloat16(), torch.randn(300, 8, 64).bfloat16()[:, :4]],
        "cu_seqlens_q": [plain["cu_seqlens_q"].long(), plain["cu_seqlens_q"][:2]],
        "seqused_k": [ends, ends.long(), ends[:2]],
        "q_descale": [torch.zeros(1), torch.zeros(3, 4)],
        "sinks": [torch.zeros(4), torch.zeros(5)],
        "softmax_scale": [0.5, 1, 1.0],
        "causal": [True, 0],
        "window_size": [(0, 0), (-1, 0), (-1.0, -1)],
        "causal_alignment": ["top_left"],
        "precision": ["accurate"],
        "out_dtype": [torch.float16],
        "return_lse": [True],
        "kernel": ["x"],
        "softcap": [1.0, 0],
    }

    def signed(**given: Any) -> Any:
        parts = [tuple(given[n] for n in names) for names in GROUPS.values()]
        parts[3] = parts[3][0]  # type: ignore[call-overload]
        found = ragged_memo.signature(*parts)
        return found, tuple(map(type, found))

    found = [signed(**plain), *(signed(**plain | {n: x}) for n, values in changes.items() for x in values)]
    assert None not in [x for x, _ in found]
    told = [tuple((type(x), x) for x in one) for one, _ in found]
    assert len(set(told)) == len(told)
    longer = {**plain, **arguments(330)}
    assert signed(**longer) == signed(**plain)


@pytest.mark.parametrize(
    "changed",
    [
        {"q": torch.randn(300, 4, 64).bfloat16().requires_grad_()},
        {"q": torch.nn.Parameter(torch.randn(300, 4, 64).bfloat16())},
        {"q": torch.randn(300 * 4 * 64 + 1).bfloat16()[1:].view(300, 4, 64)},
        {"sinks": torch.zeros(4).bfloat16()},
        {"sinks": torch.zeros(8)[::2]},
        {"cu_seqlens_q": torch.arange(8, dtype=torch.int32)[::2]},
        {"softmax_scale": torch.tensor(0.5)},
        {"max_seqlen_q": 3.0},
        {"window_size": [-1, -1]},
        {"sinks": torch.zeros(4).as_subclass(Subclass)},
    ],
    ids=lambda changed: " ".join(changed),
)
def test_what_takes_the_long_way(changed: dict[str, Any], card: Card) -> None:
    """It is cast, copied or looked at there, or refused."""
    try:
        attention_varlen(**arguments() | changed)
    except (UnsupportedError, RuntimeError):
        pass
    assert not ragged_memo._known


def test_a_card_that_is_asked_to_look_takes_the_long_way(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CUTLASS_CHECK", "1")
    attention_varlen(**arguments())
    assert not ragged_memo._known


def test_what_was_made_of_the_arguments_is_not_kept(card: Card) -> None:
    """Autocast has cast them, descales were spread over heads, rows are padded, or there is nothing to launch."""
    with torch.autocast("cpu"):
        given = arguments()
        attention_varlen(**given | {"k": given["k"].float()})
    attention_varlen(**quantised(300, (3, 2), (3, 2), (3, 2)))
    attention_varlen(**arguments(head_dim=36))
    attention_varlen(**arguments() | {"q": torch.zeros(0, 4, 64).bfloat16()})
    assert not ragged_memo._known
    attention_varlen(**arguments())
    assert len(ragged_memo._known) == 1


def test_what_the_operator_refuses_is_refused_by_name(card: Card) -> None:
    """Where its error is no refusal, it is the caller's."""
    given = arguments()
    attention_varlen(**given)
    card.refuses = "fp8cutlass: cu_seqlens_q is wrong"
    with pytest.raises(RuntimeError, match="cu_seqlens_q is wrong"):  # by the long way, which has nothing against it
        attention_varlen(**given)
    with pytest.raises(UnsupportedError, match="softcap"):
        attention_varlen(**given | {"softcap": "x"})
    card.refuses = "CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError):
        attention_varlen(**given)


@pytest.mark.parametrize("sinks", [[0.0] * 4, 0.5, (0.0,) * 4], ids=str)
def test_sinks_of_another_kind_are_refused_by_name(sinks: Any, card: Card) -> None:
    with pytest.raises(UnsupportedError, match="sinks"):
        attention_varlen(**arguments() | {"sinks": sinks})


def test_what_is_copied_is_copied_once(card: Card) -> None:
    """To know that a call is not kept costs no copy."""
    from test_host_calls import operations

    given = arguments() | {"q": torch.randn(300, 64, 4).bfloat16().transpose(1, 2)}
    assert operations(partial(attention_varlen, **given))["aten::contiguous"] <= 1 and not ragged_memo._known


def test_no_operation_of_torch_is_between_a_known_call_and_its_launch(card: Card) -> None:
    from test_host_calls import operations

    given = arguments()
    attention_varlen(**given)
    assert {x for x in operations(partial(attention_varlen, **given)) if x.startswith("aten::")} <= ALLOWED


ALLOWED = {
    "aten::full",
    "aten::fill_",
    "aten::empty",
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::empty_strided",
}
