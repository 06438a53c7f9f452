"""``softcap`` and ``sinks`` in ``attention`` and ``attention_varlen`` on the CPU, held to float64.

Regressions these catch: a cap that is left out or comes after the mask, the scale inside of it or twice, a sink that is
counted twice, once for each tile or not at all, an LSE without sinks, a row without keys that a sink gives a value, an
option that is lost on one of the ways (packed keys, FP8 operands, torch.compile, nested tensors, the fallback).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from reference import randn, relative_l2

from fp8cutlass import UnsupportedError, attention, attention_varlen, explain, pack_kv, quantize, supports
from fp8cutlass.call import fallback
from fp8cutlass.emulator import emulate, scores

HEADS, KV_HEADS, ROWS, KEYS = 4, 2, 150, 230
SINKS = torch.tensor([-2.0, 0.5, 4.0, 30.0])
CAPS = (0.0, 2.0, 10.0)
LIMIT = 0.09  # relative L2: e4m3 operands move logits of standard deviation 3 by 0.11; without a cap of 10 it is 0.8


def operands(rows: int = ROWS, keys: int = KEYS, head_dim: int = 64) -> list[torch.Tensor]:
    """Logits up to 15, so that a cap of 2 changes nearly all of them."""
    q = 3 * randn(2, HEADS, rows, head_dim, seed=1)
    return [q, *(randn(2, KV_HEADS, keys, head_dim, seed=s) for s in (2, 3))]


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: a sink is one more key, whose value is 0; a row without keys is 0 and -inf with one, too."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    x = q.double() @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    x = softcap * torch.tanh(x / softcap) if softcap else x
    x = x if seen is None else x.masked_fill(~seen, -torch.inf)
    dead = x.isneginf().all(-1)
    if sinks is not None:
        more = sinks.double()[None, :, None, None].expand(*x.shape[:3], 1)
        x, v = torch.cat((x, more), 3), torch.cat((v, torch.zeros_like(v[:, :, :1])), 2)
    out = (x.softmax(-1).nan_to_num() @ v).masked_fill(dead[..., None], 0.0)
    return out, x.logsumexp(-1).masked_fill(dead, -torch.inf)


def causal(rows: int, keys: int, shift: int) -> torch.Tensor:
    return torch.arange(keys)[None] <= torch.arange(rows)[:, None] + shift


def close(found: Any, want: tuple[torch.Tensor, torch.Tensor], limit: float = LIMIT) -> None:
    (out, lse), (wanted, log_sum) = found, want
    assert relative_l2(out, wanted) < limit
    assert torch.equal(lse.isneginf(), log_sum.isneginf())
    there = ~log_sum.isneginf()
    # Logits of rounded rows are off by 0.037 * 3 on average, sums of exponentials by 5 times as much at most.
    assert float((lse - log_sum)[there].abs().max()) < 0.6
    assert not out[~there].any()


@pytest.mark.parametrize("precision", ["fast", "accurate", "high"])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", CAPS)
def test_attention(softcap: float, sinks: bool, mask: str, precision: str) -> None:
    q, k, v = operands()
    seen = {"full": None, "causal": causal(ROWS, KEYS, 0), "window": causal(ROWS, KEYS, 5) & ~causal(ROWS, KEYS, -40)}
    how: dict[str, Any] = {"is_causal": True} if mask == "causal" else {}
    how |= {"window_size": (39, 5)} if mask == "window" else {}
    given = SINKS if sinks else None
    found = attention(
        q, k, v, enable_gqa=True, precision=precision, softcap=softcap, sinks=given, return_lse=True, **how
    )
    close(found, expected(q, k, v, seen[mask], softcap, given))


@pytest.mark.parametrize("softmax", ["fast", "accurate"])
def test_a_sink_takes_its_share_to_the_bias_of_p(softmax: str) -> None:
    """Of constant V a row is 1 less the sink's share. P of the linear code are 4% too large on average, which would
    show as 1% here."""
    q, k, v = operands()
    v = torch.ones_like(v)
    sinks = expected(q, k, v)[1].mean((0, 2)).float()  # half of the denominator
    out = attention(q, k, v, enable_gqa=True, sinks=sinks, precision=softmax).double()
    want = expected(q, k, v, sinks=sinks)[0]
    assert abs(float((out / want).mean()) - 1) < 0.003


def test_rows_without_keys_stay_empty() -> None:
    q, k, v = operands(40, 24)
    how: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right", "enable_gqa": True}
    for softcap in CAPS:
        found = attention(q, k, v, sinks=SINKS, softcap=softcap, return_lse=True, **how)
        close(found, expected(q, k, v, causal(40, 24, -16), softcap, SINKS))
        assert found[1][:, :, :16].isneginf().all()
    nothing = attention(q, k[:, :, :0], v[:, :, :0], sinks=SINKS, enable_gqa=True, return_lse=True)
    assert not nothing[0].any() and nothing[1].isneginf().all()


@pytest.mark.parametrize("sink", [-torch.inf, -300.0, 300.0])
def test_sinks_of_any_size(sink: float) -> None:
    """One that no logit comes near takes all, or nothing. The bits without one are those with one of -inf."""
    q, k, v = operands()
    sinks = torch.full((HEADS,), sink)
    found = attention(q, k, v, enable_gqa=True, sinks=sinks, return_lse=True)
    if sink < 0:
        plain = attention(q, k, v, enable_gqa=True, return_lse=True)
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    else:
        assert not found[0].any() and (found[1] == sink).all()


def test_negative_and_other_scales_lie_inside_the_cap() -> None:
    q, k, v = operands()
    for scale in (-0.2, 0.0, 0.3):
        found = attention(q, k, v, enable_gqa=True, scale=scale, softcap=3.0, return_lse=True)
        close(found, expected(q, k, v, None, 3.0, None, scale))


@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_fp8_operands(scaling: str) -> None:
    given = operands()
    shared = {"tensor": ["tensor"] * 3, "head": ["head"] * 3, "block": ["token", "block", "block"]}
    pairs = [
        quantize(x, granularity=g)
        for x, g in zip(given, shared.get(scaling, ["token", "token", "channel"]), strict=True)
    ]
    descales = {f"{n}_descale": d for n, (_, d) in zip("qkv", pairs, strict=True)}
    tensors = [x for x, _ in pairs]
    found = attention(*tensors, enable_gqa=True, scaling=scaling, softcap=2.0, sinks=SINKS, return_lse=True, **descales)
    close(found, expected(*given, None, 2.0, SINKS))


def test_packed_keys_layouts_and_dtypes_of_sinks() -> None:
    q, k, v = operands()
    how: dict[str, Any] = {"enable_gqa": True, "softcap": 2.0, "sinks": SINKS, "precision": "accurate"}
    want = attention(q, k, v, **how)
    assert torch.equal(attention(q, pack_kv(k, v, precision="accurate"), **how), want)
    turned = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", **how)
    assert torch.equal(turned.transpose(1, 2), want)
    for dtype in (torch.bfloat16, torch.float16):  # which hold these numbers
        assert torch.equal(attention(q, k, v, **how | {"sinks": SINKS.to(dtype)}), want)
    five = attention(q[None], k[None], v[None], **how)
    assert torch.equal(five[0], want)


RAGGED = [37, 0, 64, 1, 130], [50, 9, 64, 200, 130]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 3)])
@pytest.mark.parametrize("softcap", CAPS)
def test_ragged_batches(softcap: float, window: tuple[int, int]) -> None:
    """Each sequence is what the dense call gives, with and without nested tensors."""
    rows, keys = RAGGED
    q = 3 * randn(1, HEADS, sum(rows), 64, seed=1)[0].transpose(0, 1)
    k, v = (randn(1, KV_HEADS, sum(keys), 64, seed=s)[0].transpose(0, 1) for s in (2, 3))
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in RAGGED]
    out, lse = attention_varlen(
        q, k, v, *ends, 130, 200, window_size=window, softcap=softcap, sinks=SINKS, return_lse=True
    )
    for s, (a, b) in enumerate(zip(rows, keys, strict=True)):
        at, of = slice(*ends[0][s : s + 2].tolist()), slice(*ends[1][s : s + 2].tolist())
        if not a:
            continue
        one = [x.transpose(0, 1)[None] for x in (q[at], k[of], v[of])]
        found = out[at].transpose(0, 1)[None], lse[None, :, at]
        left, right = (10**6 if end < 0 else end for end in window)
        seen = causal(a, b, b - a + right) & ~causal(a, b, b - a - left - 1)
        close(found, expected(*one, seen, softcap, SINKS))


def test_nested_tensors_take_both() -> None:
    rows = [5, 17, 3]
    parts = [
        [randn(1, HEADS, n, 64, seed=10 * i + s)[0].transpose(0, 1) for n in rows] for i, s in enumerate((1, 2, 3))
    ]
    offsets = torch.nested.nested_tensor(parts[0], layout=torch.jagged).offsets()
    q, k, v = (torch.nested.nested_tensor_from_jagged(torch.cat(p), offsets).transpose(1, 2) for p in parts)
    got = attention(q, k, v, softcap=2.0, sinks=SINKS)
    for one, at in zip(got.transpose(1, 2).unbind(), range(3), strict=True):
        qkv = [p[at].transpose(0, 1)[None] for p in parts]
        want = attention(*qkv, softcap=2.0, sinks=SINKS, precision="accurate")
        assert relative_l2(one.transpose(0, 1)[None], want) < 0.02


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool) -> None:
    """One graph, the bits of the eager call; sinks are an input, not a constant."""
    q, k, v = operands()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, softcap: float) -> torch.Tensor:
        return attention(q, k, v, enable_gqa=True, sinks=sinks, softcap=softcap)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)
    for sinks, softcap in ((SINKS, 0.0), (SINKS, 2.0), (-SINKS, 2.0), (SINKS, 3.0)):
        assert torch.equal(compiled(q, k, v, sinks, softcap), call(q, k, v, sinks, softcap))


def test_ragged_under_torch_compile() -> None:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in operands(60, 60))
    ends = torch.tensor([0, 20, 60], dtype=torch.int32)

    def call(q: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return attention_varlen(q, k, v, ends, ends, 40, 40, causal=True, softcap=2.0, sinks=sinks)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, SINKS), call(q, SINKS))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"softcap": -1.0}, "softcap must be 0 or a positive number up to 2^64, got -1.0"),
    ({"softcap": float("nan")}, "softcap must be 0 or a positive number up to 2^64, got nan"),
    ({"softcap": True}, "softcap must be 0 or a positive number up to 2^64, got True"),
    ({"softcap": 1e-30}, "softcap must be 0 or at least 2^-63, got 1e-30"),
    ({"sinks": SINKS[:3]}, "sinks must be (4,) on cpu, bfloat16, float16 or float32"),
    ({"sinks": SINKS.double()}, "sinks must be (4,) on cpu"),
    ({"sinks": 1.0}, "sinks must be (4,) on cpu"),
    ({"sinks": SINKS.to("meta")}, "sinks must be (4,) on cpu"),
    ({"sinks": SINKS.clone().requires_grad_()}, "sinks has requires_grad=True"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[m[:24] + str(i) for i, (_, m) in enumerate(WRONG)])
def test_refusals_by_name(arguments: dict[str, Any], message: str) -> None:
    q, k, v = operands()
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        attention(q, k, v, enable_gqa=True, **arguments)
    assert not supports(q, k, v, enable_gqa=True, **arguments)[0]
    flat = [x[0].transpose(0, 1) for x in (q[:, :, :KEYS], k[:, :, :ROWS], v[:, :, :ROWS])]
    ends = torch.tensor([0, ROWS], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        attention_varlen(*flat, ends, ends, ROWS, ROWS, **arguments)


@pytest.mark.parametrize("arguments", [{"softcap": 2.0}, {"sinks": SINKS}], ids=["softcap", "sinks"])
def test_neither_goes_with_smooth_k(arguments: dict[str, Any]) -> None:
    """A mean that is subtracted from keys moves logits: a cap would bend others, a sink stand beside others."""
    q, k, v = operands()
    with pytest.raises(UnsupportedError, match="smooth_k moves"):
        attention(q, k, v, enable_gqa=True, smooth_k=True, **arguments)
    with pytest.raises(UnsupportedError, match="smooth_k moves"):
        attention(q, pack_kv(k, v, smooth_k=True), enable_gqa=True, **arguments)


@pytest.mark.parametrize("arguments", [{"softcap": 2.0}, {"sinks": SINKS}], ids=["softcap", "sinks"])
def test_what_is_not_served_is_not_dropped(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention has neither, nor has its backward pass."""
    q, k, v = operands()
    monkeypatch.setattr(fallback, "_sdpa", lambda *_, **__: pytest.fail("torch's attention ran"))
    with pytest.raises(UnsupportedError, match="fallback='sdpa' cannot serve"):
        attention(q, k, v, dropout_p=0.5, fallback="sdpa", enable_gqa=True, **arguments)
    with pytest.raises(UnsupportedError, match="backward='flash' cannot serve"):
        attention(q.requires_grad_(), k, v, enable_gqa=True, backward="flash", **arguments)


def test_explain_says_both() -> None:
    text = explain(*operands(), enable_gqa=True, softcap=2.0, sinks=SINKS)
    assert "softcap:   2\n" in text and "sinks:     one a head" in text and "softmax exp2," in text


def doubled(row_sum: torch.Tensor, *given: Any) -> torch.Tensor:
    return scores.add_sinks(scores.add_sinks(row_sum, *given), *given)


def too_late(s: torch.Tensor, slope: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The cap without the scale inside."""
    return scores.capped(s, torch.ones_like(slope), softcap)


MUTANTS: dict[str, tuple[str, Any]] = {
    "a sink is counted twice": ("add_sinks", doubled),
    "a sink is not counted": ("add_sinks", lambda row_sum, *_: row_sum),
    "a cap is left out": ("capped", lambda s, slope, cap: (s, slope * cap)),
    "a cap of raw scores": ("capped", too_late),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit that the tests above hold results to; sinks are as large as the row sums."""
    q, k, v = operands()
    softcap = 10.0 if "cap" in mutant else 0.0
    sinks = expected(q, k, v, None, softcap)[1].mean((0, 2)).float()
    want = expected(q, k, v, None, softcap, sinks)[0]
    how: dict[str, Any] = {"enable_gqa": True, "softcap": softcap, "sinks": sinks}
    assert relative_l2(attention(q, k, v, **how), want) < LIMIT
    name, function = MUTANTS[mutant]
    monkeypatch.setattr(emulate, name, function)
    assert relative_l2(attention(q, k, v, **how), want) > 2 * LIMIT
