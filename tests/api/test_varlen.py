"""Attention over ragged batches on the CPU, against float64, and what is refused.

Regressions these catch: a sequence that sees another one's keys; a window or a diagonal aligned to the wrong end; rows
without keys that are not 0; tokens past ``seqused`` that count; K and V copied to a block of another sequence; a wrong
argument that is not refused by name.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

import fp8cutlass
from fp8cutlass import attention, attention_varlen, quantize
from fp8cutlass.call.ragged import RaggedCall, blocks_of, by_torch, places, to_blocks
from fp8cutlass.errors import NoKernelError, UnsupportedError
from fp8cutlass.manifest import generated_dir, load_manifest
from fp8cutlass.quant.quantize import V_AMAX
from fp8cutlass.quant.v_layout import pack_v

ROWS, KEYS = [5, 0, 130, 1, 200, 64], [40, 33, 130, 0, 260, 7]
LIMIT = 0.09  # relative L2 error of FP8 operands against the given ones


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def batch(rows: list[int], keys: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(len(rows) + sum(rows))

    def draw(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, head_dim, generator=generator).bfloat16()

    return draw(sum(rows), heads), draw(sum(keys), kv_heads), draw(sum(keys), kv_heads), ends(rows), ends(keys)


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[int],
    keys: list[int],
    left: int = -1,
    right: int = -1,
    bottom_right: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE in float64, sequence by sequence, key by key."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[1::-1], -math.inf, dtype=torch.float64)
    group, q0, k0 = q.shape[1] // k.shape[1], 0, 0
    for r, n in zip(rows, keys, strict=True):
        if r and n:
            qs = q[q0 : q0 + r].double().transpose(0, 1)
            ks, vs = (x[k0 : k0 + n].double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
            scores = qs @ ks.transpose(1, 2) / math.sqrt(q.shape[2])
            own = torch.arange(r)[:, None] + (n - r if bottom_right else 0)
            key = torch.arange(n)
            hidden = torch.zeros(r, n, dtype=torch.bool)
            if right >= 0:
                hidden |= key > own + right
            if left >= 0:
                hidden |= key < own - left
            scores = scores.masked_fill(hidden, -math.inf)
            lse[:, q0 : q0 + r] = scores.logsumexp(-1)
            p = torch.where(hidden.all(-1)[:, None], 0.0, scores.softmax(-1).nan_to_num(0.0))
            out[q0 : q0 + r] = (p @ vs).transpose(0, 1)
        q0, k0 = q0 + r, k0 + n
    return out, lse


def close(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (right, log_sum) = got, wanted
    assert not out.isnan().any()
    assert (out.double() - right).norm() <= LIMIT * right.norm()
    assert (lse.isneginf() == log_sum.isneginf()).all()
    seen = ~log_sum.isneginf()
    assert ((lse.double() - log_sum)[seen].abs() < 0.25).all()
    assert (out[log_sum.transpose(0, 1).isneginf()] == 0).all()


@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 0), (0, 0), (40, 25), (-1, 9), (9, -1), (1000, 1000)])
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_against_float64(window: tuple[int, int], bottom_right: bool, precision: str) -> None:
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    alignment = "bottom_right" if bottom_right else "top_left"
    options = {"window_size": window, "causal_alignment": alignment, "precision": precision, "return_lse": True}
    got = attention_varlen(q, k, v, cu_q, cu_k, 200, 260, **options)
    close(got, expected(q, k, v, ROWS, KEYS, *window, bottom_right))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 0), (130, 25)])
def test_every_key_counts_alike(window: tuple[int, int]) -> None:
    """Equal logits, and a one in another column for each key: each column is the share of its keys."""
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    key = torch.cat([torch.arange(n) for n in KEYS])
    q, v = torch.zeros_like(q), torch.eye(64)[key % 64][:, None].expand(v.shape).bfloat16()
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, 200, 260, window_size=window, return_lse=True)
    wanted, log_sum = expected(q, k, v, ROWS, KEYS, *window)
    assert torch.allclose(out.double(), wanted, rtol=0.01, atol=1e-4)
    assert torch.allclose(lse.double(), log_sum, atol=1e-3)


def test_causal_is_a_window_without_keys_after() -> None:
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    causal = attention_varlen(q, k, v, cu_q, cu_k, 200, 260, causal=True)
    assert torch.equal(causal, attention_varlen(q, k, v, cu_q, cu_k, 200, 260, window_size=(-1, 0)))
    near = attention_varlen(q, k, v, cu_q, cu_k, 200, 260, causal=True, window_size=(8, 5))
    assert torch.equal(near, attention_varlen(q, k, v, cu_q, cu_k, 200, 260, window_size=(8, 0)))
    assert not torch.equal(causal, near)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_are_a_dense_batch(causal: bool) -> None:
    q, k, v, cu_q, cu_k = batch([96] * 3, [96] * 3)
    dense = attention(*(x.view(3, 96, -1, 64).transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
    ragged = attention_varlen(q, k, v, cu_q, cu_k, 96, 96, causal=causal)
    assert torch.equal(ragged.view(3, 96, -1, 64).transpose(1, 2), dense)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_batches(device: str, data: st.DataObject) -> None:
    """Lengths, heads, masks and what is used, at random; what is not used is 0 and its LSE -inf."""
    draw = data.draw
    lengths = st.lists(st.integers(0, 300), min_size=4, max_size=4)
    count = draw(st.integers(1, 4))
    rows, keys = draw(lengths)[:count], draw(lengths)[:count]
    kv_heads, group, head_dim = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([40, 64, 96, 128, 256])),
    )
    assume(sum(rows) * kv_heads * group * head_dim >= 4096)  # enough numbers for a relative error
    left, right, causal = draw(st.integers(-1, 200)), draw(st.integers(-1, 200)), draw(st.booleans())
    bottom_right, precision = draw(st.booleans()), draw(st.sampled_from(["fast", "accurate"]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    used = [[draw(st.integers(0, n)) for n in part] if draw(st.booleans()) else None for part in (rows, keys)]
    q, k, v, cu_q, cu_k = batch(rows, keys, kv_heads * group, kv_heads, head_dim)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    given_used = [None if part is None else torch.tensor(part, dtype=torch.int32, device=device) for part in used]
    try:
        got = attention_varlen(
            *(x.to(device) for x in (q, k, v, cu_q, cu_k)), max(rows), max(keys), *given_used, causal=causal,
            window_size=(left, right), causal_alignment="bottom_right" if bottom_right else "top_left",
            precision=precision, return_lse=True,
        )  # fmt: skip
    except NoKernelError as error:
        assert device == "cuda" and "profile 'release'" not in str(error)
        reject()
    counted = [part or whole for part, whole in zip(used, (rows, keys), strict=True)]
    taken = [
        torch.cat([torch.arange(b, b + n) for b, n in zip(cu[:-1].tolist(), part, strict=True)])
        for cu, part in zip((cu_q, cu_k), counted, strict=True)
    ]
    inside = expected(q[taken[0]], k[taken[1]], v[taken[1]], *counted, left, 0 if causal else right, bottom_right)
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[1::-1], -math.inf, dtype=torch.float64)
    out[taken[0]], lse[:, taken[0]] = inside
    close((got[0].cpu(), got[1].cpu()), (out, lse))


def test_only_what_is_used_counts() -> None:
    q, k, v, cu_q, cu_k = batch([20, 30], [50, 60])
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([7, 30], [50, 11]))
    k[50 + 11 :], v[50 + 11 :] = torch.nan, torch.nan
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, 30, 60, used_q, used_k, causal=True, return_lse=True)
    parts = (torch.cat((q[:7], q[20:])), k[: 50 + 11], v[: 50 + 11])
    wanted = expected(*parts, [7, 30], [50, 11], -1, 0)
    close((torch.cat((out[:7], out[20:])), torch.cat((lse[:, :7], lse[:, 20:]), 1)), wanted)
    assert (out[7:20] == 0).all() and lse[:, 7:20].isneginf().all()


@pytest.mark.parametrize("shared", ["tensor", "head", "kv_head"])
def test_fp8_operands(shared: str) -> None:
    """Descales that differ from sequence to sequence, and from head to head."""
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    generator = torch.Generator().manual_seed(1)
    fp8, descales, real = [], [], []
    for name, x in zip("qkv", (q, k, v), strict=True):
        x8, d = quantize(x.transpose(0, 1)[None], granularity="tensor")
        fp8.append(x8[0].transpose(0, 1))
        if shared != "tensor":
            heads = k.shape[1] if shared == "kv_head" else x.shape[1]
            d = d * 2.0 ** (2 * torch.rand(len(ROWS), heads, generator=generator) - 1)
        descales.append(d)
        each = (
            d.expand(len(ROWS), x.shape[1]) if shared == "tensor" else d.repeat_interleave(x.shape[1] // d.shape[1], 1)
        )
        lengths = torch.tensor(ROWS if name == "q" else KEYS)
        real.append(fp8[-1].float() * each.repeat_interleave(lengths, 0)[..., None])
    names = ("q_descale", "k_descale", "v_descale")
    given = dict(zip(names, descales, strict=True))
    got = attention_varlen(*fp8, cu_q, cu_k, 200, 260, causal=True, return_lse=True, **given)
    close(got, expected(*real, ROWS, KEYS, -1, 0))


def test_what_lies_in_a_batch_does_not_matter() -> None:
    """Each sequence alone gives the bits that it has among others: none is left out, none reads another."""
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    for options in ({}, {"causal": True}, {"window_size": (30, 4)}):
        out, lse = attention_varlen(q, k, v, cu_q, cu_k, 200, 260, return_lse=True, **options)
        for s, (rows, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
            of, keys_of = slice(*cu_q[s : s + 2].tolist()), slice(*cu_k[s : s + 2].tolist())
            parts = (q[of], k[keys_of], v[keys_of], ends([rows]), ends([keys]))
            alone, log_sum = attention_varlen(*parts, rows, keys, return_lse=True, **options)
            assert torch.equal(alone, out[of]) and torch.equal(log_sum, lse[:, of])


def test_a_key_of_the_neighbour_is_not_seen() -> None:
    """NaN in the keys and values of every other sequence, which begin in the tile where those of the first end."""
    rows = keys = [70, 20, 64, 33]
    q, k, v, cu_q, cu_k = batch(rows, keys)
    clean = attention_varlen(q, k, v, cu_q, cu_k, 70, 70)
    for s in (1, 3):
        k[cu_k[s] : cu_k[s + 1]], v[cu_k[s] : cu_k[s + 1]] = torch.nan, torch.nan
    got = attention_varlen(q, k, v, cu_q, cu_k, 70, 70)
    for s in (0, 2):
        assert torch.equal(got[cu_q[s] : cu_q[s + 1]], clean[cu_q[s] : cu_q[s + 1]])


def test_an_empty_batch_of_tokens() -> None:
    q, k, v, cu_q, cu_k = batch([0, 0], [3, 4])
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, 0, 4, return_lse=True)
    assert out.shape == q.shape and lse.shape == (4, 0)


@pytest.mark.parametrize("key_block", [128, 192, 256])
def test_each_sequence_has_blocks_of_its_own(key_block: int) -> None:
    keys = [300, 0, 1, 128, 129, 500]
    cu, tokens = ends(keys), sum(keys)
    place, blocks = places(cu, None, tokens, key_block), blocks_of(tokens, len(keys), key_block)
    x = torch.arange(1, tokens + 1).view(-1, 1, 1).float()
    spread = to_blocks(x, place, blocks, key_block)[0, 0, :, 0]
    used: set[int] = set()
    for s, n in enumerate(keys):
        begin = int(cu[s]) // key_block + s
        own = set(range(begin, begin + -(-n // key_block)))
        assert not own & used and blocks >= begin + len(own)
        used |= own
        at = begin * key_block
        assert torch.equal(spread[at : at + n], x[int(cu[s]) : int(cu[s]) + n, 0, 0])
        assert (spread[at + n : (begin + len(own)) * key_block] == 0).all()
    assert int((spread != 0).sum()) == tokens


def test_packed_bytes_stand_for_the_tokens() -> None:
    """By the descales of their blocks; what belongs to no token is zero bytes, of any sign of the scale."""
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    variant = next(x for x in load_manifest(generated_dir()).variants if x.kind == "ragged" and x.head_dim == 64)
    block = variant.key_block
    call = RaggedCall(
        q, k, v, cu_q, cu_k, None, None, 0, 0, (), -0.125, -1, -1, True, q.dtype, "fast", False, ""
    )  # fmt: skip
    made = by_torch(call, variant)
    q_descale, k_descale, v_descale = made.descales
    back = -made.q.view(torch.float8_e4m3fn).float() * q_descale[0].transpose(0, 1)[..., None]
    assert (back - q.float()).abs().max() <= 0.07 * q.float().abs().max()
    place = places(cu_k, None, len(k), block)
    keys = (
        made.k.view(torch.float8_e4m3fn).float() * k_descale[0].repeat_interleave(block, 1).transpose(0, 1)[..., None]
    )
    assert (keys[place] - k.float()).abs().max() <= 0.07 * k.float().abs().max()
    whole = quantize(to_blocks(v, place, keys.shape[0] // block, block), granularity="block", amax=V_AMAX, block=block)
    assert torch.equal(made.v, pack_v(whole[0].view(torch.uint8))[0]) and torch.equal(v_descale, whole[1])
    free = torch.ones(len(keys), dtype=torch.bool)
    free[place] = False
    assert (made.k[free] == 0).all() and made.v.count_nonzero() <= v.numel()


def test_lengths_that_lie_stay_inside() -> None:
    """On a card nobody looks at them; a token that fits nowhere goes past the end, where it is cut off."""
    for wrong in ([0, 90, 20, 60], [-5, 10, 700, 50], [50, 40, 30, 0], [0, 2**31 - 1, 5, 60]):
        place = places(torch.tensor(wrong, dtype=torch.int32), None, 60, 128)
        assert 0 <= int(place.min()) and int(place.max()) <= blocks_of(60, 3, 128) * 128


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window_size": (-2, 0)}, "window_size must be"),
    ({"window_size": 5}, "window_size must be"),
    ({"window_size": (1.0, 0)}, "window_size must be"),
    ({"causal": 1}, "causal must be True or False, got 1"),
    ({"causal_alignment": "top"}, "causal_alignment"),
    ({"precision": "high"}, "precision='high' has no kernel for ragged batches"),
    ({"out_dtype": torch.float32}, "out_dtype"),
    ({"softmax_scale": math.inf}, "softmax_scale"),
    ({"softmax_scale": "1"}, "softmax_scale"),
    ({"q_descale": torch.ones(1)}, "q_descale is for FP8"),
    ({"cu_seqlens_k": torch.tensor([0, 3, 2, 10], dtype=torch.int32)}, "must rise"),
    ({"cu_seqlens_k": torch.tensor([0, 3, 5, 11], dtype=torch.int32)}, "must rise"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 10], dtype=torch.int32)}, "sequences"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 5, 10])}, "int32"),
    ({"seqused_k": torch.tensor([1, 2], dtype=torch.int32)}, "sequences"),
    ({"max_seqlen_k": 4}, "max_seqlen_k is 4, a sequence has 5 keys"),
]


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_refusals_have_names(given: dict[str, Any], reason: str) -> None:
    q, k, v, cu_q, cu_k = batch([3, 2, 5], [3, 2, 5])
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 5} | given
    with pytest.raises(UnsupportedError, match=reason):
        attention_varlen(q, k, v, **arguments)


def test_a_bound_of_the_keys_that_count() -> None:
    q, k, v, cu_q, cu_k = batch([3, 2, 5], [3, 2, 5])
    used = torch.tensor([3, 2, 4], dtype=torch.int32)
    attention_varlen(q, k, v, cu_q, cu_k, 5, 4, seqused_k=used)


def test_gradients_are_refused() -> None:
    q, k, v, cu_q, cu_k = batch([3], [3])
    with pytest.raises(UnsupportedError, match="no backward"):
        attention_varlen(q.requires_grad_(), k, v, cu_q, cu_k, 3, 3)


def test_compiled_in_one_graph() -> None:
    q, k, v, cu_q, cu_k = batch(ROWS, KEYS)
    compiled = torch.compile(fp8cutlass.attention_varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(q, k, v, cu_q, cu_k, 200, 260, causal=True),
        attention_varlen(q, k, v, cu_q, cu_k, 200, 260, causal=True),
    )
