"""SageAttention's names: results, masks that are applied, arguments that are not swallowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import masked64, relative_l2
from where import randn

from fp8cutlass import UnsupportedError, attention, stats
from fp8cutlass.api.ask import widest_integer
from fp8cutlass.choose import target as targets
from fp8cutlass.integrations import sage, set_minimum_length
from fp8cutlass.integrations.sage import sageattn, sageattn_varlen
from fp8cutlass.manifest import generated_dir

BOUND = 0.06


def operands(layout: str = "HND", rows: int = 40, keys: int = 40) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    made = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return tuple(x if layout == "HND" else x.transpose(1, 2).contiguous() for x in made)


def want(causal: bool = False, scale: float = 0.125, rows: int = 40, keys: int = 40) -> Any:
    seen = torch.ones(rows, keys, dtype=torch.bool)
    return masked64(*operands(rows=rows, keys=keys), scale, seen.tril() if causal else seen)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_results_and_lse(layout: str, causal: bool, smooth_k: bool) -> None:
    q, k, v = operands(layout)
    with stats.collect() as seen:
        out, lse = sageattn(q, k, v, layout, causal, None, True, smooth_k=smooth_k)
    assert out.shape == q.shape
    reference = want(causal)
    assert relative_l2(out if layout == "HND" else out.transpose(1, 2), reference.out) < BOUND
    assert lse.shape == (2, 4, 40) and float((lse - reference.lse).abs().max()) < 0.3
    assert (seen.result().served.calls, seen.result().fallback.calls) == (1, 0)


def test_scale_and_cross_attention() -> None:
    q, k, v = operands(rows=24)
    assert relative_l2(sageattn(q, k, v, sm_scale=0.05), want(scale=0.05, rows=24).out) < BOUND


def test_smoothing_is_the_default_and_helps_keys_that_share_a_bias() -> None:
    q, k, v = operands()
    biased = k + 20.0
    exact = masked64(q, biased, v, 0.125, torch.ones(40, 40, dtype=torch.bool)).out
    smooth, plain = (relative_l2(sageattn(q, biased, v, smooth_k=on), exact) for on in (True, False))
    assert smooth < 0.5 * plain and torch.equal(sageattn(q, biased, v), sageattn(q, biased, v, smooth_k=True))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_a_mask_is_applied(layout: str, kind: torch.dtype) -> None:
    """One that is added by torch's attention, bit by bit; a mask that is dropped gives 0.3 and more."""
    mask = torch.ones(40, 40, dtype=torch.bool).tril(3)
    if kind != torch.bool:
        mask = torch.zeros(40, 40, dtype=kind).masked_fill(~mask, -torch.inf)
    q, k, v = operands(layout)
    with stats.collect() as seen:
        out = sageattn(q, k, v, layout, attn_mask=mask)
    got = out if layout == "HND" else out.transpose(1, 2)
    want = F.scaled_dot_product_attention(*operands(), mask, enable_gqa=True)
    assert torch.equal(got, want) == (kind != torch.bool) and relative_l2(got, want.double()) < BOUND
    assert relative_l2(sageattn(*operands()), want.double()) > 5 * BOUND
    assert {key.what for key in seen.result().counts} == ({""} if kind == torch.bool else {"mask"})


def test_a_mask_and_an_lse_are_more_than_torch_returns() -> None:
    with pytest.raises(UnsupportedError, match="LSE"):
        sageattn(*operands(), return_lse=True, attn_mask=torch.zeros(40, 40, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["dropout_p", "scale", "enable_gqa", "is_casual", "per_block_mean"])
@pytest.mark.parametrize("value", [None, 0.5])
def test_an_unknown_argument_is_a_type_error_by_name(name: str, value: Any) -> None:
    for function in (sageattn, sage.sageattn_qk_int8_pv_fp8_cuda):
        with pytest.raises(TypeError, match=name):
            function(*operands(), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_layout": "BHSD"}, "tensor_layout"),
        ({"smooth_v": True}, "smooth_v"),
        ({"pv_accum_dtype": "fp8"}, "pv_accum_dtype"),
        ({"qk_quant_gran": "per_tensor"}, "qk_quant_gran"),
    ],
)
def test_values_that_are_not_served_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        sageattn(*operands(), **arguments)


def test_causal_with_unequal_lengths_has_no_meaning() -> None:
    with pytest.raises(UnsupportedError, match="as many rows as keys"):
        sageattn(*operands(rows=24), is_causal=True)


def test_other_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="4 dimensions"):
        sageattn(*(x[0] for x in operands()))


def test_variants_have_integers_and_take_their_settings_by_name() -> None:
    """Those whose names ask for INT8 products of Q and K, and they smooth unless told otherwise."""
    q, k, v = operands()
    whole = attention(q, k, v, precision="int8", enable_gqa=True)
    assert not torch.equal(sageattn(q, k, v), whole)
    for variant, settings in (
        (sage.sageattn_qk_int8_pv_fp16_triton, {"quantization_backend": "cuda"}),
        (sage.sageattn_qk_int8_pv_fp16_cuda, {"pv_accum_dtype": "fp32", "smooth_v": False}),
        (sage.sageattn_qk_int8_pv_fp8_cuda, {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32+fp16"}),
        (sage.sageattn_qk_int8_pv_fp8_cuda_sm90, {"pv_accum_dtype": "fp32+fp32"}),
    ):
        with stats.collect() as seen:
            assert torch.equal(variant(*operands(), "HND", **settings), whole)
        assert {key.where for key in seen.result().counts} == {variant.__name__}
        plain = attention(q, k, v, precision="int8", smooth_k=False, enable_gqa=True)
        assert torch.equal(variant(*operands(), "HND", smooth_k=False), plain)
        with pytest.raises(TypeError):
            variant(*operands(), "HND", False)


def test_variants_without_kernels_for_integers_are_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "widest_integer", lambda device, precision: 32)
    assert torch.equal(sage.sageattn_qk_int8_pv_fp8_cuda(*operands()), sageattn(*operands()))


@pytest.mark.parametrize(("arch", "widest"), [("sm90a", (128, 0)), ("sm89", (256, 256))])
def test_how_wide_integers_of_a_card_are(arch: str, widest: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert (widest_integer(cpu, "int8"), widest_integer(cpu, "int8_full")) == (256, 256)
    monkeypatch.setattr(targets, "target", lambda device: targets.Target(generated_dir(), arch, 132))
    assert (widest_integer(card, "int8"), widest_integer(card, "int8_full")) == widest


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_batches(causal: bool) -> None:
    q, k, v = randn(40, 4, 64, seed=1), randn(40, 2, 64, seed=2) + 9.0, randn(40, 2, 64, seed=3)
    ends = torch.tensor([0, 24, 40], dtype=torch.int32)
    out = sageattn_varlen(q, k, v, ends, ends, 24, 24, causal, 0.05)
    for at in (slice(0, 24), slice(24, 40)):
        rows = at.stop - at.start
        seen = torch.ones(rows, rows, dtype=torch.bool)
        part = [x[at][None].transpose(1, 2) for x in (q, k, v)]
        reference = masked64(*part, 0.05, seen.tril() if causal else seen)
        assert relative_l2(out[at][None].transpose(1, 2), reference.out) < BOUND
    with pytest.raises(TypeError, match="attn_mask"):
        sageattn_varlen(q, k, v, ends, ends, 24, 24, attn_mask=None)


def test_short_calls_are_left_to_torch() -> None:
    set_minimum_length(64)
    try:
        with stats.collect() as seen:
            out = sageattn(*operands(), is_causal=True)
            _, lse = sageattn(*operands(), return_lse=True)
        assert {(key.kind, key.what) for key in seen.result().counts} == {("fallback", "short"), ("served", "")}
    finally:
        set_minimum_length(None)
    assert torch.equal(out, F.scaled_dot_product_attention(*operands(), is_causal=True, enable_gqa=True))
