"""Broken walks: what a kernel of ragged batches or windows would return if one thing in it were wrong, made from the
emulator; and faults planted into the headers of ``include/fp8cutlass/walk``.

Each names what has to notice it: a test of tests/api/test_varlen.py, or a property of tests/host/walk_test.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import test_varlen
import torch
from fuzz_varlen import RaggedCase

from fp8cutlass.call import ragged
from fp8cutlass.call.ragged import RaggedCall
from fp8cutlass.emulator.emulate import Emulation

Edit = Callable[[RaggedCall, RaggedCall, int], "RaggedCall | None"]  # of one sequence, the whole call, its number

FULL = RaggedCase(
    seed=1, number=0, rows=(5, 130, 1, 200, 64), keys=(40, 130, 33, 260, 70), used_rows=None, used_keys=None, before=0,
    behind=3, poisoned=-1, heads=4, kv_heads=2, head_dim=64, source="bf16", out=None, precision="accurate",
    causal=False, window=(-1, -1), alignment="bottom_right", scale=None, values=("normal",) * 5, orders=("bshd",) * 3,
    descales="(1,)", lse=True,
)  # fmt: skip
CAUSAL, WINDOW = replace(FULL, causal=True), replace(FULL, window=(16, 9))
USED = replace(FULL, used_rows=(5, 70, 1, 199, 64), used_keys=(13, 129, 30, 200, 3))
FP8 = replace(FULL, source="e4m3", descales="(sequences, heads)")
CASES = (FULL, CAUSAL, WINDOW, USED, FP8)


def options(**changes: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """The emulator with its arguments of these names changed."""
    real = ragged.emulate

    def changed(*args: Any, **given: Any) -> Emulation:
        for name, change in changes.items():
            if given[name] is not None:
                given[name] = change(given[name])
        return real(*args, **given)

    return patch.object(ragged, "emulate", changed)


def sequences(edit: Edit) -> AbstractContextManager[Any]:
    """The emulator with every sequence's call edited, or left out where that is None."""
    real = ragged._emulate

    def changed(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
        for s in range(len(call.cu_q) - 1):
            of = slice(s, s + 1)
            used = {n: None if (x := getattr(call, n)) is None else x[of] for n in ("used_q", "used_k")}
            descales = tuple(d[of] if d.dim() == 2 else d for d in call.descales)
            one = replace(call, cu_q=call.cu_q[s : s + 2], cu_k=call.cu_k[s : s + 2], descales=descales, **used)
            edited = edit(one, call, s)
            if edited is not None:
                real(edited, out, lse)

    return patch.object(ragged, "_emulate", changed)


def results(edit: Callable[[RaggedCall, torch.Tensor, torch.Tensor], None]) -> AbstractContextManager[Any]:
    """Out (tokens, H, D) and LSE (H, tokens) edited in place."""
    real = ragged._emulate

    def changed(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
        real(call, out, lse)
        edit(call, out, lse)

    return patch.object(ragged, "_emulate", changed)


def tiles(first: int, last: int) -> AbstractContextManager[Any]:
    """The emulator less ``first`` tiles where a sequence's keys begin and ``last`` where they end, if it has two."""
    real = ragged.emulate

    def changed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **given: Any) -> Emulation:
        tile = given["variant"].tile_n
        count = -(-k.shape[2] // tile)
        if count > 1:
            of = slice(first * tile, (count - last) * tile)
            k, v, skipped = k[:, :, of], v[:, :, of], first * tile
            rest = (rest[0], *(d[:, :, first:] if d.dim() == 3 else d for d in rest[1:]))
            given |= {n: x if (x := given[n]) is None else x - skipped for n in ("causal_offset", "window_offset")}
        return real(q, k, v, *rest, **given)

    return patch.object(ragged, "emulate", changed)


def one_key_late(one: RaggedCall, call: RaggedCall, s: int) -> RaggedCall:
    """The sequence ends a token late, unless it is the last one."""
    late = one.cu_k.clone()
    late[1] += int(s + 2 < len(call.cu_k))
    return replace(one, cu_k=late)


def of_the_next(one: RaggedCall, call: RaggedCall, s: int) -> RaggedCall:
    """The descales of the sequence behind."""
    return replace(one, descales=tuple(d[(s + 1) % len(d)][None] if d.dim() == 2 else d for d in call.descales))


def one_diagonal_for_all(one: RaggedCall, call: RaggedCall, s: int) -> RaggedCall:
    """The diagonal of the longest sequence, by a window: keys - rows of the maxima, as a padded batch has it."""
    rows, keys = one.cu_q.diff().item(), one.cu_k.diff().item()
    shift = (call.max_k - call.max_q) - (keys - rows)
    return replace(one, right=one.right + shift if one.right >= 0 else one.right)


def dropped(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Row tile 1 of the fourth sequence is nobody's work."""
    begin = int(call.cu_q[-3]) + 64
    out[begin : begin + 64], lse[:, begin : begin + 64] = 0, -torch.inf


def rolled_lse(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse.copy_(lse.roll(1, 1))


def other_heads_lse(call: RaggedCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse.copy_(lse.roll(1, 0))


@dataclass(frozen=True)
class WalkMutant:
    """``plant`` breaks the emulator while its context lasts; ``case`` shows it to the gates of the fuzzer, ``killer``
    is the test that notices it as well."""

    name: str
    plant: Callable[[], AbstractContextManager[Any]]
    case: RaggedCase
    killer: Callable[[], None]


def against_float64(window: tuple[int, int], bottom_right: bool = True) -> Callable[[], None]:
    return partial(test_varlen.test_against_float64, window, bottom_right, "accurate")


MUTANTS = (
    WalkMutant("a window one key too wide before a row", lambda: options(window_offset=lambda x: x - 1), WINDOW,
               against_float64((0, 0))),
    WalkMutant("a window one key too narrow before a row", lambda: options(window_offset=lambda x: x + 1), WINDOW,
               against_float64((0, 0))),
    WalkMutant("a window one key too wide after a row", lambda: options(causal_offset=lambda x: x + 1), WINDOW,
               against_float64((0, 0))),
    WalkMutant("a window one key too narrow after a row", lambda: options(causal_offset=lambda x: x - 1), WINDOW,
               against_float64((0, 0))),
    WalkMutant("a diagonal one key late", lambda: options(causal_offset=lambda x: x + 1), CAUSAL,
               against_float64((-1, 0), False)),
    WalkMutant("a diagonal one key early", lambda: options(causal_offset=lambda x: x - 1), CAUSAL,
               against_float64((-1, 0), False)),
    WalkMutant("a window aligned at the top left",
               lambda: sequences(lambda one, call, s: replace(one, bottom_right=False)), WINDOW,
               against_float64((16, 0))),
    WalkMutant("the diagonal of the longest sequence", lambda: sequences(one_diagonal_for_all), CAUSAL,
               against_float64((-1, 0))),
    WalkMutant("descales of the sequence behind", lambda: sequences(of_the_next), FP8,
               partial(test_varlen.test_fp8_operands, "head")),
    WalkMutant("the first tile skipped", lambda: tiles(1, 0), FULL, against_float64((-1, -1))),
    WalkMutant("the last tile skipped", lambda: tiles(0, 1), FULL,
               partial(test_varlen.test_every_key_counts_alike, (-1, -1))),
    WalkMutant("the LSE of another row", lambda: results(rolled_lse), FULL, against_float64((-1, -1))),
    WalkMutant("the LSE of another head", lambda: results(other_heads_lse), FULL, against_float64((-1, -1))),
    WalkMutant("a sequence that ends one token late", lambda: sequences(one_key_late), FULL,
               test_varlen.test_a_key_of_the_neighbour_is_not_seen),
    WalkMutant("keys that are not used count", lambda: sequences(lambda one, call, s: replace(one, used_k=None)), USED,
               test_varlen.test_only_what_is_used_counts),
    WalkMutant("rows that are not used are written", lambda: sequences(lambda one, call, s: replace(one, used_q=None)),
               USED, test_varlen.test_only_what_is_used_counts),
    WalkMutant("a row tile that the plan drops", lambda: results(dropped), FULL, against_float64((-1, -1))),
    WalkMutant("a sequence that the plan drops", lambda: sequences(lambda one, call, s: None if s == 2 else one), FULL,
               test_varlen.test_what_lies_in_a_batch_does_not_matter),
)  # fmt: skip


@dataclass(frozen=True)
class HeaderFault:
    """``old`` in a header of the walk becomes ``new``; ``kills`` begins the line of walk_test that has to fail."""

    name: str
    header: str
    old: str
    new: str
    kills: str


HEADER_FAULTS = (
    HeaderFault("the tile in which a window begins left out", "mask.h",
                "int(begin / kTileN)", "int(begin / kTileN) + 1", "a window is visited"),
    HeaderFault("the last tile left out", "mask.h",
                "ceil_div(int(keys), kTileN)", "int(keys) / kTileN + (keys < kTileN)", "without a mask"),
    HeaderFault("a tile with a window's begin not masked", "mask.h",
                "row + kRows - 1 + band.first > first_key", "row + band.first > first_key",
                "a window is visited"),
    HeaderFault("a tile with a diagonal not masked", "mask.h",
                "smaller(last, row + band.last)", "smaller(last, row + 63 + band.last)",
                "a diagonal is visited"),
    HeaderFault("an item lost", "order.h",
                "order.items = int(work_items(p, rows, together));",
                "order.items = int(work_items(p, rows, together)) - 1;", "items without a mask"),
    HeaderFault("a ragged window aligned at the top left", "ragged.h",
                "p.ragged.bottom_right ? of.keys - of.rows : 0", "0", "ragged items of a window"),
    HeaderFault("the descales of K of the block behind", "ragged.h",
                "of.block * p.k_descale_block", "(of.block + 1) * p.k_descale_block", "ragged items cover"),
    HeaderFault("the LSE of the row behind", "ragged.h",
                "int64_t(head) * p.seqlen_q + query + row", "int64_t(head) * p.seqlen_q + query + row + 1",
                "ragged items cover"),
)  # fmt: skip
