"""Keys without their mean, Q and K rotated: what is defined to the bit, and what attention makes of it.

Regressions these catch: a mean of the wrong rows or heads, an LSE of the moved logits, a broken row that breaks others,
columns that are padded after the rotation instead of before, signs that differ from what kernels hold.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import half_arguments, split
from reference import attention64, randn, relative_l2

from fp8cutlass import attention, explain, supports
from fp8cutlass.call.launch import quantised
from fp8cutlass.call.operators import attend
from fp8cutlass.call.plan import resolve
from fp8cutlass.manifest import Manifest
from fp8cutlass.quant.prepare import prepared
from fp8cutlass.quant.rotate import SIGNS, rotate, rotated_columns
from fp8cutlass.quant.smooth import SAMPLES, key_mean, restore_lse

HEAD_DIMS = [32, 64, 96, 128, 192, 256]
MODES: list[dict[str, bool]] = [{"smooth_k": True}, {"hadamard": True}, {"smooth_k": True, "hadamard": True}]


def biased(kv_heads: int = 2, tokens: int = 150, head_dim: int = 64, seed: int = 1) -> torch.Tensor:
    """Keys that share a vector of N(0, 64) in each head."""
    bias = 8 * randn(2, kv_heads, 1, head_dim, seed=seed + 100).float()
    return (randn(2, kv_heads, tokens, head_dim, seed=seed).float() + bias).bfloat16()


# ---- the mean -------------------------------------------------------------------------------------------------------


def pairwise(rows: list[torch.Tensor]) -> torch.Tensor:
    while len(rows) > 1:
        rows = [rows[i] + rows[i + 1] for i in range(0, len(rows), 2)]
    return rows[0]


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_of_evenly_spaced_keys(tokens: int, dtype: torch.dtype) -> None:
    """The rows and the order of summation that the definition names, bit for bit."""
    k = biased(tokens=tokens).to(dtype)
    n = min(SAMPLES, tokens)
    rows = [k[:, :, i * tokens // n].float() for i in range(n)]
    rows += [torch.zeros_like(rows[0])] * (SAMPLES - n)
    want = pairwise(rows) * torch.tensor(1 / n, dtype=torch.float32)
    assert torch.equal(key_mean(k), want)
    assert torch.equal(key_mean(k.transpose(1, 2).contiguous().transpose(1, 2)), want)


def test_mean_leaves_out_what_is_no_number() -> None:
    k = biased(tokens=8)
    finite = k.clone()
    for row, value in ((0, math.nan), (3, math.inf), (7, -math.inf)):
        k[:, :, row, 5], finite[:, :, row, 5] = value, 0.0
    assert torch.equal(key_mean(k), key_mean(finite))
    huge = torch.full((1, 1, 40, 64), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    huge[..., 1] = 2.0
    assert key_mean(huge)[0, 0, :2].tolist() == [0.0, 2.0]


def test_restored_lse() -> None:
    """The LSE of logits of moved keys becomes that of the keys themselves, of each group's own KV head."""
    q, k = randn(2, 6, 40, 64, seed=3), biased(kv_heads=2)
    mean, scale = key_mean(k), -0.2
    moved = attention64(q, k.double() - mean[:, :, None], k, scale).lse.float()
    moved[0, 0, 0] = -torch.inf
    restore_lse(moved, q, mean, scale)
    want = attention64(q, k, k, scale)
    assert moved[0, 0, 0] == -torch.inf
    moved[0, 0, 0] = want.lse[0, 0, 0]
    assert float((moved - want.lse).abs().max()) <= 1e-4 + 2**-22 * want.max_score


# ---- the rotation ---------------------------------------------------------------------------------------------------


def matrix(head_dim: int) -> torch.Tensor:
    """What a row is multiplied by, float64: signs, then a Hadamard matrix for each group of columns."""
    columns = rotated_columns(head_dim)
    one = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(columns)] for i in range(columns)])
    signs = [-1.0 if SIGNS[d // 32] >> d % 32 & 1 else 1.0 for d in range(head_dim)]
    blocks = torch.block_diag(*[one.double()] * (head_dim // columns)) / math.sqrt(columns)
    return torch.tensor(signs).double()[:, None] * blocks


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_is_the_matrix_and_orthonormal(head_dim: int) -> None:
    assert rotated_columns(head_dim) == {96: 32, 192: 64}.get(head_dim, head_dim)
    identity = torch.eye(head_dim).view(1, 1, head_dim, head_dim)
    made = rotate(identity, head_dim)[0, 0].double()
    assert float((made - matrix(head_dim)).abs().max()) < 1e-7
    assert float((made @ made.T - torch.eye(head_dim).double()).abs().max()) < 1e-6


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_bits(head_dim: int) -> None:
    """Column by column in the order that the definition names; of a narrower row, after it is padded."""
    x = randn(1, 1, 5, head_dim - 16, seed=head_dim)
    y = [x[..., d].float() if d < x.shape[3] else torch.zeros(1, 1, 5) for d in range(head_dim)]
    y = [-v if SIGNS[d // 32] >> d % 32 & 1 else v for d, v in enumerate(y)]
    columns, apart = rotated_columns(head_dim), 1
    while apart < columns:
        for d in range(head_dim):
            if not d & apart:
                y[d], y[d + apart] = y[d] + y[d + apart], y[d] - y[d + apart]
        apart *= 2
    factor = torch.tensor(1 / math.sqrt(columns), dtype=torch.float32)
    assert torch.equal(rotate(x, head_dim).view(torch.int32), (torch.stack(y, 3) * factor).view(torch.int32))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotated_zeros_are_positive(head_dim: int) -> None:
    """Also of a row whose zeros are negative after the signs: sums of those would be."""
    x = torch.tensor([0.0 if SIGNS[d // 32] >> d % 32 & 1 else -0.0 for d in range(head_dim)])
    for row in (x, -x, torch.zeros(head_dim)):
        assert not rotate(row.view(1, 1, 1, head_dim), head_dim).view(torch.int32).any()


def test_signs_are_those_of_pi() -> None:
    """256 bits of its fraction, by Machin's formula, so that nobody chose them."""

    def arctan(inverse: int) -> Fraction:
        return sum((Fraction((-1) ** n, (2 * n + 1) * inverse ** (2 * n + 1)) for n in range(80)), Fraction(0))

    bits = int((16 * arctan(5) - 4 * arctan(239) - 3) * 2**256)
    assert [bits >> 32 * (7 - i) & 0xFFFFFFFF for i in range(8)] == list(SIGNS)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_stay(head_dim: int) -> None:
    q, k = randn(1, 2, 20, head_dim - 3, seed=1), randn(1, 2, 30, head_dim - 3, seed=2)
    want = q.double() @ k.double().transpose(2, 3)
    got = rotate(q, head_dim).double() @ rotate(k, head_dim).double().transpose(2, 3)
    assert float((got - want).abs().max()) < 1e-6 * head_dim


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_row_stays_alone(head_dim: int, value: float) -> None:
    x = randn(1, 2, 9, head_dim, seed=1)
    want = rotate(x, head_dim)
    x[0, 1, 4, 40] = value
    got = rotate(x, head_dim)
    columns = rotated_columns(head_dim)
    first = 40 // columns * columns
    assert not got[0, 1, 4, first : first + columns].isfinite().any()
    got[0, 1, 4, first : first + columns] = want[0, 1, 4, first : first + columns]
    assert torch.equal(got, want)


def test_a_spike_is_spread() -> None:
    """One element 40 times the others no longer sets the range of its row; a constant row does not become a spike."""
    x = torch.ones(1, 1, 2, 128)
    x[0, 0, 1] = randn(128, seed=1).float()
    x[0, 0, 1, 7] = 40.0
    y = rotate(x, 128)[0, 0]
    assert float(y[0].abs().max()) < 5 and float(y[1].abs().max()) < 8


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("head_dim", [64, 80, 96])
@pytest.mark.parametrize("alignment", ["none", "top_left", "bottom_right"])
def test_attention_with_grouped_heads(mode: dict[str, bool], head_dim: int, alignment: str) -> None:
    """Output and LSE against float64 on what was given. Without smoothing the bias costs 20%."""
    q = randn(2, 6, 100, head_dim, seed=3)
    k, v = biased(head_dim=head_dim), randn(2, 2, 150, head_dim, seed=4)
    if "smooth_k" not in mode:
        k = randn(2, 2, 150, head_dim, seed=1)
    mask = {} if alignment == "none" else {"is_causal": True, "causal_alignment": alignment}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, precision="accurate", **mask, **mode)
    offset = {"none": None, "top_left": 0, "bottom_right": 50}[alignment]
    want = attention64(q, k, v, head_dim**-0.5, offset)
    assert relative_l2(out, want.out) < 0.066
    # One logit is off by 4% of a deviation; the first row of a causal mask has one key.
    assert float((lse - want.lse).abs().max()) < 0.3 and float((lse - want.lse).square().mean().sqrt()) < 0.02


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_rows_without_keys(mode: dict[str, bool]) -> None:
    q, k, v = randn(1, 2, 40, 64, seed=1), randn(1, 2, 8, 64, seed=2), randn(1, 2, 8, 64, seed=3)
    out, lse = attention(q, k, v, is_causal=True, causal_alignment="bottom_right", return_lse=True, **mode)
    assert not out[:, :, :32].any() and bool((lse[:, :, :32] == -torch.inf).all())
    assert bool(out[:, :, 32:].any()) and bool(lse[:, :, 32:].isfinite().all())


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_transformed_operands_are_what_is_quantised(mode: dict[str, bool], scaling: str, manifest: Manifest) -> None:
    """By hand: rows changed in float32, rounded to bf16, then quantised as they are without."""
    q, k, v = randn(1, 4, 40, 40, seed=1), biased(head_dim=40)[:1], randn(1, 2, 150, 40, seed=2)
    call, tensors = split("half", q=q, k=k, v=v, scaling=scaling, **mode)
    variant = resolve(call, q, k).variant
    got = quantised(call, variant, manifest.scaling[scaling], tensors)
    moved = k.float() - key_mean(k)[:, :, None] if "smooth_k" in mode else k.float()
    if "hadamard" in mode:
        q, moved = (rotate(x, variant.head_dim).bfloat16() for x in (q, moved))
    call, tensors = split("half", q=q, k=moved.bfloat16(), v=v, scaling=scaling)
    want = quantised(call, variant, manifest.scaling[scaling], tensors)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(got, name).view(torch.uint8), getattr(want, name).view(torch.uint8))
        assert torch.equal(getattr(got, f"{name}_descale"), getattr(want, f"{name}_descale"))


@pytest.mark.edge(54)
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("scaling", ["head", "block", "token"])
def test_a_broken_row_in_attention(mode: dict[str, bool], value: float, scaling: str, manifest: Manifest) -> None:
    """Its bytes are NaN, all of them where the row is rotated; no descale and no other row knows of it."""
    q, k, v = (randn(1, 2, 200, 64, seed=seed) for seed in range(3))
    plain = attention(q, k, v, is_causal=True, scaling=scaling, **mode)
    broken_q = q.clone()
    broken_q[0, 1, 70, 9] = value
    out = attention(broken_q, k, v, is_causal=True, scaling=scaling, **mode)
    assert bool(out[0, 1, 70].isnan().all())
    out[0, 1, 70] = plain[0, 1, 70]
    if scaling == "block":  # a descale for each row: the others keep their bits
        assert torch.equal(out, plain)
    assert bool(out.isfinite().all())
    broken_k = k.clone()
    broken_k[0, 1, 150, 9] = value
    out = attention(q, broken_k, v, is_causal=True, scaling=scaling, **mode)
    assert bool(out[0, 0].isfinite().all()) and bool(out[0, 1, :128].isfinite().all())
    assert bool(out[0, 1, 150:].isnan().all())
    variant = manifest.find(supports(q, k, v, is_causal=True, scaling=scaling)[1].split()[0])
    call, tensors = split("half", q=q, k=broken_k, v=v, scaling=scaling, right=0, **mode)
    made = quantised(call, variant, manifest.scaling[scaling], tensors)
    bytes_of_row = made.k[0, 1, 150].view(torch.uint8)
    assert bytes_of_row[9] & 0x7F == 0x7F
    if "hadamard" in mode:
        assert bool(((bytes_of_row & 0x7F) == 0x7F).all())
    assert made.k_descale is not None and bool(made.k_descale.isfinite().all()) and float(made.k_descale.max()) <= 1


def test_one_key() -> None:
    """It is its own mean: the score is 0, the result its value, the LSE that of the key."""
    q, k, v = randn(1, 1, 3, 64, seed=1), 4 * randn(1, 1, 1, 64, seed=2), randn(1, 1, 1, 64, seed=3)
    for mode in MODES:
        out, lse = attention(q, k, v, return_lse=True, **mode)
        assert relative_l2(out, v.expand_as(out)) < 0.05
        if "smooth_k" in mode:
            assert float((lse - attention64(q, k, v, 0.125).lse).abs().max()) < 1e-4


def test_float16_beyond_its_range() -> None:
    """A rotated row of large fp16 values leaves fp16, not the float32 and bf16 in between."""
    q, k = (torch.full((1, 1, 4, 64), 60000.0, dtype=torch.float16) for _ in range(2))
    rotated = prepared(q, None, head_dim=64, hadamard=True)
    assert rotated.dtype == torch.bfloat16 and float(rotated.abs().max()) > 65504
    assert bool(attention(q, k, k, hadamard=True, scale=1e-9).isfinite().all())


def test_explain_and_supports() -> None:
    x = randn(1, 2, 40, 64, seed=1)
    assert "before:" not in explain(x, x, x)
    assert "before:    the mean of" in explain(x, x, x, smooth_k=True)
    text = explain(x, x, x, smooth_k=True, hadamard=True)
    assert "(smooth_k), then Q and K rotated by a Hadamard matrix (hadamard)" in text
    assert supports(x, x, x, smooth_k=True, hadamard=True)[0]
    refused = supports(*[x.to(torch.float8_e4m3fn)] * 3, q_descale=1.0, k_descale=1.0, v_descale=1.0, hadamard=True)
    assert not refused[0] and "hadamard" in refused[1]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_compile(mode: dict[str, bool]) -> None:
    torch._dynamo.reset()
    q, k, v = (randn(2, 2, 70, 40, seed=seed) for seed in range(3))

    def step(*x: torch.Tensor) -> Any:
        return attention(*x, return_lse=True, **mode)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, k, v), step(q, k, v), strict=True):
        assert torch.equal(got, want)


def test_opcheck() -> None:
    q, k, v = (randn(2, 2, 133, 40, seed=seed) for seed in range(3))
    asked = {"scaling": "block", "precision": "fast", "right": 3, "smooth_k": True, "hadamard": True}
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attend, half_arguments(q, k, v, **asked), test_utils=tests)


def test_kernels_hold_the_same_constants() -> None:
    """Samples and signs stand in the header of the kernels as well."""
    header = (Path(__file__).parents[2] / "include/fp8cutlass/transform.cuh").read_text()
    assert f"kSamples = {SAMPLES};" in header
    assert ", ".join(f"0x{word:08x}" for word in SIGNS) in " ".join(header.split())
