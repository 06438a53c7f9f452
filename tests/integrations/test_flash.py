"""FlashAttention's names: the same results as attention in float64, and no argument that is swallowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import masked64, relative_l2
from where import randn

from fp8cutlass import UnsupportedError, alibi_slopes, quantize, stats
from fp8cutlass.integrations.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

BOUND = 0.06  # relative L2; losing a mask or a scale of these operands gives 0.3 and more


def operands(rows: int = 40, keys: int = 56, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    """(B, S, H, D)."""
    shapes = ((2, rows, heads, 64), (2, keys, kv_heads, 64), (2, keys, kv_heads, 64))
    return tuple(randn(*shape, seed=seed) for seed, shape in enumerate(shapes))


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float = 0.125, **more: Any
) -> Any:
    return masked64(*(x.transpose(1, 2) for x in (q, k, v)), scale, seen, **more)


def band(rows: int, keys: int, left: int = -1, right: int = -1) -> torch.Tensor:
    """What FlashAttention's window shows: beside key ``i + keys - rows`` of row i."""
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= distance >= -left if left >= 0 else True
    return seen & (distance <= right) if right >= 0 else seen


@pytest.mark.parametrize(
    ("arguments", "left", "right"),
    [
        ({}, -1, -1),
        ({"causal": True}, -1, 0),
        ({"window_size": (8, -1)}, 8, -1),
        ({"window_size": (8, 4)}, 8, 4),
        ({"window_size": (8, 4), "causal": True}, 8, 0),
        ({"window_size": None, "deterministic": True, "num_splits": 4, "sm_margin": 8}, -1, -1),
    ],
)
@pytest.mark.parametrize("rows", [40, 56])
def test_masks_are_aligned_with_the_end(arguments: dict[str, Any], left: int, right: int, rows: int) -> None:
    q, k, v = operands(rows)
    want = wanted(q, k, v, band(rows, 56, left, right))
    with stats.collect() as seen:
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **arguments)
    assert out.shape == q.shape and relative_l2(out.transpose(1, 2), want.out) < BOUND
    assert lse.shape == (2, 4, rows) and float((lse - want.lse).abs().max()) < 0.3
    assert torch.equal(flash_attn_func(q, k, v, **arguments), out)
    assert (seen.result().served.calls, seen.result().fallback.calls) == (1, 0)


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(
    ("arguments", "left", "right"),
    [
        ({}, -1, -1),
        ({"causal": True}, -1, 0),
        ({"causal": True, "learnable_sink": torch.tensor([1.0, 2.0, -1.0, 3.0])}, -1, 0),
        ({"window_size": (8, 4)}, 8, 4),
        ({"window_size": (8, 0)}, 8, 0),
    ],
)
@pytest.mark.parametrize("rows", [40, 60])
def test_slopes_count_from_a_rows_own_key(
    rows: int, arguments: dict[str, Any], left: int, right: int, batches: bool
) -> None:
    """Also in the LSE, also beside a sink, which no slope moves; with 60 rows the first four have no key of their own
    and see keys all the same where nothing hides them."""
    q, k, v = operands(rows)
    slopes = alibi_slopes(4) * torch.tensor([[1.0], [0.5]]) if batches else alibi_slopes(4)
    distance = torch.arange(rows)[:, None] + 56 - rows - torch.arange(56)
    bias = -slopes.reshape(-1, 4, 1, 1) * distance.abs()
    want = wanted(q, k, v, band(rows, 56, left, right), sinks=arguments.get("learnable_sink"), bias=bias)
    out, lse = flash_attn_func(q, k, v, alibi_slopes=slopes, return_softmax_lse=True, **arguments)
    assert relative_l2(out.transpose(1, 2), want.out) < BOUND
    finite = want.lse.isfinite()
    assert torch.equal(lse.isfinite(), finite) and float((lse - want.lse)[finite].abs().max()) < 0.3
    assert relative_l2(flash_attn_func(q, k, v, **arguments).transpose(1, 2), want.out) > 0.1
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=slopes, **arguments), out)


def test_the_scale_is_taken() -> None:
    q, k, v = operands()
    want = wanted(q, k, v, band(40, 56), 0.05)
    assert relative_l2(flash_attn_func(q, k, v, softmax_scale=0.05).transpose(1, 2), want.out) < BOUND


@pytest.mark.parametrize("of_query", ["kv_heads", "heads"])
@pytest.mark.parametrize("ragged", [False, True])
def test_descales_are_those_of_flash_attention_3(of_query: str, ragged: bool) -> None:
    """(B, Hkv) for all three; the heads of a group share q's."""
    q, k, v = operands(56)
    k, v = 3 * k, 5 * v
    q = q * torch.tensor([1.0, 1.0, 4.0, 4.0])[:, None].to(q)
    pairs = [quantize(x.transpose(1, 2), granularity="head") for x in (q, k, v)]
    groups = pairs[0][1].view(2, 2, 2)
    shared = groups.amax(2)  # one of each pair of heads
    q8 = (q.transpose(1, 2).float() / shared.repeat_interleave(2, 1)[:, :, None, None]).to(torch.float8_e4m3fn)
    q_descale = shared if of_query == "kv_heads" else shared.repeat_interleave(2, 1)
    descales = {"q_descale": q_descale, "k_descale": pairs[1][1], "v_descale": pairs[2][1]}
    fp8 = [x.transpose(1, 2) for x in (q8, pairs[1][0], pairs[2][0])]
    want = wanted(q, k, v, band(56, 56, right=0))
    if ragged:
        ends = torch.tensor([0, 56, 112], dtype=torch.int32)
        flat = [x.reshape(112, *x.shape[2:]) for x in fp8]
        out = flash_attn_varlen_func(*flat, ends, ends, 56, 56, causal=True, **descales).view(2, 56, 4, 64)
    else:
        out = flash_attn_func(*fp8, causal=True, **descales)
    assert out.dtype == torch.bfloat16 and relative_l2(out.transpose(1, 2), want.out) < 2 * BOUND
    wrong = {**descales, "k_descale": torch.ones_like(pairs[1][1])}
    if not ragged:
        assert relative_l2(flash_attn_func(*fp8, causal=True, **wrong).transpose(1, 2), want.out) > 4 * BOUND


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (6, 2)}])
def test_ragged_batches(arguments: dict[str, Any]) -> None:
    lengths = [(24, 24), (16, 40)]
    q, k, v = randn(40, 4, 64, seed=1), randn(64, 2, 64, seed=2), randn(64, 2, 64, seed=3)
    ends = [torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in zip(*lengths, strict=True)]
    with stats.collect() as seen:
        out, lse = flash_attn_varlen_func(q, k, v, *ends, 24, 40, return_softmax_lse=True, **arguments)
    assert lse.shape == (4, 40) and (seen.result().served.calls, seen.result().fallback.calls) == (1, 0)
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal") else right
    for rows, keys in (((0, 24), (0, 24)), ((24, 40), (24, 64))):
        part = [x[slice(*at)][None] for x, at in ((q, rows), (k, keys), (v, keys))]
        want = wanted(*part, band(rows[1] - rows[0], keys[1] - keys[0], left, right))
        assert relative_l2(out[None, slice(*rows)].transpose(1, 2), want.out) < BOUND


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("alibi_slopes", torch.zeros(5)),
        ("alibi_slopes", [0.5]),
        ("qv", torch.zeros(1)),
        ("attention_chunk", 128),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    """Slopes are served without lengths alone, and there one for each head."""
    q, k, v = operands()
    with pytest.raises(UnsupportedError, match=f"flash_attn_func: {name}"):
        flash_attn_func(q, k, v, **{name: value})
    ends = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = [x[:, :40].reshape(80, *x.shape[2:]) for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match=f"flash_attn_varlen_func: {name}"):
        flash_attn_varlen_func(*flat, ends, ends, 40, 40, **{name: value})


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("wrong", [None, [1.0], torch.zeros(3)])
def test_what_is_no_operand_is_refused_by_name(which: str, wrong: Any) -> None:
    given = dict(zip(("query", "key", "value"), operands(), strict=True)) | {which: wrong}
    with pytest.raises(UnsupportedError, match=f"{which} must"):
        flash_attn_func(*given.values(), alibi_slopes=torch.zeros(4), q_descale=torch.ones(1, 2))


def test_pages_are_refused_by_name() -> None:
    flat = [x.reshape(-1, *x.shape[2:]) for x in operands(40, 40)]
    ends = torch.tensor([0, 40, 80], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="block_table"):
        flash_attn_varlen_func(*flat, ends, ends, 40, 40, block_table=torch.zeros(2, 1, dtype=torch.int32))


def test_the_fourth_argument_means_dropout_or_the_scale_and_goes_by_name() -> None:
    with pytest.raises(TypeError):
        flash_attn_func(*operands(), 0.5)  # type: ignore[misc]
    with pytest.raises(TypeError, match="sinks"):
        flash_attn_func(*operands(), sinks=None)  # type: ignore[call-arg]


def caches(tokens: int = 64) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Keys and values (2, tokens, 2, 64), the same in e4m3, and descales (B, Hkv)."""
    plain = 3 * randn(2, tokens, 2, 64, seed=7), 5 * randn(2, tokens, 2, 64, seed=8)
    pairs = [quantize(x.transpose(1, 2), granularity="head") for x in plain]
    fp8 = tuple(x.transpose(1, 2).contiguous() for x, _ in pairs)
    return plain, fp8, {"k_descale": pairs[0][1], "v_descale": pairs[1][1]}


LENGTHS = (40, 21)


@pytest.mark.parametrize(
    ("arguments", "left", "right"), [({}, -1, -1), ({"causal": True}, -1, 0), ({"window_size": (8, 2)}, 8, 2)]
)
@pytest.mark.parametrize("pages", [None, "page_table", "block_table"])
@pytest.mark.parametrize("appended", [False, True])
def test_a_cache_of_fp8(arguments: dict[str, Any], left: int, right: int, pages: str | None, appended: bool) -> None:
    """Page 7 - i of 16 tokens stands for page i, so that an ignored table would show."""
    plain, fp8, descales = caches()
    q = randn(2, 4, 4, 64, seed=9)
    lengths, new = torch.tensor(LENGTHS, dtype=torch.int32), {}
    given: dict[str, Any] = {**arguments, **descales, "cache_seqlens": lengths}
    if appended:
        new = {"k": plain[0][:, :4], "v": plain[1][:, :4]}
        for x, tokens in zip(plain, new.values(), strict=True):
            for b, n in enumerate(LENGTHS):
                x[b, n : n + 4] = tokens[b].clone()
        new = {name: x.clone() for name, x in new.items()}
    if pages is not None:
        fp8 = tuple(x.reshape(8, 16, 2, 64).flip(0).contiguous() for x in fp8)
        given[pages] = 7 - torch.arange(8, dtype=torch.int32).view(2, 4)
    with stats.collect() as seen:
        out, lse = flash_attn_with_kvcache(q, *fp8, **new, **given, return_softmax_lse=True)
    assert (seen.result().served.calls, seen.result().fallback.calls) == (1, 0) and lse.shape == (2, 4, 4)
    for b, n in enumerate(LENGTHS):
        keys = n + 4 * appended
        part = [q[b : b + 1], *(x[b : b + 1, :keys] for x in plain)]
        want = wanted(*part, band(4, keys, left, right))
        assert relative_l2(out[b : b + 1].transpose(1, 2), want.out) < 2 * BOUND
        assert float((lse[b] - want.lse[0]).abs().max()) < 0.5


def test_without_lengths_the_whole_cache_counts() -> None:
    plain, fp8, descales = caches()
    q = randn(2, 1, 4, 64, seed=9)
    out = flash_attn_with_kvcache(q, *fp8, **descales)
    want = wanted(q, *plain, band(1, 64))
    assert relative_l2(out.transpose(1, 2), want.out) < 2 * BOUND
    wrong = flash_attn_with_kvcache(q, *fp8, k_descale=descales["k_descale"])
    assert relative_l2(wrong.transpose(1, 2), want.out) > 4 * BOUND


@pytest.mark.parametrize(
    "name", ["q_descale", "qv", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "alibi_slopes", "attention_chunk"]
)
def test_what_a_cache_does_not_serve_is_refused_by_name(name: str) -> None:
    _, fp8, descales = caches()
    value: Any = 128 if name == "attention_chunk" else torch.ones(2)
    with pytest.raises(UnsupportedError, match=f"flash_attn_with_kvcache: {name}"):
        flash_attn_with_kvcache(randn(2, 1, 4, 64, seed=9), *fp8, **descales, **{name: value})


def test_pages_need_lengths_and_one_table() -> None:
    _, fp8, descales = caches()
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="needs cache_seqlens"):
        flash_attn_with_kvcache(randn(2, 1, 4, 64, seed=9), *fp8, page_table=table, **descales)
    with pytest.raises(UnsupportedError, match="one argument"):
        flash_attn_with_kvcache(randn(2, 1, 4, 64, seed=9), *fp8, page_table=table, block_table=table, **descales)


@pytest.mark.parametrize("missing", ["q_descale", "k_descale", "v_descale"])
def test_fp8_needs_all_descales(missing: str) -> None:
    fp8 = [x.to(torch.float8_e4m3fn) for x in operands()]
    given = {name: torch.ones(2, 2) for name in ("q_descale", "k_descale", "v_descale") if name != missing}
    with pytest.raises(UnsupportedError, match=missing):
        flash_attn_func(*fp8, **given)
