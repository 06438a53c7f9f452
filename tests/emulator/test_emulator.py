"""The emulator against float64: the z-test of every variant of the manifest's smaller profiles, sizes and masks. Probes
of extreme inputs: test_probes.py; broken kernels that the z-test refuses: test_mutants.py."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    attention64,
    make_operands,
    min_row_cosine,
    operands_of,
    randn,
    relative_l2,
    unseen_tile,
    visible,
    z_test,
)

from fp8cutlass import attention
from fp8cutlass.accuracy.inputs import outliers
from fp8cutlass.accuracy.ztest import byte_deviation, summarise
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import KEY_BLOCK, Manifest, Variant, generated_dir, load_manifest

MANIFEST = load_manifest(generated_dir())
FORWARD = [v for v in MANIFEST.variants if v.kind == "fwd"]
# One kernel of each combination that the emulator tells apart, and of each head_dim with each softmax and scaling.
_APART = [
    lambda v: (v.family, v.tile_m, v.tile_n, v.scaling, v.softmax, v.dtype, v.causal, v.out),
    lambda v: (v.family, v.head_dim, v.softmax, v.scaling),
]
SMALL = list({v.id: v for key in _APART for v in {key(v): v for v in reversed(FORWARD)}.values()}.values())
OUT_DESCALE = 0.01


def pick(**wanted: object) -> Variant:
    """The first variant with those properties; of sm89, bf16 output from e4m3, unless asked otherwise."""
    wanted = {"family": "sm89", "dtype": "e4m3", "out": "bf16", "scaling": "block"} | wanted
    return next(v for v in FORWARD if all(getattr(v, name) == value for name, value in wanted.items()))


@pytest.mark.parametrize("variant", SMALL, ids=lambda v: v.id)
def test_every_small_variant(variant: Variant) -> None:
    """Odd lengths, two query heads a KV head, the causal diagonal through the middle: z-test, LSE and L2."""
    d = variant.head_dim
    q, k, v = randn(1, 4, 150, d, seed=1), randn(1, 2, 283, d, seed=2), randn(1, 2, 283, d, seed=3)
    x = operands_of(variant, q, k, v)
    offset = 133 if variant.causal else None
    out_descale = torch.tensor([OUT_DESCALE]) if variant.out == "e4m3" else None
    got = emulate(
        *x.fp8, *x.descales, variant=variant, scale=d**-0.5, causal_offset=offset or 0, out_descale=out_descale
    )
    want = attention64(*x.real, d**-0.5, offset)
    out = got.out.float() * (OUT_DESCALE if variant.out == "e4m3" else 1.0)
    if variant.softmax == "bytes":
        v_descale = x.descales[2].repeat_interleave(2, 1)
        sigma = byte_deviation(want, v_descale, variant.tile_n, got.out.dtype)
        z = summarise((out.double() - want.out) / sigma, out)
    else:
        z = z_test(out, want, variant.softmax, got.out.dtype)
    assert z.refusals() == [] and z.rms >= 0.2
    limit = {"exp2x2": 0.0022, "bytes": 0.01}.get(variant.softmax, 0.035)
    assert relative_l2(out, want.out) <= (0.045 if variant.out == "e4m3" else limit)
    assert float((got.lse - want.lse).abs().max()) <= 1e-4 + 2.0**-12 * want.max_score
    assert abs(float(got.amax) / float(want.out.abs().max()) - 1) < 0.1


@pytest.mark.parametrize("scaling", ["tensor", "head"])
@pytest.mark.parametrize(
    ("family", "softmax"),
    [("sm90a", "linear"), ("sm90a", "quadratic"), ("sm90a", "exp2")]
    + [("sm89", "linear"), ("sm89", "exp2"), ("sm89", "exp2x2")],
)
def test_a_kernel_of_scaling_block_takes_coarser_descales(family: str, softmax: str, scaling: str) -> None:
    """As a descale per block that repeats them: by sm90a bit for bit, by sm89 but for where V's is applied."""
    variant = pick(family=family, head_dim=64, softmax=softmax, causal=False)
    q, k, v = (randn(2, h, s, 64, seed=s) for h, s in ((4, 70), (2, 500), (2, 501)))
    v = v[:, :, :500] * torch.tensor([1.0, 9.0])[:, None, None].bfloat16()
    x = operands_of(variant, q, k, v, scaling)
    got = emulate(*x.fp8, *x.descales, variant=variant, scale=0.125, scaling=scaling)
    shapes = (4, 70), (2, -(-500 // variant.key_block)), (2, -(-500 // variant.key_block))
    spread = [d.view(*d.shape, *[1] * (3 - d.dim())).expand(2, *s) for d, s in zip(x.descales, shapes, strict=True)]
    want = emulate(*x.fp8, *spread, variant=variant, scale=0.125)
    assert torch.equal(got.lse, want.lse)
    assert torch.equal(got.out, want.out) or (family == "sm89" and relative_l2(got.out, want.out.double()) < 2.0**-8)
    assert z_test(got.out, attention64(*x.real, 0.125), softmax).refusals() == []


@pytest.mark.edge(8)
@pytest.mark.parametrize("family", ["sm89", "sm90a"])
@pytest.mark.parametrize("softmax", ["linear", "exp2"])
def test_a_tile_of_which_a_row_sees_nothing_has_no_weight(family: str, softmax: str) -> None:
    fits = {"family": family, "head_dim": 128, "softmax": softmax, "causal": True}
    variant = pick(**fits, **({"tile_n": 192} if (family, softmax) == ("sm90a", "linear") else {}))
    tensors, offset = unseen_tile(128)
    x = operands_of(variant, *tensors)
    got = emulate(*x.fp8, *x.descales, variant=variant, scale=128**-0.5, causal_offset=offset)
    want = attention64(*x.real, 128**-0.5, offset)
    assert relative_l2(got.out, want.out) <= 0.05
    rounding = 2.0**-10 if softmax == "linear" else 2.0**-12  # of scores in f16, where logits are this large
    assert float((got.lse - want.lse).abs().max()) <= 1e-4 + rounding * want.max_score


def test_blocks_of_a_kernel_reach_their_keys() -> None:
    """A V descale of each block, in a kernel whose block is its tile, on one-hot attention: no key takes another's."""
    variant = next(v for v in FORWARD if v.key_block != KEY_BLOCK and not v.causal and v.out == "bf16")
    d, block = variant.head_dim, variant.key_block
    keys = 3 * block + 5
    ask = torch.tensor([0, KEY_BLOCK, block - 1, block, 2 * block - 1, 2 * block, 3 * block, keys - 1])
    q, k = torch.zeros(1, 1, len(ask), d), torch.zeros(1, 1, keys, d)
    for row, key in enumerate(ask.tolist()):
        q[0, 0, row, row] = k[0, 0, key, row] = 8.0
    v_descale = torch.tensor([[[1.0, 2.0, 4.0, 8.0]]])
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, torch.ones(1, 1, keys, d))]
    descales = torch.ones(1, 1, len(ask)), torch.ones(1, 1, 4), v_descale
    got = emulate(*fp8, *descales, variant=variant, scale=1.0).out
    assert torch.equal(got[0, 0, :, 0].float(), v_descale[0, 0, ask // block])


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_what_the_user_loses(scaling: str, precision: str) -> None:
    """Tighter than the gates of the accuracy table, which hold for other seeds too."""
    q, k, v = (randn(1, 8, 512, 64, seed=seed) for seed in range(3))
    got = attention(q, k, v, scaling=scaling, precision=precision)
    want = attention64(q, k, v, 0.125).out
    assert 0.03 <= relative_l2(got, want) <= 0.056
    assert min_row_cosine(got, want) >= 0.99


def test_what_the_user_loses_on_outliers() -> None:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001): finer scales pay, and P adds its 3.5% to what the operands lose."""
    q, k, v = outliers((1, 8, 512, 64))
    want = attention64(q, k, v, 0.125).out
    loss = {}
    for scaling in ("tensor", "head", "block", "token"):
        mode = MANIFEST.scaling[scaling]
        rounded = make_operands(q, k, v, (mode["q"], mode["k"], mode["v"]), score_amax=448.0).real
        operands_lose = relative_l2(attention64(*rounded, 0.125).out, want)
        loss[scaling] = relative_l2(attention(q, k, v, scaling=scaling, precision="accurate"), want)
        assert loss[scaling] <= math.hypot(operands_lose, 0.035)
    assert loss["tensor"] > loss["head"] > loss["block"] > loss["token"]


@pytest.mark.parametrize("softmax", ["linear", "quadratic", "exp2"])
def test_mutants_of_the_kernel_die(softmax: str) -> None:
    """A dropped KV tile, a mask off by one, V's descales of the wrong block."""
    family = "sm90a" if softmax == "quadratic" else "sm89"
    variant = pick(family=family, head_dim=64, softmax=softmax, causal=True, key_block=KEY_BLOCK)
    x = operands_of(variant, *(randn(1, 2, s, 64, seed=s) for s in (130, 400, 400)))
    want = attention64(*x.real, 0.125, 270)

    def run(v_descale: torch.Tensor, keys: int = 400, offset: int = 270) -> list[str]:
        q_descale, k_descale, _ = x.descales
        blocks = -(-keys // 128)
        fp8 = (x.fp8[0], x.fp8[1][:, :, :keys], x.fp8[2][:, :, :keys])
        descales = (q_descale, k_descale[:, :, :blocks], v_descale[:, :, :blocks])
        got = emulate(*fp8, *descales, variant=variant, scale=0.125, causal_offset=offset).out
        return z_test(got, want, softmax).refusals()

    assert run(x.descales[2]) == []
    assert run(x.descales[2], keys=320)
    assert run(x.descales[2], offset=271)
    assert run(x.descales[2] * torch.tensor([1.0, 1.0, 1.25, 1.0]))


@settings(max_examples=40, deadline=None)
@given(
    seqlen_q=st.integers(1, 257),
    seqlen_k=st.integers(1, 257),
    ratio=st.sampled_from([1, 2, 3, 5, 7, 8, 16]),
    mask=st.sampled_from([None, "top_left", "bottom_right"]),
    scaling=st.sampled_from(["tensor", "head", "block", "token"]),
    precision=st.sampled_from(["fast", "accurate", "high"]),
)
def test_any_size(seqlen_q: int, seqlen_k: int, ratio: int, mask: str | None, scaling: str, precision: str) -> None:
    """Against float64 under an explicit mask, on the original operands; rows without keys are exactly 0 and -inf."""
    q, k, v = (
        randn(1, ratio, seqlen_q, 32, seed=1),
        randn(1, 1, seqlen_k, 32, seed=2),
        randn(1, 1, seqlen_k, 32, seed=3),
    )
    got, lse = attention(
        q,
        k,
        v,
        is_causal=mask is not None,
        causal_alignment=mask or "top_left",
        enable_gqa=True,
        scaling=scaling,
        precision=precision,
        return_lse=True,
    )
    offset = {None: None, "top_left": 0, "bottom_right": seqlen_k - seqlen_q}[mask]
    want = attention64(q, k, v, 32**-0.5, offset)
    dead = ~visible(seqlen_q, seqlen_k, offset).any(-1)
    assert not got[:, :, dead].any() and bool((lse[:, :, dead] == -torch.inf).all())
    if not bool(dead.all()):
        live = ~dead
        assert relative_l2(got[:, :, live], want.out[:, :, live]) < 0.12
        assert float((lse - want.lse)[:, :, live].abs().max()) < 0.6


@pytest.mark.edge(7, 8)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 200), (200, 5), (128, 128), (129, 127), (64, 65)])
@pytest.mark.parametrize("precision", ["fast", "accurate", "high"])
def test_causal_alignments(alignment: str, seqlen_q: int, seqlen_k: int, precision: str) -> None:
    """V one-hot in the key: the output shows which keys a row saw."""
    q = torch.zeros(1, 1, seqlen_q, 256, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, seqlen_k, 256, dtype=torch.bfloat16)
    v = torch.eye(seqlen_k, 256, dtype=torch.bfloat16)[None, None]
    got = attention(q, k, v, is_causal=True, causal_alignment=alignment, precision=precision)
    offset = 0 if alignment == "top_left" else seqlen_k - seqlen_q
    seen = visible(seqlen_q, seqlen_k, offset)
    assert torch.equal(got[0, 0, :, :seqlen_k] > 0, seen)
    share = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    assert torch.allclose(got[0, 0, :, :seqlen_k].float(), share.float(), rtol=2.0**-7, atol=0)


@pytest.mark.edge(24)
@pytest.mark.parametrize("ratio", [2, 3, 5, 7, 8, 16])
def test_gqa_is_repeated_heads(ratio: int) -> None:
    q, k, v = randn(2, 2 * ratio, 70, 64, seed=1), randn(2, 2, 90, 64, seed=2), randn(2, 2, 90, 64, seed=3)
    got = attention(q, k, v, enable_gqa=True, scaling="token")
    want = attention(q, k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1), scaling="token")
    assert torch.equal(got, want)


@pytest.mark.parametrize("softmax", ["linear", "exp2"])
def test_integers_are_exact_in_the_scores(softmax: str) -> None:
    """Small integers: the diagnostic scores and tile products agree with integer arithmetic to the bit."""
    variant = pick(head_dim=64, softmax=softmax, causal=True)
    generator = torch.Generator().manual_seed(8)
    q, k, v = (
        (
            torch.randint(-2, 3, (1, 2, s, 64), generator=generator)
            * (torch.rand(1, 2, s, 64, generator=generator) < 0.2)
        )
        for s in (70, 200, 200)
    )
    ones = (torch.ones(1, 2, 70), torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    fp8 = [x.float().to(torch.float8_e4m3fn) for x in (q, k, v)]
    got = emulate(*fp8, *ones, variant=variant, scale=0.5, causal_offset=40, diagnostics=True)
    values = got.diagnostics
    assert values is not None
    tiles = -(-200 // variant.tile_n)
    assert values.scores.shape == values.p.shape == (1, 2, 70, tiles * variant.tile_n)
    assert values.weight.shape == (1, 2, 70, tiles) and values.tile_o.shape == (1, 2, tiles, 70, 64)
    want = (q @ k.transpose(-1, -2)).float()
    seen = visible(70, 200, 40)
    assert torch.equal(values.scores[..., :200], want.masked_fill(~seen, -torch.inf))
    assert not values.p[..., :200][..., ~seen].any() and not values.p[..., 200:].any()
    p = values.p.view(torch.float8_e4m3fn).double().unflatten(3, (tiles, variant.tile_n)).transpose(2, 3)
    v_tiles = torch.nn.functional.pad(v.double(), (0, 0, 0, tiles * variant.tile_n - 200)).unflatten(2, (tiles, -1))
    assert torch.allclose(values.tile_o.double(), p @ v_tiles, rtol=1e-6, atol=1e-6)
    shares = p.sum(-1) * torch.exp2(values.weight.double()).transpose(2, 3)
    # The linear code is 4% high on average.
    assert torch.allclose(shares.sum(2).log(), got.lse.double(), atol=0.08 if softmax == "linear" else 0.03)


def test_diagnostics_do_not_change_the_result() -> None:
    variant = pick(head_dim=64, softmax="exp2", causal=True)
    x = operands_of(variant, *(randn(2, 2, s, 64, seed=s) for s in (100, 150, 150)))
    plain = emulate(*x.fp8, *x.descales, variant=variant, scale=0.1)
    full = emulate(*x.fp8, *x.descales, variant=variant, scale=0.1, diagnostics=True)
    assert torch.equal(plain.out, full.out) and torch.equal(plain.lse, full.lse)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded memory: one head at a time gives the same bits (of the LSE but for the order of a float32 sum)."""
    variant = pick(head_dim=64, softmax="linear", causal=False)
    x = operands_of(variant, *(randn(2, h, s, 64, seed=s) for h, s in ((6, 60), (3, 150), (3, 150))))
    whole = emulate(*x.fp8, *x.descales, variant=variant, scale=0.1)
    monkeypatch.setattr("fp8cutlass.emulator.emulate.CHUNK_BYTES", 1)
    parts = emulate(*x.fp8, *x.descales, variant=variant, scale=0.1)
    assert torch.equal(whole.out, parts.out) and torch.allclose(whole.lse, parts.lse, rtol=0, atol=2e-6)


def test_score_step_changes_only_the_rounding_of_scores() -> None:
    """An f16 score is rounded once per 32 products, or per 16 where FP8 mma is emulated; an f32 score never."""
    variant = pick(head_dim=64, softmax="linear", causal=False)
    x = operands_of(variant, *(randn(1, 2, s, 64, seed=s) for s in (60, 150, 150)))
    steps = [emulate(*x.fp8, *x.descales, variant=variant, scale=0.1, emulated_mma=s).out for s in (False, True)]
    assert not torch.equal(*steps) and relative_l2(steps[1], steps[0]) < 0.02
    variant = dataclasses.replace(variant, softmax="exp2", score="f32")
    steps = [emulate(*x.fp8, *x.descales, variant=variant, scale=0.1, emulated_mma=s).out for s in (False, True)]
    assert torch.equal(*steps)


def test_manifest_covers_all_softmaxes_and_scalings(manifest: Manifest) -> None:
    """The parametrisation above is worth nothing if the profiles shrink."""
    assert {(v.softmax, s) for v in SMALL for s in v.scalings} >= {
        ("linear", s) for s in ("tensor", "head", "block")
    } | {("exp2", s) for s in manifest.scaling} | {("exp2x2", s) for s in ("block", "token")} | {("quadratic", "block")}
