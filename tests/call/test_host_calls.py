"""What Python does of a call that is known, counted: functions of the package, and operations of torch.

The extension's operator is a stub here. Regressions these catch: FP8 operands or packed keys that go by another way
than bf16 ones, a tensor that is viewed, filled or copied on the way, a check that runs again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import stand_in
import torch

from fp8cutlass import attention, pack_kv, quantize
from fp8cutlass.call import memo
from fp8cutlass.manifest import PACKAGE_DIR

GRANULARITY = {"head": ("head",) * 3, "token": ("token", "token", "channel")}


def functions(call: Callable[[], object]) -> Counter[str]:
    """The functions of the package, and what Python makes for it, that a call enters."""
    seen: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename.startswith(str(PACKAGE_DIR)) or code.co_filename.startswith("<")):
            seen[code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def operations(call: Callable[[], object]) -> Counter[str]:
    """The operations that torch's dispatcher sees."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return Counter(event.name for event in profile.function_events)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], object]]]:
    """Calls by what they are on, each of which has been made once."""
    q, k, v = (torch.randn(2, 4, 40, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    made: dict[str, Callable[[], object]] = {"bf16": partial(attention, q, k, v)}
    names = ("q_descale", "k_descale", "v_descale")
    for scaling, shared in GRANULARITY.items():
        pairs = [quantize(x, granularity=g) for x, g in zip((q, k, v), shared, strict=True)]
        fp8, descales = [x for x, _ in pairs], dict(zip(names, (d for _, d in pairs), strict=True))
        made[f"fp8, {scaling}"] = partial(attention, *fp8, scaling=scaling, **descales)
    made["fp8, one for all"] = partial(attention, *fp8, **dict.fromkeys(names, torch.tensor(0.5)))
    made["fp8, numbers"] = partial(attention, *fp8, **dict.fromkeys(names, 0.5))
    made["bf16, sinks"] = partial(attention, q, k, v, sinks=torch.zeros(4))
    made["packed"] = partial(attention, q, pack_kv(k, v))
    made["packed, smooth_k"] = partial(attention, q, pack_kv(k, v, smooth_k=True))
    memo.forget()
    result = torch.empty_like(q)
    asked = stand_in.card(monkeypatch, dict.fromkeys(stand_in.OPERATORS, lambda *arguments: result))
    for call in made.values():
        call()
    assert len(asked) == len(made) == len(memo._known)
    yield made
    memo.forget()


def test_a_known_call_does_no_operation_of_torch(calls: dict[str, Callable[[], object]]) -> None:
    for what, call in calls.items():
        assert not operations(call), what
    memo.forget()
    for what, call in calls.items():  # the counter counts: the long way is an operator, and more
        assert operations(call)["fp8cutlass::attend"] == 1, what


def test_fp8_and_packed_calls_enter_the_functions_of_a_bf16_call(calls: dict[str, Callable[[], object]]) -> None:
    bf16 = functions(calls["bf16"])
    once = ("attention", "signature", "look_up", "run", "deliver")
    assert bf16 == Counter(once) + Counter({"<lambda>": 3})  # Options, Outputs, and what is kept of a call
    for what, call in calls.items():
        more = functions(call) - bf16
        besides = ["_of_descales"] if what.startswith("fp8") else ["signature"] if what.endswith("sinks") else []
        assert more == Counter(besides), what
    memo.forget()
    assert sum(functions(calls["fp8, head"]).values()) > 100  # the long way


def test_the_operator_gets_no_argument_that_it_can_do_without(
    calls: dict[str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the host a fifth of a microsecond."""
    memo.forget()
    given: list[int] = []
    result = torch.empty(2, 4, 40, 64, dtype=torch.bfloat16)
    count = lambda *arguments: given.append(len(arguments)) or result  # type: ignore[func-returns-value]  # noqa: E731
    stand_in.card(monkeypatch, dict.fromkeys(stand_in.OPERATORS, count))
    for what, call in calls.items():
        call()
        call()
        long, short = given[-2:]
        least = {"bf16": 4, "bf16, sinks": 8}.get(what, 6 if what.startswith("packed") else 7)
        assert short == least and long >= short
