"""The kernels that quantise and pack, against `quantize` and `pack_v` on the CPU: every byte, every bit of a descale.

Regressions these catch: a group that reaches over a tail or into a neighbouring head, bytes that nobody writes, a
product that is contracted or a denormal that is flushed, an index that overflows, a stride that is mixed up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu import built_manifest, built_packs, needs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import ORDERS, laid_out, on_card
from reference import attention64, relative_l2

import fp8cutlass
from fp8cutlass.native import fused
from fp8cutlass.native.fused import Operands
from fp8cutlass.quant.prepare import prepared
from fp8cutlass.quant.quantize import V_AMAX, quantize
from fp8cutlass.quant.rotate import SIGNS
from fp8cutlass.quant.smooth import key_mean
from fp8cutlass.quant.v_layout import pack_v, pad_token_descale

pytestmark = pytest.mark.gpu

PACKS = built_packs()
MODES = built_manifest().scaling
SOURCES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VALUES = ("normal", "rows", "tiny", "denormal", "zeros", "huge", "broken", "all broken", "negative zeros", "sign zeros")
TRANSFORMS = ({}, {"smooth_k": True}, {"hadamard": True}, {"smooth_k": True, "hadamard": True})
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def values_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    limits = torch.finfo(dtype)
    if kind == "rows":  # 12 orders of magnitude from row to row, outliers in one column
        x = x * torch.logspace(-8, 4, shape[2])[:, None]
        x[..., shape[3] // 2] *= 30
    elif kind == "tiny":  # about the smallest group that has a scale of its own
        x = x * limits.tiny * 2.0 ** torch.randint(-3, 12, shape[:3], generator=generator)[..., None]
    elif kind == "denormal":
        x = x * limits.smallest_normal / 16
    elif kind == "zeros":
        x = x * (torch.rand(shape[:3], generator=generator) < 0.1)[..., None]
    elif kind == "huge":
        x = (x / 3).clamp(-1, 1) * limits.max
    elif kind == "broken":  # one in 500 is no number
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf])
        drawn = strange[torch.randint(0, 3, shape, generator=generator)]
        x = torch.where(torch.rand(shape, generator=generator) < 0.002, drawn, x)
    elif kind == "all broken":
        x = torch.full(shape, -torch.inf)
        x[..., ::3] = torch.nan
    elif kind == "negative zeros":
        x = torch.full(shape, -0.0)
    elif kind == "sign zeros":  # those of the rotation's signs make negative zeros of all
        negative = torch.tensor([SIGNS[d // 32] >> d % 32 & 1 for d in range(shape[3])]).bool()
        x = torch.where(negative, 0.0, -0.0).expand(shape)
    return x.to(dtype)


def specified(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: dict[str, Any], **options: Any) -> Operands:
    """What torch makes of the same operands on the CPU."""
    granularity, amax = options["granularity"], options["amax"]
    head_dim, block = pack["head_dim"], pack["key_block"]
    mean = key_mean(k) if options.get("smooth_k") else None
    changed = {"head_dim": head_dim, "hadamard": options.get("hadamard", False)}
    q, k = prepared(q, None, **changed), prepared(k, mean, **changed)
    mean = None if mean is None else F.pad(mean, (0, head_dim - mean.shape[2]))
    q8, q_descale = quantize(q, granularity=granularity["q"], amax=amax)
    k8, k_descale = quantize(k, granularity=granularity["k"], amax=amax, block=block)
    v8, v_descale = quantize(v, granularity=granularity["v"], amax=V_AMAX, block=block)
    q8, k8, v8 = (F.pad(x.contiguous().view(torch.uint8), (0, head_dim - x.shape[3])) for x in (q8, k8, v8))
    if options["negate_q"]:
        q8 = q8 ^ 0x80
    if granularity["k"] == "token":
        k_descale = pad_token_descale(k_descale)
    if granularity["v"] == "channel":
        v_descale = F.pad(v_descale, (0, head_dim - v.shape[3]), value=1.0)
    return Operands(q8, k8, pack_v(v8), q_descale, k_descale, v_descale, mean)


def poisoned(q: Any, k: Any, v: Any, pack: dict[str, Any], **options: Any) -> Operands:
    """What the kernel makes, of operands that are not None, in memory that was full of something else."""
    q, k, v = (None if x is None else fused.readable(x) for x in (q, k, v))
    shape = {"head_dim": pack["head_dim"], "key_block": pack["key_block"], "granularity": options["granularity"]}
    made = fused.empty_operands(q, k, v, **shape, smooth_k=options.pop("smooth_k", False))
    for x in vars(made).values():
        if x is not None:
            x.fill_(0xA5 if x.dtype == torch.uint8 else torch.nan)
    fused.fill(made, q, k, v, key_block=pack["key_block"], **options)
    return made


def check(made: Operands, want: Operands) -> None:
    for name, x in vars(want).items():
        assert (getattr(made, name) is None) == (x is None), name
        if x is None:
            continue
        got = getattr(made, name).cpu()
        assert got.shape == x.shape, name
        if x.dtype == torch.float32:
            got, x = got.view(torch.int32), x.contiguous().view(torch.int32)
        wrong = (got != x).nonzero()
        assert len(wrong) == 0, f"{name}: {len(wrong)} of {x.numel()} differ, the first at {wrong[0].tolist()}"


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p["id"])
@SETTINGS
@given(data=st.data())
def test_bits(pack: dict[str, Any], scaling: str, data: st.DataObject) -> None:
    """Shapes with tails on both sides of a block, GQA, padded head_dims, every memory order, every sort of value."""
    draw = data.draw
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block = pack["key_block"]
    lengths = st.one_of(
        st.integers(1, 2 * block + 70), st.sampled_from([1, 127, 128, 129, block, block + 1, 2 * block])
    )
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    widths = st.one_of(st.just(pack["head_dim"]), st.integers(1, pack["head_dim"]))
    head_dim, seed = draw(widths), draw(st.integers(0, 1000))
    shapes = {"q": (batch, kv_heads * group, seqlen_q), "k": (batch, kv_heads, seqlen_k)}
    shapes["v"] = shapes["k"]
    host = []
    for i, name in enumerate("qkv"):
        kind, order = draw(st.sampled_from(VALUES)), draw(st.sampled_from(ORDERS))
        x = values_of(kind, (*shapes[name], head_dim), SOURCES[pack["source"]], 3 * seed + i)
        host.append(laid_out(x, order))
    options = {
        "granularity": MODES[scaling],
        "amax": draw(st.sampled_from([14.0, 448.0])),
        "negate_q": draw(st.booleans()),
        "smooth_k": draw(st.booleans()),
        "hadamard": draw(st.booleans()),
    }
    check(poisoned(*map(on_card, host), pack, **options), specified(*host, pack, **options))


@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p["id"])
def test_every_value_of_the_source_type(pack: dict[str, Any]) -> None:
    """All 65,536 bit patterns, under scales of their own neighbourhood and of the whole."""
    dtype, width = SOURCES[pack["source"]], pack["head_dim"]
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    patterns = F.pad(patterns, (0, -len(patterns) % width)).view(dtype).reshape(1, 1, -1, width)
    for scaling in MODES:
        for amax in (14.0, 448.0):
            for transforms in TRANSFORMS:
                options = {"granularity": MODES[scaling], "amax": amax, "negate_q": False} | transforms
                card = patterns.cuda()
                check(poisoned(card, card, card, pack, **options), specified(*[patterns] * 3, pack, **options))


@pytest.mark.parametrize("scaling", MODES)
def test_more_heads_than_a_grid_dimension_holds(scaling: str) -> None:
    pack = min(PACKS, key=lambda p: p["head_dim"])
    x = values_of("rows", (5, 14_000, 2, pack["head_dim"]), SOURCES[pack["source"]], 1)
    options = {"granularity": MODES[scaling], "amax": 14.0, "negate_q": True}
    card = x.cuda()
    check(poisoned(card, card, card, pack, **options), specified(x, x, x, pack, **options))


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
@pytest.mark.parametrize("scaling", MODES)
def test_long_sequences(scaling: str, transforms: dict[str, bool]) -> None:
    """More CTAs than are resident, and a group over thousands of them."""
    for pack in PACKS:
        if pack["head_dim"] != max(p["head_dim"] for p in PACKS):
            continue
        host = [values_of("normal", (1, 2, 20_011, pack["head_dim"]), SOURCES[pack["source"]], s) for s in range(3)]
        options = {"granularity": MODES[scaling], "amax": 448.0, "negate_q": False} | transforms
        check(poisoned(*(x.cuda() for x in host), pack, **options), specified(*host, pack, **options))


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
def test_capture_and_replay(scaling: str, transforms: dict[str, bool]) -> None:
    """A graph packs what its inputs hold when it is replayed, maxima of an earlier replay forgotten."""
    pack = PACKS[0]
    shape, dtype = (2, 3, 300, pack["head_dim"]), SOURCES[pack["source"]]
    options = {"granularity": MODES[scaling], "amax": 14.0, "negate_q": False} | transforms
    inputs = [values_of("huge", shape, dtype, seed).cuda() for seed in range(3)]
    poisoned(*inputs, pack, **options)  # loads the library and the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = poisoned(*inputs, pack, **options)
    for first_seed in (10, 20):
        host = [values_of("normal", shape, dtype, first_seed + i) for i in range(3)]
        for x, new in zip(inputs, host, strict=True):
            x.copy_(new)
        graph.replay()
        check(made, specified(*host, pack, **options))


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_attention_behind_it(source: str, scaling: str) -> None:
    """The attention kernel may start before the packing ends: a hundred calls give the same bits, and those of
    a call with the signs of Q and of the scale turned."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, 4, 700, 64, generator=generator).to(SOURCES[source]).cuda() for _ in range(3))
    needs(q, k, v, scaling=scaling)
    first = fp8cutlass.attention(q, k, v, scaling=scaling, scale=-0.1)
    assert bool(first.isfinite().all())
    for _ in range(100):
        noise = torch.randn_like(q)
        fp8cutlass.attention(noise, noise, noise, scaling=scaling)
        assert torch.equal(fp8cutlass.attention(q, k, v, scaling=scaling, scale=-0.1), first)
    assert torch.equal(fp8cutlass.attention(-q, k, v, scaling=scaling, scale=0.1), first)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key_block": 64}, "no pack kernel"),
        ({"amax": 449.0}, "score_amax"),
        ({"granularity": {"q": "token", "k": "channel", "v": "block"}}, "only V has channels"),
        ({"granularity": {"q": "block", "k": "block", "v": "block"}}, "q_descale|q_granularity"),
        ({"granularity": {"q": "token", "k": "block", "v": "head"}}, "v_descale|amax"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], named: str) -> None:
    pack = PACKS[0]
    x = torch.zeros(1, 2, 700, pack["head_dim"], dtype=SOURCES[pack["source"]], device="cuda")
    block = {"granularity": MODES["block"], "key_block": pack["key_block"]}
    made = fused.empty_operands(x, x, x, head_dim=pack["head_dim"], **block)
    options: dict[str, Any] = block | {"amax": 14.0, "negate_q": False} | change
    with pytest.raises(RuntimeError, match=named):
        fused.fill(made, x, x, x, **options)


@pytest.mark.parametrize("transforms", TRANSFORMS[1:], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_attention_with_transforms(head_dim: int, transforms: dict[str, bool]) -> None:
    """Grouped heads, keys with a bias: result and LSE are those of float64 on what was given."""
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, 6, 300, head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(2, 2, 700, head_dim, generator=generator).bfloat16() for _ in range(2))
    if "smooth_k" in transforms:
        k = (k.float() + 8 * torch.randn(2, 2, 1, head_dim, generator=generator)).bfloat16()
    card = [x.cuda() for x in (q, k, v)]
    needs(*card, enable_gqa=True, **transforms)
    for scale in (head_dim**-0.5, -(head_dim**-0.5)):
        out, lse = fp8cutlass.attention(*card, enable_gqa=True, return_lse=True, scale=scale, **transforms)
        want = attention64(q, k, v, scale)
        assert relative_l2(out.cpu(), want.out) < 0.066
        assert float((lse.cpu() - want.lse).square().mean().sqrt()) < 0.02
