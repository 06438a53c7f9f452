"""``precision="int8"`` and ``"int8_full"`` on CPU tensors: what they lose, what they refuse, what sinks and NaN do.

Regressions these catch: smoothing or rotation that is not on by default, a sink that takes the range of u8 from all
other keys, a NaN that int8 hides, a call on a card that runs something else.
"""

from __future__ import annotations

import pytest
import torch
from reference import attention64, min_row_cosine, randn, relative_l2

import fp8cutlass
from fp8cutlass import PackedKV, attention
from fp8cutlass.dtypes import OUT_DTYPES
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import INTEGER, generated_dir, load_manifest
from fp8cutlass.native import extension

PRECISIONS = ("int8", "int8_full")
# Relative L2 of N(0, 1) at 512 tokens and of outliers there, a tenth above docs/evidence/accuracy.md.
MOST = {"int8": (0.0425, 0.0352), "int8_full": (0.0154, 0.0193)}


def operands(heads: int = 2, rows: int = 512, head_dim: int = 64) -> list[torch.Tensor]:
    return [randn(1, heads, rows, head_dim, seed=seed).bfloat16() for seed in range(3)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention64(q, k, v, q.shape[3] ** -0.5).out


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss(precision: str) -> None:
    x = operands()
    assert relative_l2(attention(*x, precision=precision), exact(*x)) < MOST[precision][0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_smoothing_and_rotation_are_on(precision: str) -> None:
    """Keys that share an offset, and a column of outliers, cost nothing; each transform is needed for one of them."""
    q, k, v = operands()
    k[..., :32] += 24.0
    k[..., 5] += 40.0 * (randn(1, 2, 512, seed=9) > 1.5)
    want = exact(q, k, v)
    loss = relative_l2(attention(q, k, v, precision=precision), want)
    assert loss < 4 * MOST[precision][0]
    for off in ("smooth_k", "hadamard"):
        assert relative_l2(attention(q, k, v, precision=precision, **{off: False}), want) > 1.5 * loss


@pytest.mark.parametrize("where", [0, 250, 511])
@pytest.mark.parametrize("small", [0.0, 0.01])
def test_a_sink_takes_no_range_from_other_keys(where: int, small: float) -> None:
    """One key with nine tenths of the weight of rows whose V is nothing, or nearly: what is left of O is that of all
    others."""
    q, k, v = operands()
    k[:, :, where] = 0
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    logits = (q.float() @ k.float().transpose(2, 3) * 64**-0.5).logsumexp(-1).mean()
    k[:, :, where, 0] = (logits + 2.2) * 8.0
    v[:, :, where] *= small
    want = exact(q, k, v)
    assert min_row_cosine(attention(q, k, v, precision="int8_full"), want) >= 0.98


@pytest.mark.edge(9)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(precision: str, bad: float) -> None:
    """int8 has no NaN: its descale carries it, in Q to one row, in K to all rows that see its keys."""
    q, k, v = operands(rows=256)
    q[0, 0, 7, 3] = bad
    out = attention(q, k, v, precision=precision)
    assert bool(out[0, 0, 7].isnan().all()) and int(out.isnan().any(-1).sum()) == 1
    q, k, v = operands(rows=256)
    k[0, 1, 200, 3] = bad
    out = attention(q, k, v, precision=precision, is_causal=True)
    assert bool(out[0, 1, 200:].isnan().all()) and not bool(out[0, 0].isnan().any())
    assert not bool(out[0, 1, :128].isnan().any())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_forms(precision: str) -> None:
    """Causal masks, windows, groups of heads, odd sizes, a negative scale and the LSE are those of every precision."""
    q, k, v = randn(1, 4, 77, 40, seed=0), randn(1, 2, 131, 40, seed=1), randn(1, 2, 131, 40, seed=2)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    options = {"enable_gqa": True, "scale": -0.2, "return_lse": True, "window_size": (60, 10)}
    out, lse = attention(q, k, v, precision=precision, **options)
    want, want_lse = attention(q, k, v, precision="high", smooth_k=True, hadamard=True, **options)
    assert relative_l2(out, want.double()) < 0.06 and float((lse - want_lse).abs().max()) < 0.1


def test_quantise() -> None:
    """A group is the keys of a block that a lane owns; its largest becomes 127, and nothing becomes -128."""
    x = randn(1, 2, 300, 64, seed=3).bfloat16()
    whole, descale = fp8cutlass.quantize(x, granularity="group", dtype=torch.int8)
    assert whole.dtype == torch.int8 and descale.shape == (1, 2, 12)
    assert int(whole.min()) >= -127
    keys = torch.arange(300)
    for block in range(3):
        for group in range(4):
            of = (keys // 128 == block) & (keys % 8 // 2 == group)
            assert int(whole[:, :, of].abs().amax()) == 127
            real = whole[:, :, of].float() * descale[:, :, 4 * block + group, None, None]
            step = descale[:, :, 4 * block + group, None, None]
            assert bool(((real - x[:, :, of].float()).abs() <= 0.501 * step).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": "token"}, "precision='int8' has scaling='block' alone, got scaling='token'"),
        ({"smooth_k": 1}, "smooth_k must be True or False, got 1"),
        ({"kernel": "sm89_fwd_d64_m64n128w4_s2_block_full_e4m3_bf16_exp2"}, "takes 'codes'"),
    ],
)
def test_refusals(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words.replace("(", r"\(")):
        attention(*operands(rows=64), precision="int8", **changes)  # type: ignore[call-overload]


def test_fp8_operands_are_refused() -> None:
    q, _ = fp8cutlass.quantize(operands(rows=64)[0])
    with pytest.raises(UnsupportedError, match="precision='int8' is for bf16 and fp16 operands"):
        attention(q, q, q, q_descale=1.0, k_descale=1.0, v_descale=1.0, precision="int8")


L40S, H200 = ((8, 9), "NVIDIA L40S", 142), ((9, 0), "NVIDIA H200", 132)


@pytest.mark.parametrize(
    ("precision", "card", "how", "words"),
    [
        ("int8", L40S, "plain", "softmax codes, scores s32"),
        ("int8_full", L40S, "plain", "softmax bytes, scores s32"),
        ("int8_full", H200, "plain", "precision='int8_full' has no kernel for sm90a"),
        ("int8", H200, "plain", "softmax codes, scores s32"),
        ("int8", H200, "window", "_window_s8_bf16_codes_"),
        ("int8", H200, "mask", "_blocks_s8_bf16_codes_"),
        ("int8", H200, "head_dim 72", "sm90a_fwd_d128_"),
        ("int8", H200, "head_dim 192", "head_dim must lie in 1..128, got 192"),
        ("int8", L40S, "head_dim 192", "sm89_fwd_d256_"),
        ("int8", L40S, "window", "kernels for windows take e4m3, bf16 and fp16 operands"),
    ],
)
def test_what_a_card_says(precision: str, card: extension.Properties, how: str, words: str) -> None:
    """Its own kernels, or refused by name; not served by something less exact."""
    with extension.assume(card), torch._subclasses.FakeTensorMode():
        head_dim = int(how.split()[1]) if how.startswith("head_dim") else 64
        x = torch.empty(1, 2, 64, head_dim, dtype=torch.bfloat16, device="cuda")
        seen = torch.empty(64, 64, dtype=torch.bool, device="cuda")
        options = {"window": {"window_size": (20, 0)}, "mask": {"attn_mask": seen}}.get(how, {})
        assert words in fp8cutlass.explain(x, x, x, precision=precision, **options)


def test_kernels_of_a_card_on_the_cpu() -> None:
    """The emulator runs a pinned kernel of Hopper, with blocks of 128 or 192 keys, to the same accuracy."""
    x = operands()
    wanted = {"dtype": "s8", "head_dim": 64, "kind": "fwd", "causal": False}
    variants = load_manifest(generated_dir()).variants
    found = [v for v in variants if all(getattr(v, name) == value for name, value in wanted.items())]
    assert found
    for v in found:
        out = attention(*x, precision="int8", kernel=v.id, out_dtype=OUT_DTYPES[v.out])
        assert relative_l2(out, exact(*x)) < MOST["int8"][0]


@pytest.mark.parametrize("kind", ["window", "blocks"])
def test_kernels_for_windows_and_masks_on_the_cpu(kind: str) -> None:
    """Emulated, they hide what they should and lose as little as the others."""
    q, k, v = operands(rows=300)
    row, key = torch.arange(300)[:, None], torch.arange(300)
    seen = (key >= row - 70) & (key <= row + 9)
    wanted = {"dtype": "s8", "head_dim": 64, "kind": kind}
    found = [x for x in load_manifest(generated_dir()).variants if all(getattr(x, n) == w for n, w in wanted.items())]
    assert found
    options = {"window_size": (70, 9)} if kind == "window" else {"attn_mask": seen}
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=seen)
    for x in found:
        out = attention(q, k, v, precision="int8", kernel=x.id, out_dtype=OUT_DTYPES[x.out], **options)
        assert relative_l2(out, want) < MOST["int8"][0]


def test_explain_on_the_cpu() -> None:
    """It says which kernel the emulator runs, and what is quantised to what."""
    for precision, softmax in (("int8", "codes"), ("int8_full", "bytes")):
        text = fp8cutlass.explain(*operands(rows=64), precision=precision)
        assert f"softmax {softmax}, scores s32" in text and "quantised to amax 127" in text
        assert "kernel:    sm89_fwd_d64_" in text and text.splitlines()[0].endswith(softmax)


@pytest.mark.parametrize(("precision", "family"), [("int8", "sm90a"), ("int8", "sm89"), ("int8_full", "sm89")])
def test_packed_keys(precision: str, family: str) -> None:
    """Its bits, cut between blocks and put together again."""
    q, k, v = operands(rows=600)
    wanted = {
        "dtype": INTEGER[precision],
        "key_block": 128,
        "head_dim": 64,
        "out": "bf16",
        "kind": "fwd",
        "causal": False,
    }
    variants = load_manifest(generated_dir()).variants
    kernel = next(v.id for v in variants if family in v.targets and all(getattr(v, n) == x for n, x in wanted.items()))
    options = {"precision": precision, "kernel": kernel, "smooth_k": False}
    packed = fp8cutlass.pack_kv(k, v, **options)
    assert packed.amax == 127 and packed.k_descale.shape == (1, 2, 20)
    want = attention(q, k, v, **options)
    assert torch.equal(attention(q, packed, kernel=kernel), want)
    parts = [packed.narrow(0, 256), packed.narrow(256, 344)]
    assert torch.equal(attention(q, PackedKV.joined(parts), kernel=kernel), want)
