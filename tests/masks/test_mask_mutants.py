"""Faults that a mask or a bias may have, planted in what the emulator reads: the random calls notice each of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_cases import CELLS
from fuzz_masks import KINDS, draw_masked

from fp8cutlass.call import launch
from fp8cutlass.emulator.emulate import Emulation, emulate
from fp8cutlass.emulator.visible import Mask
from fp8cutlass.manifest import INTEGER
from fp8cutlass.masks.bits import unlisted
from tests import fuzz

CASES = 24


def with_mask(change: Callable[[Mask], Mask]) -> Callable[..., Emulation]:
    """The emulator with another mask."""

    def run(*args: Any, mask: Mask | None, **options: Any) -> Emulation:
        return emulate(*args, mask=None if mask is None else change(mask), **options)

    return run


def with_bias(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Emulation]:
    """The emulator with another bias."""

    def run(*args: Any, bias: torch.Tensor | None, **options: Any) -> Emulation:
        return emulate(*args, bias=None if bias is None else change(bias), **options)

    return run


def wrong_bit(mask: Mask) -> Mask:
    """The first bit of every tile."""
    seen = mask.seen.clone()
    seen[:, :, ::128, ::128] = ~seen[:, :, ::128, ::128]
    return Mask(seen, mask.visited)


def skipped_tile(mask: Mask) -> Mask:
    """The last tile that rows visit."""
    later = mask.visited.int().flip(-1).cumsum(-1).flip(-1)
    return Mask(mask.seen, mask.visited & (later != 1))


def next_row(mask: Mask) -> Mask:
    return Mask(mask.seen.roll(1, 2), mask.visited)


def next_key(mask: Mask) -> Mask:
    return Mask(mask.seen.roll(1, 3), mask.visited)


def next_head(mask: Mask) -> Mask:
    return Mask(mask.seen.roll(1, 1), mask.visited.roll(1, 1))


def unhidden(mask: Mask) -> Mask:
    """Tiles that are seen in part, taken for whole."""
    rows, keys = mask.seen.shape[2:]
    wide = mask.visited.repeat_interleave(128, 2).repeat_interleave(128, 3)
    return Mask(wide[:, :, :rows, :keys], mask.visited)


FAULTS: dict[str, Callable[..., Emulation]] = {
    "wrong bit": with_mask(wrong_bit),
    "skipped tile": with_mask(skipped_tile),
    "next row": with_mask(next_row),
    "next key": with_mask(next_key),
    "next head": with_mask(next_head),
    "part taken for whole": with_mask(unhidden),
    "bias of the next column": with_bias(lambda bias: bias.roll(1, 3)),
    "bias of the next row": with_bias(lambda bias: bias.roll(1, 2)),
    "bias in octaves": with_bias(lambda bias: bias / 1.4427),
    "no bias": with_bias(torch.zeros_like),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean emulator passes these cases: tests/proof/test_fuzz.py."""
    monkeypatch.setattr(launch, "emulate", FAULTS[name])
    ran = fuzz.fuzz("cpu", 1, cases=CASES, only=fuzz.MASKS, say=lambda text: None)
    assert ran.failures, "no case notices it"
    assert all("raised" not in text for text in ran.failures), ran.failures


def test_masks_of_every_kind_are_drawn() -> None:
    cases = [draw_masked(1, number, CELLS["cuda"]) for number in range(300)]
    assert {case.kind for case in cases} == set(KINDS)
    assert draw_masked(3, 7, CELLS["cpu"]) == draw_masked(3, 7, CELLS["cpu"]) != draw_masked(4, 7, CELLS["cpu"])
    for axis in range(4):
        assert {case.shared[axis] for case in cases} == {True, False}
    assert {case.call.precision for case in cases} == {"fast", "balanced", "accurate", *INTEGER}


def test_lists_are_what_the_emulator_visits() -> None:
    """`visited` is undone from the lists that kernels read, not kept beside them."""
    from fp8cutlass import BlockMask

    mask = BlockMask.window(300, 500, 40, 3)
    assert torch.equal(mask.visited(), unlisted(mask.tiles, mask.counts)[0])
