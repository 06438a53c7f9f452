"""Rows of e4m3 Q that are divided by powers of two.

Regressions these catch: a score beyond f16, a power that is larger than it has to be, a descale that does not take the
division back, rounding of what is not subnormal, a row that is summed up with another one.
"""

from __future__ import annotations

import pytest
import torch

from fp8cutlass import attention
from fp8cutlass.quant.lower import MEAN, lowered
from fp8cutlass.quant.quantize import quantize

ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = ALL[~ALL.float().isnan()]
ONE = torch.ones(1)


@pytest.mark.parametrize("width", [64, 96, 256])
@pytest.mark.parametrize("largest", [float(x) for x in FINITE if float(x) > 0])
def test_a_row_of_each_number(largest: float, width: int) -> None:
    """Alone, with zeros, and with numbers that are no larger: the least power of two, and its rounding alone."""
    random = torch.Generator().manual_seed(int(largest * 512))
    smaller = FINITE[FINITE.float().abs() <= largest]
    rows = torch.zeros(3, width)
    rows[0, 5], rows[1] = -largest, largest
    rows[2] = smaller.float()[torch.randint(len(smaller), (width,), generator=random)]
    q = rows.to(torch.float8_e4m3fn)
    made, descale = lowered(q[None, None], torch.full((1,), 0.75), width)
    power = descale[0, 0] / 0.75
    mean = rows.double().abs().sum(1) / width
    for p, m in zip(power.tolist(), mean.tolist(), strict=True):
        assert m / p <= MEAN and (p == 1 or 2 * m / p > MEAN) and p.is_integer() and int(p) & (int(p) - 1) == 0
    assert torch.equal(made[0, 0].float(), (rows / power[:, None]).to(torch.float8_e4m3fn).float())
    exact = (rows / power[:, None]).abs() >= 2.0**-6
    assert torch.equal((made[0, 0].float() * power[:, None])[exact], rows[exact])


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_no_score_leaves_f16(width: int) -> None:
    """Of rows with the largest mean that there is, and of those whose subnormal quotients are rounded up."""
    random = torch.Generator().manual_seed(width)
    size = 2.0 ** torch.randint(-9, 9, (1, 1, 4000, width), generator=random)
    q = (torch.randn(1, 1, 4000, width, generator=random) * size).clamp(-448, 448)
    q[0, 0, :100], q[0, 0, 100] = q[0, 0, :100].sign() * 448, MEAN
    made, _ = lowered(q.to(torch.float8_e4m3fn), ONE, width)
    assert float(448 * made.double().abs().sum(3).max()) <= 196.5 * width < 65504


@pytest.mark.parametrize("descale", [(1,), (2, 3), (2, 3, 300)])
def test_each_row_by_itself(descale: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    size = 2.0 ** torch.randint(-9, 9, (2, 3, 300, 1), generator=generator)
    x = (torch.randn(2, 3, 300, 64, generator=generator) * size).clamp(-448, 448).to(torch.float8_e4m3fn)
    given = torch.rand(descale, generator=generator)
    made, wide = lowered(x.transpose(1, 2).contiguous().transpose(1, 2), given, 64)
    assert wide.shape == (2, 3, 300) and wide.is_contiguous() and made.stride(1) < made.stride(2)
    for b, h, row in ((0, 0, 0), (0, 2, 17), (1, 0, 299), (1, 1, 150)):
        own = given if given.numel() == 1 else given[b, h, row] if given.dim() == 3 else given[b, h]
        one, alone = lowered(x[b : b + 1, h : h + 1, row : row + 1], own.reshape(1), 64)
        assert torch.equal(one[0, 0, 0].view(torch.uint8), made[b, h, row].view(torch.uint8))
        assert float(alone) == float(wide[b, h, row])


def test_columns_that_only_the_kernel_has_count_as_zeros() -> None:
    q = torch.full((1, 1, 1, 48), 2 * MEAN).to(torch.float8_e4m3fn)
    assert [float(lowered(q, ONE, width)[1]) for width in (48, 64, 96)] == [2, 2, 1]


def test_nan_and_zeros() -> None:
    x = torch.tensor([[0.0, -0.0, torch.nan], [0.0, 0.0, 0.0], [14.0, -0.001953125, torch.nan]])
    made, descale = lowered(x.to(torch.float8_e4m3fn)[None, None], ONE, 64)
    assert made[0, 0].isnan().tolist() == x.isnan().tolist()
    assert descale[0, 0].tolist() == [1024.0, 1.0, 1024.0], "a NaN counts as more than any row"
    assert float(made[0, 0, 2, 0]) == 14 / 1024


@pytest.mark.parametrize("scaling", ["tensor", "head", "block"])
@pytest.mark.parametrize("precision", ["fast", "balanced"])
def test_a_call_with_the_largest_numbers(scaling: str, precision: str) -> None:
    """Scores would be 256 times what f16 holds."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, h, n, 64, generator=generator) for h, n in ((4, 70), (2, 600), (2, 600)))
    of = "tensor" if scaling == "tensor" else "head"
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = (quantize(x, granularity=of) for x in (q, k, v))
    assert float(q8.float().abs().max()) == 448
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    got = attention(q8, k8, v8, scaling=scaling, enable_gqa=True, precision=precision, **descales)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert float((got.float() - want).norm() / want.norm()) < 0.08
