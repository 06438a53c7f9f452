"""e4m3 that is divided by powers of two.

Regressions these catch: an element above the limit, a power that is larger than it has to be, a descale that does not
take the division back, rounding of what is not subnormal, a group whose largest element is looked for in another one.
"""

from __future__ import annotations

import pytest
import torch

from fp8cutlass import attention
from fp8cutlass.quant.lower import limit_byte, lowered
from fp8cutlass.quant.quantize import quantize

AMAX = 14.0
ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = ALL[~ALL.float().isnan()]


def test_the_limit_is_the_largest_number_that_is_no_larger() -> None:
    of = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for amax in (1.0, 1.1, 13.9, 14.0, 14.9, 15.0, 447.0, 448.0, 1e9):
        assert float(of[limit_byte(amax)]) == max(float(x) for x in of if x <= amax)


@pytest.mark.parametrize("largest", [float(x) for x in FINITE if float(x) > 0])
def test_a_row_of_each_largest_number(largest: float) -> None:
    """With all numbers that are no larger, of both signs: the least power of two, and its rounding alone."""
    row = FINITE[FINITE.float().abs() <= largest]
    made, descale = lowered(row[None, None, None], torch.full((1,), 0.75), "token", amax=AMAX, block=128)
    power = float(descale[0, 0, 0]) / 0.75
    assert power == max(1.0, 2.0 ** -(-(torch.tensor(largest / AMAX).log2().item()) // 1))
    assert float(made.float().abs().max()) <= AMAX
    assert torch.equal(made[0, 0, 0].float(), (row.float() / power).to(torch.float8_e4m3fn).float())
    exact = (row.float() / power).abs() >= 2.0**-6
    assert torch.equal(made[0, 0, 0].float()[exact] * power, row.float()[exact])


@pytest.mark.parametrize("descale", [(1,), (2, 3), "groups"])
@pytest.mark.parametrize(("granularity", "groups"), [("token", 300), ("block", 3)])
def test_each_group_by_itself(granularity: str, groups: int, descale: object) -> None:
    generator = torch.Generator().manual_seed(4)
    size = 2.0 ** torch.randint(-9, 9, (2, 3, 300, 1), generator=generator)
    x = (torch.randn(2, 3, 300, 64, generator=generator) * size).clamp(-448, 448).to(torch.float8_e4m3fn)
    given = torch.rand((2, 3, groups) if descale == "groups" else descale, generator=generator)  # type: ignore[arg-type]
    made, wide = lowered(x.transpose(1, 2).contiguous().transpose(1, 2), given, granularity, amax=AMAX, block=128)
    assert wide.shape == (2, 3, groups) and wide.is_contiguous() and made.stride(1) < made.stride(2)
    begins = range(groups) if granularity == "token" else range(0, 300, 128)
    for b in range(2):
        for h in range(3):
            for g, begin in enumerate(begins):
                of = slice(begin, begin + (1 if granularity == "token" else 128))
                own = given if given.numel() == 1 else given[b, h, g] if given.dim() == 3 else given[b, h]
                one, alone = lowered(x[b : b + 1, h : h + 1, of], own.reshape(1), granularity, amax=AMAX, block=128)
                assert torch.equal(one[0, 0].view(torch.uint8), made[b, h, of].view(torch.uint8))
                assert float(alone) == float(wide[b, h, g])


def test_nan_and_zeros() -> None:
    x = torch.tensor([[0.0, -0.0, torch.nan], [0.0, 0.0, 0.0], [14.0, -0.001953125, torch.nan]])
    made, descale = lowered(x.to(torch.float8_e4m3fn)[None, None], torch.ones(1), "token", amax=AMAX, block=128)
    assert made[0, 0].isnan().tolist() == x.isnan().tolist()
    assert descale[0, 0].tolist() == [32.0, 1.0, 32.0], "a NaN counts as 448"
    assert float(made[0, 0, 2, 0]) == 14 / 32


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
