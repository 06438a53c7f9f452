"""The roundings of the code-domain softmax, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cutlass.accuracy.ztest import P_ERROR
from fp8cutlass.emulator.softmax import BELOW, DEAD_WEIGHT, EXP2_CODE, SOFTMAXES, TOP_CODE, _bent, anchor, half_of_sum


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
@given(
    top=st.floats(-65504, 65504, width=16),
    slope=st.floats(2.0**-24, 2.0**40),
    most=st.sampled_from([TOP_CODE, EXP2_CODE - BELOW]),
)
def test_the_anchor_never_exceeds_the_top_code(top: float, slope: float, most: float) -> None:
    """Whatever the row maximum and the slope, its own code is at most that and the offset is finite."""
    f, a = torch.tensor([[top]]), torch.tensor([[slope]], dtype=torch.float32)
    rounded, offset, weight = anchor(f, a, most)
    assert bool(offset.isfinite().all()) and bool(weight.isfinite().all())
    code = half_of_sum(f * rounded, offset)
    assert float(code) <= most
    if abs(top * slope) < 60000 and slope < 60000:
        assert float(code) > most - 64.0 * max(1.0, abs(top * slope) / 60000)
        logit = float(code) + float(weight)
        assert abs(logit - top * slope) <= 0.1 + 1e-3 * abs(top * slope)


@pytest.mark.parametrize(("softmax", "top"), [("linear", 122), ("quadratic", 120), ("exp2", 120)])
def test_the_error_of_p(softmax: str, top: int) -> None:
    """Relative to 2^x, over octaves of normal e4m3 numbers: what the z-test takes for it. The row maximum has the top
    code, and the exact sums are those of 2^x."""
    scores = (torch.randn(64, 4096, generator=torch.Generator().manual_seed(3)) * 8).half().float()
    slope = torch.full((64, 1), 0.5)  # octaves a score unit
    p, codes, weight, exact = SOFTMAXES[softmax](scores, slope if softmax == "exp2" else 8 * slope)
    true = torch.exp2(scores.double() * slope)
    ratio = (p.double() * torch.exp2(weight.double()) / true)[p > 2.0**-5]
    error = ratio / ratio.mean() - 1
    assert 0.95 * P_ERROR[softmax] <= error.std() <= 1.06 * P_ERROR[softmax]
    assert int(codes.max()) == top and bool((codes.amax(1) == top).all())
    assert abs(ratio.mean() - (1.041 if softmax == "linear" else 1)) <= 1e-3
    assert torch.allclose(exact.double() * torch.exp2(weight.double()), true.sum(1, keepdim=True), rtol=1e-5)


def test_the_steps_of_the_bent_code() -> None:
    """Every f16 up to the top code, by numpy's f16: as in the kernel, where a word's low bits are taken and put into
    another number. What is masked, and u = 0, has code 0."""
    bits = np.arange(np.float16(EXP2_CODE - BELOW).view(np.uint16) + 1, dtype=np.uint16)
    u = bits.view(np.float16)
    eighths = ((u + np.float16(128.75)).view(np.uint16) & 0x3F) | 0x6400  # 1024 + 8 f
    root = eighths.view(np.float16).astype(np.float64) * 0.025909423828125 - 27.375
    root = root.astype(np.float16).astype(np.float64)
    code = (root * root + u.astype(np.float64)).astype(np.float16)
    want = ((code + np.float16(1024)).view(np.uint16) & 0xFF).astype(np.uint8)
    constants = np.array([0x26A2, 0xCED8, 0x5806], np.uint16).view(np.float16)  # in code_of
    assert constants.tolist() == [0.025909423828125, -27.375, 128.75]
    got = _bent(torch.from_numpy(u.astype(np.float32))[None])[0]
    assert torch.equal(got.round().to(torch.uint8), torch.from_numpy(want))
    assert want[0] == 0 and want[-1] == want.max() == 120


@pytest.mark.parametrize("softmax", ["linear", "quadratic"])
def test_codes_of_what_is_masked_and_of_nan(softmax: str) -> None:
    """A masked score has P = 0 beside others and alone; a NaN is one, in its own element."""
    scores = torch.tensor([[0.0, -torch.inf, -60000.0], [-torch.inf] * 3, [0.0, torch.nan, -torch.inf]])
    p, codes, weight, _ = SOFTMAXES[softmax](scores, torch.ones(3, 1))
    top = {"linear": 122, "quadratic": 120}[softmax]
    assert codes.tolist() == [[top, 0, 0], [0, 0, 0], [top, 255, 0]] and bool(p[2, 1].isnan())
    assert weight[1] == DEAD_WEIGHT and bool((weight[[0, 2]] > -100).all())


@pytest.mark.parametrize(("softmax", "most"), [("linear", 0.007), ("quadratic", 0.0085), ("exp2", 0.0018)])
def test_the_share_of_keys_far_below(softmax: str, most: float) -> None:
    """One key, and 255 so far below it that their codes are denormal: by how much the share of these is off."""
    worst = 0.0
    for below in torch.arange(12.0, 20.0, 1 / 32).tolist():
        scores = torch.full((1, 256), -below)
        scores[0, 0] = 0.0
        slope = 1.0 if softmax == "exp2" else 8.0
        p = SOFTMAXES[softmax](scores, torch.full((1, 1), slope))[0].double()
        share = 255 * 2.0**-below / (1 + 255 * 2.0**-below)
        worst = max(worst, abs(float(p[0, 1:].sum() / p.sum()) - share))
    assert 0.9 * most <= worst <= most
