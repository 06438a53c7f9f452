"""The decode emulator's parts by themselves; tests/serving holds the whole to float64.

Regressions these catch: Q rounded to less than f16; a split that leaves out or repeats a tile; a merge that depends on
which part is larger.
"""

from __future__ import annotations

import math

import pytest
import torch

from fp8cutlass.emulator.decode import (
    TILE,
    Keys,
    Part,
    Rows,
    attend,
    decode,
    finish,
    grouped,
    merge,
    queries,
    ranges,
    ungrouped,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 1.0), (torch.bfloat16, 2.0**-60), (torch.bfloat16, 2.0**90), (torch.float16, 1.0)]
    + [(torch.float16, 2.0**-14), (torch.float16, 2.0**12)],
)
def test_queries_keep_sixteen_bits(dtype: torch.dtype, size: float) -> None:
    q = (draw(40, 6, 64) * size).to(dtype)
    q16, descale = queries(q)
    assert torch.equal(q16, q16.half().float()) and float(q16.abs().max()) < 2
    largest = q.float().abs().amax(-1, keepdim=True)
    assert ((q16 * descale - q.float()).abs() <= largest * 2.0**-24).all()
    zero, least = queries(torch.zeros(1, 1, 8))
    assert not zero.any() and least.item() == 2.0**-126


def test_rows_of_heads_that_share_keys() -> None:
    x = torch.arange(2 * 6).float().view(2, 6, 1)
    rows = grouped(x, 2)
    assert rows[0, :, 0].tolist() == [0, 1, 2, 6, 7, 8] and rows[1, :, 0].tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(ungrouped(rows, 2), x)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
@pytest.mark.parametrize(
    ("first", "last", "keys"), [(0, 999, 1000), (70, 500, 1000), (-5, 0, 64), (0, -1, 0), (9, 3, 64)]
)
def test_splits_cover_what_is_seen_once(first: int, last: int, keys: int, splits: int) -> None:
    one = torch.ones(1, 1)
    rows = Rows(torch.zeros(1, 1, 8), one[None], (first * one).long(), (last * one).long(), 0.0)
    parts = ranges(rows, keys, splits)
    assert len(parts) == splits
    tiles = [tile for begin, end in parts for tile in range(begin, end)]
    seen = {key // TILE for key in range(max(first, 0), min(last + 1, keys))}
    assert tiles == sorted(set(tiles)) and seen <= set(tiles)
    assert len(tiles) <= max(len(seen), 1)


def test_a_merge_is_the_sum_of_its_parts() -> None:
    """Of tops that are far apart, and of a part that saw nothing."""
    top = torch.tensor([3.0, -200.0, -math.inf, 5.5]).view(4, 1, 1, 1)
    out, total = draw(4, 1, 1, 8), torch.rand(4, 1, 1, 1) + 0.5
    parts = [Part(o, t, n) for o, t, n in zip(out, top, total, strict=True)]
    whole = merge(parts)
    weight = torch.exp2(top.double())
    assert torch.allclose(whole.out.double() * 2**5.5, (weight * out.double()).sum(0), rtol=1e-6)
    assert torch.allclose(whole.total.double() * 2**5.5, (weight * total.double()).sum(0), rtol=1e-6)
    nothing = merge([parts[2], parts[2]])
    o, lse = finish(Part(nothing.out * 0, nothing.top, nothing.total * 0), torch.ones(1, 1, 1), None)
    assert not o.any() and (lse == -math.inf).all()


def test_descales_of_v_that_differ_from_page_to_page() -> None:
    """By 60 octaves, rising and falling: what is far below the largest vanishes, all else is exact."""
    k, v = draw(1, 4 * TILE, 8, seed=3), draw(1, 4 * TILE, 8, seed=1)
    for steps in ([0, 10, 20, 60], [60, 20, 10, 0], [-90, -60, -90, -60]):
        d = torch.exp2(torch.tensor(steps).float()).repeat_interleave(TILE)[None]
        q = torch.ones(1, 1, 8).half()
        out, _ = decode(q, Keys(k, v, torch.ones(1, 1), d), scale=1 / 8)
        p = torch.softmax(k[0].sum(-1).double() / 8, 0)
        exact = p @ (v[0] * d[0, :, None]).double()
        assert ((out[0, 0] - exact).abs() <= 2e-3 * (p @ (v[0] * d[0, :, None]).double().abs())).all()


def test_the_maximum_of_a_tile_may_come_late() -> None:
    """Scores that rise by hundreds of octaves from tile to tile, and that fall: what is far below vanishes."""
    v = draw(1, 4 * TILE, 8, seed=1)
    for rising in (True, False):
        scores = torch.linspace(-400, 400, 4 * TILE)
        k = (scores if rising else scores.flip(0))[None, :, None].expand(1, -1, 8).contiguous()
        keys = Keys(k, v, torch.ones(1, 1), torch.ones(1, 1))
        q = torch.ones(1, 1, 8).half()
        out, lse = decode(q, keys, scale=1 / 8)
        exact = torch.softmax(k[0, :, 0].double(), 0) @ v[0].double()
        assert (out[0, 0] - exact).abs().max() < 1e-3 and abs(float(lse) - float(k[0, :, 0].logsumexp(0))) < 1e-3


def test_a_row_sees_nothing_where_its_window_lies_elsewhere() -> None:
    one = torch.ones(1, 1)
    rows = Rows(draw(1, 1, 8), one[None], (90 * one).long(), (40 * one).long(), 0.0)
    part = attend(rows, Keys(draw(1, 128, 8), draw(1, 128, 8), one, one), 0, 2)
    assert part.top.item() == -math.inf and part.total.item() == 0 and not part.out.any()
