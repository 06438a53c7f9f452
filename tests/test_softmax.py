"""The roundings of the code-domain softmax, bit by bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cutlass.softmax import anchor, half_of_sum


def test_half_of_sum_rounds_once() -> None:
    """Against exact integers: x and y are multiples of 2^-40 small enough for an int64 in that unit."""
    generator = torch.Generator().manual_seed(9)
    y = (torch.randint(1024, 2048, (200000,), generator=generator) * 2.0**-4).float()  # a half in [64, 128)
    nudge = torch.randint(-3, 4, y.shape, generator=generator) * 2.0**-30
    x = (torch.randint(-3, 4, y.shape, generator=generator) * 2.0**-5 + nudge).float()  # ties, and just off them
    got = half_of_sum(x, y)
    exact = (x.double() * 2**30 + y.double() * 2**30).long()
    ulp = torch.where(exact >= 2**37, 2**27, torch.where(exact >= 2**36, 2**26, 2**25))
    floor = exact // ulp
    rest = exact - floor * ulp
    up = (2 * rest > ulp) | ((2 * rest == ulp) & (floor % 2 == 1))
    want = (floor + up.long()) * ulp / 2**30
    assert torch.equal(got.double(), want)
    twice = (x + y).half().float()
    assert not torch.equal(twice.double(), want)  # rounding twice would have been seen


@settings(max_examples=200, deadline=None)
@given(top=st.floats(-65504, 65504, width=16), slope=st.floats(2.0**-24, 2.0**40))
def test_the_anchor_never_exceeds_code_122(top: float, slope: float) -> None:
    """Whatever the row maximum and the slope, its own code is at most 122 and the offset is finite."""
    f, a = torch.tensor([[top]]), torch.tensor([[slope]], dtype=torch.float32)
    rounded, offset, weight = anchor(f, a)
    assert bool(offset.isfinite().all()) and bool(weight.isfinite().all())
    code = half_of_sum(f * rounded, offset)
    assert float(code) <= 122.0
    if abs(top * slope) < 60000 and slope < 60000:
        assert float(code) > 122.0 - 64.0 * max(1.0, abs(top * slope) / 60000)
        logit = float(code) + float(weight)
        assert abs(logit - top * slope) <= 0.1 + 1e-3 * abs(top * slope)
