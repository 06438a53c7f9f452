"""Nested tensors of layout torch.jagged: `attention` serves them as a ragged batch, as SDPA takes them.

Regressions these catch: a sequence that sees another one's keys; a result of another structure than query; a diagonal
aligned to the wrong end; tokens between sequences that count; an option that is ignored.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import randn, relative_l2

import fp8cutlass
from fp8cutlass import UnsupportedError, attention, explain, supports
from fp8cutlass.errors import NoKernelError

ROWS, KEYS = [5, 130, 1, 64], [40, 33, 7, 140]
LIMIT = 0.09


def nested(lengths: list[int], heads: int, seed: int, head_dim: int = 64) -> torch.Tensor:
    """(B, H, j, D)."""
    parts = [randn(n, heads, head_dim, seed=seed + i) for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def pair(lengths: list[int], heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of one structure, as projections of one tensor have."""
    both = nested(lengths, 2 * heads, seed).transpose(1, 2)
    halves = both.values().chunk(2, 1)
    k, v = (torch.nested.nested_tensor_from_jagged(x, both.offsets()).transpose(1, 2) for x in halves)
    return k, v


def each(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(x.unbind() for x in tensors), strict=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.05}, {"window_size": (20, 3)}], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_sequence_is_a_call_of_its_own(options: dict[str, Any], alignment: str, kv_heads: int) -> None:
    q, (k, v) = nested(ROWS, 4, 1), pair(KEYS, kv_heads, 20)
    options = options | {"enable_gqa": kv_heads != 4, "return_lse": True}
    if "is_causal" in options or "window_size" in options:
        options["causal_alignment"] = alignment
    elif alignment == "bottom_right":
        return
    got, lse = attention(q, k, v, **options)
    assert got.shape == q.shape and got.layout == torch.jagged and got.dtype == q.dtype
    assert (got + q).shape == q.shape  # of one structure
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    for one, one_lse, (a, b, c) in zip(got.unbind(), lse.unbind(), each(q, k, v), strict=True):
        want, want_lse = attention(a[None], b[None], c[None], **options)
        assert relative_l2(one, want[0]) < 1e-3 and torch.allclose(one_lse, want_lse[0], atol=1e-3)
    assert supports(q, k, v, **options) == (True, "the emulator, each sequence by the kernel for its sizes")
    assert explain(q, k, v, **options).startswith("kernel:    the emulator")


def test_the_longest_sequence_is_known_where_torch_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses the kernel, so that a bound of all tokens would cost speed."""
    from fp8cutlass.api import varlen

    seen: list[Any] = []
    kept = varlen.attention_varlen
    monkeypatch.setattr(varlen, "attention_varlen", lambda **given: seen.append(given["max_seqlen_k"]) or kept(**given))
    q = nested(ROWS, 4, 1)
    attention(q, q, q)
    attention(nested(KEYS, 4, 1), *pair(KEYS, 4, 20))
    assert seen == [max(ROWS), sum(KEYS)]


def test_it_is_as_sdpa() -> None:
    q = nested(ROWS, 4, 1)
    want = F.scaled_dot_product_attention(q, q, q)
    got = attention(q, q, q)
    assert got.shape == want.shape
    for one, other in each(got, want):
        assert relative_l2(one, other) < LIMIT


def test_layout_bshd() -> None:
    q, (k, v) = nested(ROWS, 4, 1), pair(KEYS, 4, 20)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    got, lse = attention(*swapped, layout="bshd", return_lse=True)
    want, want_lse = attention(q, k, v, return_lse=True)
    assert got.shape == swapped[0].shape and lse.shape == q.shape[:3]
    assert torch.equal(got.values(), want.transpose(1, 2).values()) and torch.equal(lse.values(), want_lse.values())


def test_tokens_between_sequences_do_not_count() -> None:
    values = randn(42, 4, 64, seed=1)
    offsets, lengths = torch.tensor([0, 10, 20, 42]), torch.tensor([3, 10, 5])
    q = torch.nested.nested_tensor_from_jagged(values, offsets, lengths).transpose(1, 2)
    got = attention(q, q, q)
    for i, one in enumerate(got.transpose(1, 2).unbind()):
        own = values[offsets[i] : offsets[i] + lengths[i]].transpose(0, 1)[None]
        assert relative_l2(one.transpose(0, 1)[None], attention(own, own, own)) < 1e-3


def test_fp8_operands_and_autocast() -> None:
    q, (k, v) = nested(ROWS, 4, 1), pair(KEYS, 4, 20)
    want = attention(q, k, v)
    with torch.autocast("cpu"):
        got = attention(q.float(), k, v)
    assert torch.equal(got.transpose(1, 2).values(), want.transpose(1, 2).values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(2, 2)}, "attn_mask is not served for nested tensors"),
        ({"dropout_p": 0.5}, "dropout_p is not supported"),
        ({"scaling": "token"}, "scaling='token' is not served for nested tensors, scaling='block' is"),
        ({"smooth_k": True}, "smooth_k=True is not served"),
        ({"hadamard": True}, "hadamard=True is not served"),
        ({"return_amax": True}, "return_amax=True is not served"),
        ({"backward": "flash"}, "backward='flash' is not served"),
        ({"out": torch.zeros(1)}, "out is not served"),
        ({"precision": "high"}, "precision='high' has no kernel for ragged batches"),
        ({"out_dtype": torch.float8_e4m3fn, "out_descale": 1.0}, "out_descale is not served"),
    ],
)
def test_what_ragged_batches_do_not_have_is_named(options: dict[str, Any], words: str) -> None:
    q = nested(ROWS, 4, 1)
    with pytest.raises(NoKernelError, match=words):
        attention(q, q, q, **options)
    assert not supports(q, q, q, **options)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": None}, "key must be a nested tensor of layout torch.jagged, as query is, got NoneType"),
        ({"value": nested(KEYS, 2, 5)}, "served where they have the same offsets"),
        ({"enable_gqa": False}, "query has 4 heads and key has 2: pass enable_gqa=True"),
        ({"query": nested(ROWS[:2], 4, 1)}, "batch size: 2 and 4"),
        ({"query": nested(ROWS, 3, 1)}, "heads of q must be a multiple of those of k, got 3 and 2"),
        ({"query": nested(ROWS, 4, 1, 32)}, "differ in head_dim: 32 and 64"),
        ({"layout": "bshd"}, "in layout bshd, with the tokens of each sequence in dimension 1"),
        ({"is_causal": 1}, "is_causal must be True or False, got 1"),
        ({"q_descale": torch.ones(1)}, "q_descale is for FP8 operands"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    k, v = pair(KEYS, 2, 20)
    call = {"query": nested(ROWS, 4, 1), "key": k, "value": v, "enable_gqa": True} | change
    with pytest.raises(UnsupportedError, match=words):
        attention(**call)
    assert not supports(**call)[0]


def test_the_fallback_serves_what_torch_does() -> None:
    parts = [randn(n, 4, 320, seed=n) for n in ROWS]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    half = nested(ROWS, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = attention(half.float(), half.float(), half.float(), fallback="sdpa")
        assert got.dtype == torch.float32
        want = F.scaled_dot_product_attention(half.float(), half.float(), half.float())
        for one, other in each(got, want):
            assert torch.equal(one, other)
        if not supports(q, q, q)[0]:
            assert attention(q, q, q, fallback="sdpa").shape == q.shape
    grad = nested(ROWS, 4, 1).detach().requires_grad_()
    with pytest.raises(NoKernelError, match="requires_grad=True and there is no backward"):
        attention(grad, grad, grad)


def test_of_no_strided_layout() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.zeros(3, 8, 64), torch.zeros(2, 8, 64)])
    for call in ((strided, strided, strided), (nested(ROWS, 4, 1), strided, strided)):
        with pytest.raises(UnsupportedError, match="nested"):
            fp8cutlass.attention(*call)
