"""The model of the FP8 accumulator, and the gates of the fuzzer that rest on it. The figures of a card are those that
the fuzzer printed on an H200 (seed 20).

Regressions these catch: products that are added whole, or aligned by their size instead of their factors' exponents;
an e4m3 output compared after its rounding, where equal results on a tie go either way.
"""

from __future__ import annotations

from collections.abc import Callable

import fuzz_check
import fuzz_judge
import pytest
import torch
from fuzz_cases import CELLS, arguments, draw, inputs_of, sinks_of
from fuzz_masks import draw_masked, mask_of, masked_reference, products_on_card
from kernel_gates import L2_EMULATOR, beyond_rounding
from reference import Reference, attention64
from tensor_core import cut_products, scores, values

from codegen.families.warpgroup.view import TRUNCATION
from fp8cutlass.manifest import Variant, generated_dir, load_manifest


def one_score(q: list[float], k: list[float], accumulator: str = "f32") -> float:
    row = [torch.tensor(x + [0.0] * (-len(x) % 32)).view(1, 1, -1) for x in (q, k)]
    return float(scores(*row, accumulator, emulated_mma=False))


def test_what_a_step_loses() -> None:
    large, small = [256.0] + [0.0] * 31, [32.0] + [0.0] * 31  # a sum of 2^13, of which a unit is 1
    assert one_score(large + [0.75] * 32, small + [1.0] * 32) == 8192.0, "32 products below a unit are lost"
    assert one_score(large + [1.5] * 32, small + [-1.0] * 32) == 8192.0 - 32, "each is cut toward zero"
    assert one_score([0.75] * 32, [1.0] * 32) == 24.0, "nothing is lost beside equals"
    # 2.25 * 2^12 counts as 2^12, so its unit is 1/2; by its size it would be 1.
    assert one_score([96.0, 0.5], [96.0, 1.0]) == 9216.0, "the sum, 2^13 and more, keeps no half"
    assert one_score([96.0, 0.5, 0.5], [96.0, 1.0, 1.0]) == 9217.0, "the products do"
    assert one_score([1.0, 1.0], [2048.0, 1.0], "f16") == 2048.0, "an f16 tie goes to even"


def a_case(
    number: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Reference, Variant, Callable[[], fuzz_check.Expected]]:
    """A case of the card's, its float64 result, the kernel it had and the emulator of it, which reads the model."""
    monkeypatch.setattr(fuzz_check, "is_emulated", lambda variant: False)
    case = draw(20, number, CELLS["cuda"])
    inputs, variant = inputs_of(case), load_manifest(generated_dir()).find(kernel)
    operands, _ = fuzz_check.operands_for(case, inputs, variant)
    reference = attention64(*operands.real, case.softmax_scale, case.causal_offset)
    options = arguments(case, inputs, "cpu") | {"out_descale": 1.0}
    return reference, variant, lambda: fuzz_check._emulated(case, operands, variant, options, "cpu")


@pytest.mark.parametrize(
    ("number", "kernel", "seen"),
    [
        (6282, "sm90a_fwd_d96_m64n128w4_s3_block_full_e4m3_e4m3_exp2_serial_solo", 0.03613),
        (6803, "sm90a_fwd_d64_m64n128w4_s3_block_full_e4m3_bf16_exp2_serial_solo", 0.02431),  # 0.02711 by their size
    ],
)
def test_errors_that_a_card_had(number: int, kernel: str, seen: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest error of the LSE against float64, to the digits that were printed."""
    reference, _, emulated = a_case(number, kernel, monkeypatch)
    plain = emulated()
    with cut_products(two_terms=False):
        cut = emulated()
    assert float((cut.lse - reference.lse).abs().max()) == pytest.approx(seen, abs=1e-5)
    assert float((plain.lse - reference.lse).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("number", "kernel", "seen"),
    [
        (114, "sm90a_fwd_d64_m128n128w8_s4_block_blocks_e4m3_fp16_exp2_pingpong_solo", 0.02842),
        (139, "sm90a_fwd_d128_m128n128w8_s3_block_blocks_e4m3_bf16_exp2_serial_solo", 0.02075),
        (2145, "sm90a_fwd_d128_m128n128w8_s3_block_blocks_e4m3_fp16_exp2_serial_solo", 0.1001),
    ],
)
def test_errors_that_masked_calls_had(number: int, kernel: str, seen: float) -> None:
    """As above, of calls with a mask: seed 1, printed on an H100."""
    case = draw_masked(1, number, CELLS["cuda"])
    call, variant = case.call, load_manifest(generated_dir()).find(kernel)
    operands, _ = fuzz_check.operands_for(call, inputs_of(call), variant)
    _, visible, bias = mask_of(case, "cpu")
    exact, cut = (
        masked_reference(
            operands.real, call.softmax_scale, visible, bias, call.softcap, sinks_of(call), products=products
        ).lse
        for products in (None, products_on_card(operands, variant.score, "cpu"))
    )
    alive = exact != -torch.inf
    assert float((cut - exact)[alive].abs().max()) == pytest.approx(seen, abs=5e-5)  # four digits were printed


def test_a_row_that_a_card_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst row of the z-test with P in two terms, whose own error is small beside the cuts of P V."""
    kernel = "sm90a_fwd_d64_m64n128w4_s2_block_full_e4m3_bf16_exp2x2_overlap_solo"
    reference, variant, emulated = a_case(11974, kernel, monkeypatch)
    worst = {}
    for two_terms in (False, True):
        with cut_products(two_terms=two_terms):
            out = emulated().out
        worst[two_terms] = fuzz_judge._z_test(out, reference, variant, torch.bfloat16, 0.0).row_rms
    assert worst[True] == pytest.approx(2.04, abs=0.005) and worst[False] < 0.9


def test_what_a_tile_of_many_keys_loses() -> None:
    """In percent, of P V for V ~ N(1, 1) and of the sums of P: a product with 1 has four bits and is seldom cut, so the
    sums lose less and the output would be too small, if the kernels did not give back a part (docs/lab/sm90a.md). With
    1.5 the sums would lose about as much."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 600, 256, generator=generator)
    codes = (122 + 8 * 1.442695 * (logits - logits.amax(-1, keepdim=True))).clamp_min(0).round()
    p = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    v = 1 + torch.randn(1, 48, 256, generator=generator)
    v = (v * (256 / v.abs().max())).to(torch.float8_e4m3fn).float()

    def lost(columns: torch.Tensor) -> float:
        sums = scores(p, columns, "f32", emulated_mma=False).double().sum()
        return 100 - 100 * float(sums / (p.double() @ columns.double().transpose(1, 2)).sum())

    ones = torch.ones(1, 1, 256)
    assert [lost(v), lost(ones), lost(1.5 * ones)] == pytest.approx([0.113, 0.021, 0.091], abs=0.005)
    assert abs(lost(v) - lost(ones) - 100 * (TRUNCATION - 1)) < 0.05


def test_values_in_two_terms() -> None:
    p, v = torch.tensor([[[256.0, 1.125]]]), torch.tensor([[[2.0, -1.0], [1.0, 0.5]]])
    out, total = values(p, v)
    assert torch.equal(out, p @ v) and float(total) == 257.125, "nothing is cut: 1.125 is a term of two"
    out, total = values(torch.tensor([[[256.0, 2.0**-6]]]), torch.tensor([[[256.0], [256.0]]]))
    assert float(out) == 65536.0 and float(total) == 256.0, "below units of 8 and of 1/32"
    assert float(values(torch.tensor([[[256.0, 0.0703125]]]), v)[1]) == 256.0625, "cut to a unit"


@pytest.mark.parametrize("descale", [1.0, 0.37])
def test_results_on_a_tie_of_e4m3(descale: float) -> None:
    """Equal results are as near as they were before the rounding, and 5% off a code is more than the limit."""

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).float() * descale

    tie = torch.full((64, 64), 100.0)
    noise = 0.003 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert beyond_rounding(stored(tie * (1 + noise)), tie * descale, descale) <= 0.003 < L2_EMULATOR
    code = torch.full((64, 64), fuzz_check.OUT_CODE)
    for wrong in (1.05, 0.95):
        assert beyond_rounding(stored(wrong * code), code * descale, descale) > 4 * L2_EMULATOR
    spread = 100 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert beyond_rounding(stored(spread), spread * descale, descale) < 1e-6 + 1e-2 * L2_EMULATOR
    assert beyond_rounding(stored(1.05 * spread), spread * descale, descale) > 2 * L2_EMULATOR
