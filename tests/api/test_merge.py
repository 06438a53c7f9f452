"""A shard of rows, an LSE for merging, and two partial results as one.

Regressions these catch: an offset that is off by one or that the cache of calls does not see, weights of two kinds of
LSE, NaN where neither part has a key.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import randn, relative_l2

from fp8cutlass import UnsupportedError, attention, merge_attention, pack_kv, supports

SEQ = 300


def operands(dtype: Any = torch.bfloat16, head_dim: int = 64) -> Any:
    q, k, v = (randn(2, h, SEQ, head_dim, seed=seed).to(dtype) for seed, h in ((1, 4), (2, 2), (3, 2)))
    return q, k, v


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", [{"is_causal": True}, {"window_size": (40, 9)}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_of_rows_has_the_bits_of_the_whole(layout: str, mask: dict[str, Any], packed: bool) -> None:
    q, k, v = operands()
    whole, lse = attention(q, k, v, enable_gqa=True, return_lse=True, **mask)
    key: Any = (pack_kv(k, v),) if packed else (k, v) if layout == "bhsd" else (k.transpose(1, 2), v.transpose(1, 2))
    for start, stop in ((0, 64), (64, 300), (129, 130), (200, 300)):
        rows = q[:, :, start:stop] if layout == "bhsd" else q[:, :, start:stop].transpose(1, 2)
        made: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "layout": layout, **mask}
        out, some = attention(rows, *key, causal_offset=start, **made)
        out = out if layout == "bhsd" else out.transpose(1, 2)
        if "window_size" in mask:  # whose rows begin with another tile than the first rows of the whole
            assert relative_l2(out, whole[:, :, start:stop].double()) < 0.005
            assert float((some - lse[:, :, start:stop]).abs().max()) < 1e-5
        else:
            assert torch.equal(out, whole[:, :, start:stop]) and torch.equal(some, lse[:, :, start:stop])


def test_rows_before_the_first_key() -> None:
    q, k, v = operands()
    out, lse = attention(q, k, v, enable_gqa=True, is_causal=True, causal_offset=-20, return_lse=True)
    assert (
        not out[:, :, :20].any()
        and bool((lse[:, :, :20] == -torch.inf).all())
        and bool(lse[:, :, 20:].isfinite().all())
    )
    none = attention(q, k, v, enable_gqa=True, is_causal=True, causal_offset=-(1 << 30) + 1)
    every = attention(q, k, v, enable_gqa=True, is_causal=True, causal_offset=(1 << 30) - 1)
    assert not none.any()
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), enable_gqa=True)
    assert relative_l2(every, exact) < 0.07


def test_an_offset_goes_to_torch_and_is_compiled() -> None:
    q, k, v = operands()
    rows = q[:, :, 100:200]
    want = attention(rows, k, v, enable_gqa=True, is_causal=True, causal_offset=100)
    compiled = torch.compile(
        lambda x, n: attention(x, k, v, enable_gqa=True, is_causal=True, causal_offset=n),
        fullgraph=True,
        backend="eager",
    )
    assert torch.equal(compiled(rows, 100), want)
    wide = [x.float() for x in (rows, k, v)]
    with pytest.warns(UserWarning, match="falls back"):
        out = attention(*wide, enable_gqa=True, is_causal=True, causal_offset=100, fallback="sdpa")
    assert relative_l2(want, out.double()) < 0.07


@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate", "high"])
def test_an_lse_for_merging(precision: str) -> None:
    """The result is the same; the LSE is that of the quantised P, so 0.05 from the other at most, alike in all rows."""
    q, k, v = operands()
    made: dict[str, Any] = {"enable_gqa": True, "precision": precision}
    if not supports(q, k, v, **made)[0]:
        pytest.skip("the emulated card has no such kernel")
    out, lse = attention(q, k, v, return_lse=True, **made)
    same, other = attention(q, k, v, return_lse="merge", **made)
    assert torch.equal(out, same)
    far = other - lse
    assert float(far.abs().max()) < (0.06 if precision == "fast" else 0.01) and float(far.std()) < 0.005


@pytest.mark.parametrize("kind", [True, "merge"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("inplace", [False, True])
def test_two_parts_are_one_call(kind: Any, layout: str, inplace: bool) -> None:
    """Within 0.5% of one call over all keys: what P and the partial results are rounded to."""
    q, k, v = operands()
    packed = pack_kv(k, v)
    want, want_lse = attention(q, packed, enable_gqa=True, return_lse=True)
    halves = [attention(q, packed.narrow(a, n), enable_gqa=True, return_lse=kind) for a, n in ((0, 128), (128, 172))]
    (a, lse_a), (b, lse_b) = [(out if layout == "bhsd" else out.transpose(1, 2), lse) for out, lse in halves]
    if inplace:
        a = a.float()
    out, lse = merge_attention(a, lse_a, b, lse_b, layout=layout, inplace=inplace)
    assert out.dtype == torch.float32 and (out is a and lse is lse_a) == inplace
    out = out if layout == "bhsd" else out.transpose(1, 2)
    assert relative_l2(out, want.double()) < 0.005
    assert float((lse - want_lse).abs().max()) < (1e-5 if kind is True else 0.06)


def test_rows_without_keys_are_merged() -> None:
    q, k, v = operands()
    some = attention(q, k, v, enable_gqa=True, return_lse=True)
    none = torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf)
    for a, b in ((some, none), (none, some)):
        out, lse = merge_attention(*a, *b)
        assert torch.equal(out, some[0].float()) and torch.equal(lse, some[1])
    out, lse = merge_attention(*none, *none)
    assert not out.any() and bool((lse == -torch.inf).all())
    broken = none[0].clone().fill_(torch.nan), some[1]
    assert bool(merge_attention(*broken, *some)[0].isnan().all())


def test_what_is_refused() -> None:
    q, k, v = operands()
    made: dict[str, Any] = {"enable_gqa": True}
    for options, text in (
        ({"causal_offset": 3}, "causal_offset=3 goes with is_causal=True or a window_size"),
        ({"causal_offset": True, "is_causal": True}, "causal_offset must be an integer"),
        ({"causal_offset": 1 << 30, "is_causal": True}, "causal_offset must be an integer between"),
        ({"causal_offset": 0, "is_causal": True, "causal_alignment": "bottom_right"}, "excludes causal_alignment"),
        ({"return_lse": "exact"}, "return_lse must be True, False or 'merge', got 'exact'"),
        ({"return_lse": 1}, "return_lse must be"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            attention(q, k, v, **made, **options)
    with pytest.raises(UnsupportedError, match="causal_offset=4"):
        attention(q.requires_grad_(), k, v, **made, is_causal=True, causal_offset=4, backward="flash")
    out, lse = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5)
    for args, text in (
        ((out, lse, out, lse[..., :4]), r"lse_b must have shape \(1, 2, 5\), got \(1, 2, 4\)"),
        ((out, lse, out.double(), lse), "out_b must be"),
        ((out, lse, out, None), "lse_b must be a torch.Tensor"),
        ((out[0], lse, out, lse), "out_a must have 4 dimensions"),
        ((out.half(), lse, out, lse), "out_a must be torch.float32 with inplace=True"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            merge_attention(*args, inplace=True)
    with pytest.raises(UnsupportedError, match="layout must be one of"):
        merge_attention(out, lse, out, lse, layout="sbhd")
