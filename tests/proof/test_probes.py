"""Inputs that random numbers never produce: each catches a defect that was shipped somewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import attention64, make_operands, randn, relative_l2, visible, z_test

from fp8cutlass import attention, quantize

MODES = [(scaling, precision) for scaling in ("tensor", "head", "block", "token") for precision in ("fast", "accurate")]
MODES += [("block", "high"), ("token", "high")]
modes = pytest.mark.parametrize(("scaling", "precision"), MODES)


def columns(*values: torch.Tensor, head_dim: int = 32) -> torch.Tensor:
    """(1, 1, S, D) bf16 with the given leading columns, zeros after."""
    x = torch.zeros(1, 1, len(values[0]), head_dim)
    for d, column in enumerate(values):
        x[0, 0, :, d] = column
    return x.bfloat16()


def logits(values: torch.Tensor, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k whose scores at scale 1 are ``values`` (S,), for every row."""
    return columns(torch.ones(rows)), columns(values)


@modes
@pytest.mark.parametrize("constant", [1.0, -0.37, 300.0])
def test_constant_v(constant: float, scaling: str, precision: str) -> None:
    """Accumulator and normaliser see the same P: within 2^-8 (the rounding of the output)."""
    q, k = randn(1, 2, 9, 64, seed=1), randn(1, 2, 5000, 64, seed=2)
    v = torch.full_like(k, constant)
    got = attention(q, k, v, scaling=scaling, precision=precision)
    assert float((got.double() / float(v[0, 0, 0, 0]) - 1).abs().max()) <= 2.0**-8


@pytest.mark.edge(13)
@modes
@pytest.mark.parametrize(("others", "nats"), [(2047, -7.0), (4095, -5.0), (4095, -12.0)])
def test_one_hot_key_among_thousands(others: int, nats: float, scaling: str, precision: str) -> None:
    """V = 1 everywhere; without an offset P underflows and the answer is 0.35 (aiter#5535)."""
    values = torch.full((others + 1,), nats)
    values[others // 3] = 0.0
    q, k = logits(values)
    got = attention(q, k, torch.ones_like(k), scale=1.0, scaling=scaling, precision=precision)
    assert float((got.float() - 1).abs().max()) <= 0.02


@modes
def test_mass_in_many_small_keys(scaling: str, precision: str) -> None:
    """V = (0, 1, 1, ...), the first key hot: the rest weighs 2047 e^-5, which a per-tile maximum keeps."""
    values = torch.full((2048,), -5.0)
    values[0] = 0.0
    q, k = logits(values)
    v = torch.ones_like(k)
    v[:, :, 0] = 0
    got = attention(q, k, v, scale=1.0, scaling=scaling, precision=precision)
    want = attention64(q, k, v, 1.0).out
    assert relative_l2(got[..., :1], want[..., :1]) <= 0.02


@pytest.mark.edge(15)
@modes
def test_one_hot_attention_is_the_row_of_v(scaling: str, precision: str) -> None:
    """Row i attends to key (7 i) mod S alone: the output is that row of the dequantised V, rounded to bf16."""
    seqlen = 200
    target = torch.arange(seqlen) * 7 % seqlen
    q, k = torch.zeros(1, 1, seqlen, 256), torch.zeros(1, 1, seqlen, 256)
    q[0, 0, torch.arange(seqlen), target] = 64.0
    k[0, 0, torch.arange(seqlen), torch.arange(seqlen)] = 64.0
    v = randn(1, 1, seqlen, 256, seed=3)
    shared_by = {"token": "channel"}.get(scaling, scaling)
    v8, descale = quantize(v, granularity=shared_by, amax=256.0)
    spread = {
        "tensor": lambda d: d.view(1, 1, 1, 1),
        "head": lambda d: d[:, :, None, None],
        "block": lambda d: d.repeat_interleave(128, 2)[:, :, :seqlen, None],
        "channel": lambda d: d[:, :, None, :],
    }[shared_by](descale)
    got = attention(q.bfloat16(), k.bfloat16(), v, scale=1.0, scaling=scaling, precision=precision)
    want = (v8.float() * spread)[:, :, target]
    assert float((got.float() - want).abs().max()) <= 2.0**-8 * float(want.abs().max())
    assert bool(((got.float() - want).abs() <= 2.0**-8 * want.abs() * 1.01).all())


@pytest.mark.edge(10, 11)
@modes
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [6e4, 1e6, 8e6])
def test_enormous_logits(size: float, sign: float, scaling: str, precision: str) -> None:
    """All logits of a row near +-size, the largest in the last tile (flashinfer#4267, FlashAttention#1930).

    Beyond about 2^25 octaves the float32 logit itself is too coarse for the offset of 8 octaves.
    """
    values = sign * size * torch.tensor([1.0, 0.5, 0.25, 0.75]).repeat(50)
    values[190] = size * (2.0 if sign > 0 else -0.125)
    q, k = logits(values / size)
    v = torch.arange(200.0).repeat(32, 1).T[None, None].bfloat16()
    got, lse = attention(q, k, v, scale=size, scaling=scaling, precision=precision, return_lse=True)
    assert float((got.float() - 190).abs().max()) <= 190 * 0.06
    want = attention64(q, k, v, size)
    assert float((lse - want.lse).abs().max()) <= 1e-4 + 2.0**-12 * want.max_score


@pytest.mark.edge(12)
@modes
@pytest.mark.parametrize("span", [20.0, 400.0])
def test_rising_maximum(span: float, scaling: str, precision: str) -> None:
    """Sorted keys: the running maximum rises in every tile. Held to float64 on the quantised operands."""
    q, k = logits(torch.linspace(0, 1, 1024))
    v = randn(1, 1, 1024, 32, seed=4)
    got, lse = attention(q, k, v, scale=span, scaling=scaling, precision=precision, return_lse=True)
    shared_by = {"token": ("token", "token", "channel"), "block": ("token", "block", "block")}
    amax = 14.0 if precision == "fast" and scaling != "token" else 448.0
    x = make_operands(q, k, v, shared_by.get(scaling, (scaling,) * 3), score_amax=amax)
    want = attention64(*x.real, span)
    z = z_test(got, want, "linear")  # all rows are alike, so the mean says nothing
    assert z.rms <= 1.1 and z.max <= 7
    assert float((lse - want.lse).abs().max()) <= 1e-4 + 2.0**-12 * want.max_score


@modes
@pytest.mark.parametrize("constant", [1e17, 1e20])
def test_rising_maximum_under_a_large_v(constant: float, scaling: str, precision: str) -> None:
    """One nat every 20 keys, 147 octaves in all: O must not overflow where a tile outweighs the reference."""
    q, k = logits(torch.arange(2048) / 2048)
    v = torch.full((1, 1, 2048, 32), constant).bfloat16()
    got = attention(q, k, v, scale=2048 / 20, scaling=scaling, precision=precision)
    assert float((got.double() / float(v[0, 0, 0, 0]) - 1).abs().max()) <= 2.0**-7


@modes
def test_falling_maximum(scaling: str, precision: str) -> None:
    """The first tile holds everything, the later ones nothing: they must not disturb it."""
    values = torch.full((640,), -300.0)
    values[:3] = 0.0
    q, k = logits(values / 300)
    v = randn(1, 1, 640, 32, seed=5)
    got = attention(q, k, v, scale=300.0, scaling=scaling, precision=precision)
    assert relative_l2(got, v[:, :, :3].double().mean(2, keepdim=True).expand_as(got)) <= 0.05


@modes
def test_needle_at_tile_boundaries(scaling: str, precision: str) -> None:
    for place in (0, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 600):
        values = torch.zeros(601)
        values[place] = 1.0
        q, k = logits(values)
        v = torch.zeros(1, 1, 601, 32, dtype=torch.bfloat16)
        v[:, :, place] = 1.0
        got = attention(q, k, v, scale=20.0, scaling=scaling, precision=precision)
        assert float((got.float() - 1).abs().max()) <= 0.02, place


@modes
@pytest.mark.parametrize("factor", [1e-30, 1e-5, 1e10])
def test_the_size_of_the_inputs_does_not_matter(factor: float, scaling: str, precision: str) -> None:
    """Descales carry the size: V scaled by a factor gives the result scaled by it."""
    q, k, v = (randn(1, 1, 70, 32, seed=seed) for seed in range(3))
    plain = attention(q, k, v, scaling=scaling, precision=precision)
    got = attention(q, k, (v.float() * factor).bfloat16(), scaling=scaling, precision=precision)
    assert relative_l2(got.double() / factor, plain) <= 0.02


@pytest.mark.edge(51)
@modes
def test_all_zero_inputs(scaling: str, precision: str) -> None:
    x = torch.zeros(1, 2, 140, 64, dtype=torch.bfloat16)
    got, lse = attention(x, x, x, scaling=scaling, precision=precision, return_lse=True)
    assert not got.any() and float((lse - math.log(140)).abs().max()) <= 1e-4


def poisoned(x: torch.Tensor, *where: int, value: float = math.nan) -> torch.Tensor:
    y = x.clone()
    y[(0, 0, *where)] = value
    return y


@pytest.mark.edge(54)
@modes
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_a_query_row_stays_there(value: float, scaling: str, precision: str) -> None:
    """torchao#4725: and the row itself must not come back finite."""
    q, k, v = (randn(1, 2, 90, 64, seed=seed) for seed in range(3))
    kwargs: dict[str, Any] = {"scaling": scaling, "precision": precision}
    finite = attention(poisoned(q, 40, 3, value=0.0), k, v, **kwargs)
    got = attention(poisoned(q, 40, 3, value=value), k, v, **kwargs)
    assert bool(got[0, 0, 40].isnan().all())
    rest = torch.ones(1, 2, 90, dtype=torch.bool)
    rest[0, 0, 40] = False
    assert torch.equal(got[rest], finite[rest])


@pytest.mark.edge(54)
@modes
@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_in_a_key_reaches_the_rows_that_see_it_and_no_other_tile(side: str, scaling: str, precision: str) -> None:
    """Key 300 of a causal call. Rows past it are NaN; rows whose query tile does not reach its KV tile are clean.

    In between lies the kernels' limit: a masked P of 0 times a NaN in V is NaN inside the tile on the diagonal.
    """
    q, k, v = (randn(1, 1, 400, 64, seed=seed) for seed in range(3))
    k_bad, v_bad = (poisoned(k, 300, 5), v) if side == "k" else (k, poisoned(v, 300, 5))
    k_ok, v_ok = (poisoned(k, 300, 5, value=0.0), v) if side == "k" else (k, poisoned(v, 300, 5, value=0.0))
    kwargs: dict[str, Any] = {"scaling": scaling, "precision": precision, "is_causal": True}
    got, want = attention(q, k_bad, v_bad, **kwargs), attention(q, k_ok, v_ok, **kwargs)
    assert bool(got[0, 0, 300:, 5].isnan().all())
    assert torch.equal(got[0, 0, :256], want[0, 0, :256])
    if side == "k":  # a masked score is -inf, whatever it was
        assert torch.equal(got[0, 0, :300], want[0, 0, :300])


@pytest.mark.edge(6)
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_fully_masked_rows_before_the_first_key(precision: str) -> None:
    """bottom_right with more queries than keys: the mean of V would be wrong (onnxruntime#28904)."""
    q, k = randn(1, 2, 300, 64, seed=1), randn(1, 2, 70, 64, seed=2)
    got, lse = attention(q, k, k, is_causal=True, causal_alignment="bottom_right", precision=precision, return_lse=True)
    dead = ~visible(300, 70, 70 - 300).any(-1)
    assert int(dead.sum()) == 230
    assert not got[:, :, dead].any() and bool((lse[:, :, dead] == -torch.inf).all())
    assert bool(lse[:, :, ~dead].isfinite().all())
