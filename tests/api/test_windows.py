"""``attention(window_size=...)`` on the CPU: what a row sees, in both alignments, and what is refused.

Regressions these catch: an end that is off by one, a window that slides with the wrong alignment, a window that is
forgotten on one of the ways (packed keys, FP8 operands, torch.compile, the fallback), rows without a key.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import needs
from reference import randn, relative_l2

from fp8cutlass import UnsupportedError, attention, attention_varlen, explain, pack_kv, quantize, supports
from fp8cutlass.call.call import FAR, Call
from fp8cutlass.call.request import request_of
from fp8cutlass.call.settle import settle

ROWS, KEYS = 150, 230
WINDOWS = [(0, 0), (5, 0), (0, 7), (40, 20), (-1, 3), (6, -1), (1000, 0), (0, 1000), (-1, 0), (129, 129)]
Alignments = pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])


def operands(rows: int = ROWS, keys: int = KEYS, head_dim: int = 64) -> list[torch.Tensor]:
    return [randn(1, 4, rows, head_dim, seed=1), *(randn(1, 2, keys, head_dim, seed=s) for s in (2, 3))]


def seen(window: tuple[int, int], alignment: str, rows: int = ROWS, keys: int = KEYS) -> torch.Tensor:
    """(rows, keys): which keys a row sees, from the definition."""
    own = torch.arange(rows)[:, None] + (keys - rows if alignment == "bottom_right" else 0)
    key = torch.arange(keys)[None]
    left, right = (10**9 if end < 0 else end for end in window)
    return (key >= own - left) & (key <= own + right)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """In float64; rows without a key are 0, their LSE -inf."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


@Alignments
@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_row_sees_its_window(window: tuple[int, int], precision: str, alignment: str) -> None:
    q, k, v = operands()
    want, log_sum = expected(q, k, v, seen(window, alignment))
    options: dict[str, Any] = {"window_size": window, "causal_alignment": alignment, "precision": precision}
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    assert relative_l2(out, want) < 0.06
    assert torch.equal(lse.isneginf(), log_sum.isneginf())
    there = ~log_sum.isneginf()
    # A logit of two rounded rows of 64 is off by 0.037 on average; 600 of them by 5.5 times as much at most.
    assert float((lse - log_sum)[there].abs().max()) < 0.2
    assert not out[~there].any()


def test_one_key_too_many_or_too_few_is_seen() -> None:
    """A key at either end of the window that outweighs all others: with it and without it are far apart."""
    q, k, v = operands(64, 64)
    q[:], k[:], v[:] = 1.0, 0.0, 0.0
    k[:, :, 20], v[:, :, 20] = 4.0, 1.0
    out = attention(q, k, v, enable_gqa=True, window_size=(7, 3), precision="accurate")
    rows = out[0, 0, :, 0].float()
    inside = torch.arange(64).sub(20)
    assert torch.equal(rows > 0.9, (inside <= 7) & (inside >= -3))


@Alignments
def test_causal_ends_a_window_at_the_rows_own_key(alignment: str) -> None:
    q, k, v = operands()
    common: dict[str, Any] = {"enable_gqa": True, "causal_alignment": alignment}
    want = attention(q, k, v, window_size=(30, 0), **common)
    assert torch.equal(attention(q, k, v, is_causal=True, window_size=(30, 9), **common), want)
    assert torch.equal(attention(q, k, v, is_causal=True, **common), attention(q, k, v, window_size=(-1, 0), **common))


@pytest.mark.parametrize("window", [(40, 20), (40, 0)], ids=str)
def test_every_way_has_the_window(window: tuple[int, int]) -> None:
    """Packed keys, FP8 operands, the other layout, torch.compile, and a ragged batch of one sequence."""
    torch._dynamo.reset()
    q, k, v = operands()
    common: dict[str, Any] = {"enable_gqa": True, "window_size": window, "causal_alignment": "bottom_right"}
    want = attention(q, k, v, **common)
    assert torch.equal(attention(q, pack_kv(k, v), **common), want)
    other = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", **common)
    assert torch.equal(other.transpose(1, 2), want)
    compiled = torch.compile(lambda *x: attention(*x, **common), fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(q, k, v), want)
    fp8, descales = zip(*(quantize(x, granularity="head") for x in (q, k, v)), strict=True)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    exact, _ = expected(q, k, v, seen(window, "bottom_right"))
    assert relative_l2(attention(*fp8, scaling="head", **named, **common), exact) < 0.075
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (ROWS, KEYS)]
    ragged = attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), *ends, ROWS, KEYS, window_size=window)
    assert torch.equal(ragged.transpose(0, 1)[None], want)


@Alignments
@pytest.mark.parametrize("window", [(40, 20), (-1, 5), (3, -1)], ids=str)
def test_the_fallback_has_the_window(window: tuple[int, int], alignment: str) -> None:
    """A head_dim beyond all kernels: torch's attention with the same mask, where each row sees a key."""
    q, k, v = operands(200, 200, 320)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    with pytest.warns(UserWarning, match="falls back"):
        out = attention(q, k, v, window_size=window, causal_alignment=alignment, fallback="sdpa")
    assert relative_l2(out, expected(q, k, v, seen(window, alignment, 200, 200))[0]) < 0.01


@pytest.mark.parametrize("window", [(-2, 0), (0, -3), (1.0, 0), (True, 0), (1,), (1, 2, 3), None, "1,2", 5])
def test_what_is_no_window_is_refused_by_name(window: Any) -> None:
    q, k, v = operands()
    with pytest.raises(UnsupportedError, match=r"window_size must be \(left, right\), two integers from -1 up"):
        attention(q, k, v, enable_gqa=True, window_size=window)
    assert not supports(q, k, v, enable_gqa=True, window_size=window)[0]


def test_explain_names_the_window() -> None:
    q, k, v = operands()
    assert "window:    40 keys before and all after a row's own" in explain(
        q, k, v, enable_gqa=True, window_size=(40, -1)
    )
    assert "window:" not in explain(q, k, v, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize(
    ("left", "right", "bottom_right", "offsets"),
    [
        (None, None, True, (0, 0)),
        (None, 0, False, (0, 0)),
        (None, 3, True, (13, 0)),
        (4, 0, False, (0, -4)),
        (4, 0, True, (10, 6)),
        (4, None, True, (FAR + 10, 6)),
    ],
)
def test_offsets(left: Any, right: Any, bottom_right: bool, offsets: tuple[int, int]) -> None:
    """What kernels are told of 20 rows and 30 keys."""
    call = Call("half", torch.bfloat16, 1.0, left=left, right=right, bottom_right=bottom_right)
    assert call.offsets(20, 30) == offsets


def test_the_mask_of_a_call_is_the_kernels_word() -> None:
    def mask(**options: Any) -> str:
        return settle(request_of(*operands(), enable_gqa=True, **options))[0].mask

    assert [mask(), mask(is_causal=True), mask(window_size=(-1, 4))] == ["full", "causal", "causal"]
    assert mask(window_size=(4, -1)) == mask(is_causal=True, window_size=(4, 4)) == "window"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@Alignments
@pytest.mark.parametrize("window", [(40, 20), (200, 0), (0, 0), (-1, 5), (300, -1)], ids=str)
def test_windows_on_a_card(window: tuple[int, int], alignment: str, head_dim: int) -> None:
    """Each way twice, as the second call is a remembered one: from bf16, packed keys, FP8 operands."""
    rows, keys = 700, 900
    q, k, v = operands(rows, keys, head_dim)
    want, log_sum = expected(q, k, v, seen(window, alignment, rows, keys))
    on_card = [x.cuda() for x in (q, k, v)]
    common: dict[str, Any] = {"enable_gqa": True, "window_size": window, "causal_alignment": alignment}
    needs(*on_card, **common)
    needs(*on_card, enable_gqa=True)  # what keys are packed for
    packed = pack_kv(*on_card[1:], query_shape=q.shape)
    fp8, descales = zip(*(quantize(x, granularity="head") for x in on_card), strict=True)
    named: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    needs(*fp8, **named, scaling="head", **common)
    ways: list[tuple[Any, dict[str, Any], float]] = [(on_card, {}, 0.06), (fp8, named | {"scaling": "head"}, 0.075)]
    if supports(on_card[0], packed, **common)[0]:
        ways.append(((on_card[0], packed), {}, 0.06))
    for tensors, options, limit in ways:
        first, second = (attention(*tensors, return_lse=True, **common, **options) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        out, lse = (x.cpu() for x in first)
        assert relative_l2(out, want) < limit
        assert torch.equal(lse.isneginf(), log_sum.isneginf()) and not out[log_sum.isneginf()].any()
