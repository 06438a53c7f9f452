"""Append on a card by its one kernel: the bytes that torch operations write on the CPU, whatever the numbers say.

Regressions these catch: what the host's stand-ins for instructions cannot show; writes of CTAs that run at once; a byte
outside of the slots that changes; a number of the device that somebody waits for; a launch that cannot be captured.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from append_cases import Case, cases, draw, everything, new_cache, spread, table_of

from fp8cutlass import PagedKVCache
from fp8cutlass.cache import kernel as door
from fp8cutlass.native.append import Slots, Table

pytestmark = pytest.mark.gpu

CASES = cases()


def moved(x: Any) -> Any:
    """On the card, with all tensors that it holds, whose strides stay."""
    if isinstance(x, PagedKVCache):
        x = copy.copy(x)
        for name, value in vars(x).items():
            setattr(x, name, moved(value))
        x.device = torch.device("cuda", torch.cuda.current_device())
        return x
    if isinstance(x, torch.Tensor):
        return x.cuda()
    if isinstance(x, tuple):
        return tuple(map(moved, x))
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name)) for f in fields(x)})
    return x


def launch(case: Case) -> torch.Tensor | None:
    """On the card already."""
    done = case.cache.launch(case.k, case.v, case.at, case.layer, case.given(), case.turn)
    assert done is not None, "torch operations would have done it"
    return done.used


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_cpu(name: str) -> None:
    """All of them: pages that no token goes to hold poison, and the other layer too."""
    case = moved(CASES[name])
    used = launch(case)
    assert everything(case.cache) == CASES[name].wanted()
    if isinstance(case.at, Table):
        assert used is not None and torch.equal(used, case.at.lengths + case.at.cu.diff())


@pytest.mark.parametrize("name", ["native torch.bfloat16", "pow2 torch.float16", "table turned"])
def test_torch_operations_on_a_card_write_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that is left where there is no kernel. The sign of a NaN is torch's own."""
    case = moved(CASES[name])
    slots, positions, rows = CASES[name].slots()
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(door, "_there", lambda device: False)
        cache = copy.deepcopy(case.cache)
        named: dict[str, Any] = {"layer": case.layer}
        if case.turn is not None and positions is not None:
            cos, sin, interleaved = case.turn
            named |= {"positions": positions.cuda(), "rotary_cos": cos, "rotary_sin": sin}
            named["rotary_interleaved"] = interleaved
        cache.append(case.k, case.v, slots.cuda(), **named)
        found.append(everything(cache))
    kernel, torch_way = (raw.replace(b"\xff", b"\x7f") for raw in found)
    assert kernel == torch_way


@pytest.mark.parametrize("v_scale", ["static", "pow2"])
@pytest.mark.parametrize("tokens", [2048, 9001])
def test_many_tokens_with_slots_that_come_twice(tokens: int, v_scale: str) -> None:
    """More than one launch where there are 9001; the last token of a slot wins, in each of many runs."""
    cache = new_cache(128, heads=2, pages=40, page_size=64, v_scale=v_scale)
    k, v = draw(tokens, 2, 128, torch.bfloat16, 1), draw(tokens, 2, 128, torch.bfloat16, 2)
    case = Case(cache, k, v, Slots(spread(tokens, 40 * 64, 5)))
    wanted = case.wanted()
    for _ in range(5):
        there = moved(case)
        launch(there)
        assert everything(there.cache) == wanted


def test_numbers_out_of_range_write_nothing() -> None:
    cache = new_cache(128)
    k = draw(6, 2, 128, torch.bfloat16, 1)
    before = everything(cache)
    there = moved(Case(cache, k, k, Slots(torch.tensor([-1, 9 * 16, 2**40, -(2**62), 2**31, 2**63 - 1]))))
    launch(there)
    at = table_of(9, 16, lengths=(16, 0), new=(3, 3))
    for lengths, table in (((2**31 - 1, -(2**31)), at.page_table), ((16, 0), at.page_table * 0 + 9)):
        lying = Table(at.cu, torch.tensor(lengths, dtype=torch.int32), table)
        launch(replace(there, at=moved(lying)))
    torch.cuda.synchronize()
    assert everything(there.cache) == before


@pytest.mark.parametrize("name", ["table pow2", "table turned", "turned and all True"])
def test_a_graph_follows_its_numbers(name: str) -> None:
    """Captured with K rotated, turned, less a mean; replays see new tokens and new places."""
    case = moved(CASES[name])
    room = copy.deepcopy(case.cache)
    launch(case)  # loads the kernel
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(case)
    host = CASES[name]
    for seed in range(3):
        k, v = (draw(*host.k.shape, host.k.dtype, s) for s in (seed, seed + 50))
        if isinstance(host.at, Table):
            at: Slots | Table = replace(host.at, lengths=(host.at.lengths - seed).clamp(min=0))
            case.at.lengths.copy_(at.lengths)
        else:
            at = replace(host.at, slots=host.at.slots.roll(seed))
            case.at.slots.copy_(at.slots)
        case.k.copy_(k), case.v.copy_(v)
        case.cache.pages.copy_(room.pages)
        graph.replay()
        assert everything(case.cache) == replace(host, k=k, v=v, at=at).wanted()


def test_nobody_waits_for_the_device() -> None:
    case = moved(CASES["turned and all True"])
    cos, sin, _ = case.turn
    launch(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.cache.append(
            case.k, case.v, case.at.slots, positions=case.at.positions, rotary_cos=cos, rotary_sin=sin, layer=1
        )
        case.cache.copy_pages(case.at.slots[:3] % 9, case.at.slots[3:6] % 9)
        case.cache.reset(case.at.slots[:3] % 9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
