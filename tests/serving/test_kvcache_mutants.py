"""The gates of these tests refuse every broken decode and every broken append, and accept the clean ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from paged_cases import Batch, attention64, make, refusals, slots

from fp8cutlass.accuracy.reference import Reference
from fp8cutlass.cache import write
from fp8cutlass.cache.write import E4M3
from fp8cutlass.call import kvcache
from fp8cutlass.emulator import decode

KEYS, ROWS = [300, 70, 64, 200], [1, 3, 40, 5]
SINKS = torch.tensor([1.0, 2.0, 0.5, 3.0])
Patch = Callable[[pytest.MonkeyPatch], None]


def arguments(**changes: Callable[[Any], Any]) -> Patch:
    """Decode with some arguments changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def mutant(q: torch.Tensor, keys: decode.Keys, **given: Any) -> Any:
            return decode.decode(q, keys, **given | {name: change(given[name]) for name, change in changes.items()})

        patch.setattr(kvcache, "decode", mutant)

    return apply


def keys(change: Callable[[decode.Keys], decode.Keys]) -> Patch:
    """Decode with other keys."""
    return gathered(lambda *given: change(GATHERED(*given)))


def gathered(mutant: Callable[..., decode.Keys]) -> Patch:
    return lambda patch: patch.setattr(kvcache, "gathered", mutant)


def steps(name: str, mutant: Callable[..., Any]) -> Patch:
    """A function of the emulator by another."""
    return lambda patch: patch.setattr(decode, name, mutant)


GATHERED = kvcache.gathered
CLEAN = {name: getattr(decode, name) for name in ("ranges", "finish", "values", "merge", "grouped", "logits")}


def rolled_table(call: kvcache.KVCall, s: int, table: torch.Tensor, count: int) -> decode.Keys:
    pages = -(-count // call.k.shape[1])
    return GATHERED(call, s, torch.cat([table[:pages].roll(1), table[pages:]]), count)


def another_table(call: kvcache.KVCall, s: int, table: torch.Tensor, count: int) -> decode.Keys:
    return GATHERED(call, s, kvcache.clamped(call)[0].roll(1, 0)[s], 64)


def summed(parts: list[decode.Part]) -> decode.Part:
    whole = CLEAN["merge"](parts)
    return replace(whole, out=sum(p.out for p in parts), total=sum(p.total for p in parts))


def interleaved(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    tokens, heads, columns = x.shape
    mixed = x.view(tokens, heads // kv_heads, kv_heads, columns).transpose(1, 2).reshape(x.shape)
    return CLEAN["grouped"](mixed, kv_heads)


def short(rows: decode.Rows, count: int, splits: int) -> list[tuple[int, int]]:
    first, *rest = CLEAN["ranges"](rows, count, splits)
    return [(first[0], max(first[0], first[1] - 1)), *rest]


def twice(rows: decode.Rows, count: int, splits: int) -> list[tuple[int, int]]:
    first, *rest = CLEAN["ranges"](rows, count, splits)
    return [first, *((max(0, a - 1), b) for a, b in rest)]


# name: how decode is broken, the options that show it
MUTANTS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "window one key wider": (arguments(left=lambda x: x + 1), {"window_size": (40, 0)}),
    "window one key narrower": (arguments(left=lambda x: x - 1), {"window_size": (40, 0)}),
    "diagonal one key further": (arguments(right=lambda x: x + 1), {}),
    "top-left diagonal": (keys(lambda k: replace(k, k=k.k.roll(1, 1), v=k.v.roll(1, 1))), {}),
    "one stale key": (gathered(lambda *given: GATHERED(*given[:3], given[3] + 1)), {"causal": False}),
    "last key dropped": (gathered(lambda *given: GATHERED(*given[:3], given[3] - 1)), {"causal": False}),
    "page table off by one": (gathered(rolled_table), {"causal": False}),
    "another sequence's pages": (gathered(another_table), {}),
    "K descale ignored": (keys(lambda k: replace(k, k_descale=torch.full_like(k.k_descale, 0.005))), {}),
    "K descale of the token before": (keys(lambda k: replace(k, k_descale=k.k_descale.roll(1, 1))), {}),
    "K descale of the other head": (keys(lambda k: replace(k, k_descale=k.k_descale.flip(0))), {}),
    "V descale ignored": (keys(lambda k: replace(k, v_descale=torch.ones_like(k.v_descale))), {}),
    "V descale of the other head": (keys(lambda k: replace(k, v_descale=k.v_descale.flip(0))), {}),
    "sink in each split": (
        steps("finish", lambda part, sinks, shift: CLEAN["finish"](part, sinks + math.log(3), shift)),
        {"sinks": SINKS, "num_splits": 3},
    ),
    "sink left out": (arguments(sinks=lambda x: None), {"sinks": SINKS}),
    "sink of another head": (arguments(sinks=lambda x: x.roll(1)), {"sinks": SINKS}),
    "softcap left out": (arguments(softcap=lambda x: 0.0), {"softcap": 3.0}),
    "softcap in octaves": (arguments(softcap=lambda x: x * decode.LOG2E), {"softcap": 3.0}),
    "parts added without weights": (steps("merge", summed), {"num_splits": 3}),
    "a split leaves out a tile": (steps("ranges", short), {"num_splits": 2}),
    "splits overlap": (steps("ranges", twice), {"num_splits": 2}),
    "heads grouped across": (steps("grouped", interleaved), {}),
    "P in e4m3": (
        steps("values", lambda p, v, seen: CLEAN["values"]((p / 128).to(E4M3).float() * 128, v, seen)), {},
    ),
    "P in bf16": (steps("values", lambda p, v, seen: CLEAN["values"](p.bfloat16().float(), v, seen)), {}),
    "Q in e4m3": (
        steps("queries", lambda q, f=decode.queries: ((f(q)[0] * 200).to(E4M3).float(), f(q)[1] / 200)), {},
    ),
}  # fmt: skip


@cache
def unbroken(format: str, options: tuple[tuple[str, Any], ...]) -> tuple[Batch, Any, list[Reference]]:
    """A batch, what decode makes of it, which its gates accept, and float64; for all mutants with these options."""
    batch = make(KEYS, ROWS, format=format)
    clean, references = batch.run(**dict(options)), batch.references(**dict(options))
    assert refusals(*clean, references, ROWS) == []
    return batch, clean, references


@pytest.mark.parametrize("format", ["native", "nhd"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_decode_is_noticed(name: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, options = MUTANTS[name]
    if format == "nhd" and name == "K descale of the token before":
        format = "native"  # there is one a token only in these pages
    batch, clean, references = unbroken(format, tuple(options.items()))
    patch(monkeypatch)
    broken = batch.run(**options)
    assert not torch.equal(broken[0], clean[0]), "the mutant changes nothing"
    assert refusals(*broken, references, ROWS), f"{name} is not noticed"


def neighbour(clean: Callable[..., Any]) -> Callable[..., Any]:
    """K's descales by the token after."""

    def mutant(x: torch.Tensor, descale: torch.Tensor | None) -> Any:
        x8, made = clean(x, descale)
        return x8, made.roll(1, 0)

    return mutant


APPENDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "one slot late": ("plan", lambda clean: lambda wanted, limit: clean(wanted + 1, limit)),
    "K and its descale apart": ("by_token", neighbour),
    "rows in another order": (
        "plan", lambda clean: lambda w, n: replace(clean(w, n), source=clean(w, n).source.roll(1)),
    ),
    "descale that does not grow": (
        "grown", lambda clean: lambda pages, v, writes: torch.minimum(clean(pages, v, writes), torch.tensor(2.0**-9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APPENDS)
def test_a_broken_append_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By attention over what was given, in float64: FP8's error and no more."""

    def worst() -> float:
        batch = make(KEYS, ROWS, v_scale="pow2")
        out, _ = batch.run()
        begin, errors = 0, []
        for s, rows in enumerate(ROWS):
            exact = attention64(batch.q[begin : begin + rows], batch.k[s], batch.v[s], 0.125, right=0)
            one = out[begin : begin + rows].transpose(0, 1)[None]
            errors.append(float((one - exact.out).norm() / exact.out.norm()))
            begin += rows
        assert slots(batch, 0).shape == (KEYS[0],)
        return max(errors) if not any(math.isnan(e) for e in errors) else math.inf

    limit = 0.08
    assert worst() < limit
    function, mutant = APPENDS[name]
    monkeypatch.setattr(write, function, mutant(getattr(write, function)))
    assert not worst() < limit, f"{name} is not noticed"


def test_there_are_so_many() -> None:
    assert len(MUTANTS) == 25 and len(APPENDS) == 4
