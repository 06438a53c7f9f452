"""Keys and values that are packed once, on the card: the bits of calls on key and value, and of the CPU.

Regressions these catch: an operand that is packed without the others and differs by it, a kernel that starts before its
operands are written, a graph that holds on to the keys of its capture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import built_packs, chosen, needs
from test_gpu_pack import MODES, SOURCES, TRANSFORMS, check, poisoned, specified, values_of

from fp8cutlass import UnsupportedError, attention, pack_kv, supports
from fp8cutlass.call.plan import score_amax

pytestmark = pytest.mark.gpu

PACKS = built_packs()


def operands(head_dim: int = 64, seqlen_q: int = 300, seqlen_k: int = 700, dtype: Any = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(head_dim + seqlen_k)
    shapes = ((2, 6, seqlen_q), (2, 2, seqlen_k), (2, 2, seqlen_k))
    q, k, v = (torch.randn(*shape, head_dim, generator=generator) for shape in shapes)
    return tuple(x.to(dtype).cuda() for x in (q, k + 2, v))


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p["id"])
def test_operands_apart(pack: dict[str, Any], scaling: str) -> None:
    """Each of Q, K and V left out: the others get the bits that the specification gives them."""
    dtype, block = SOURCES[pack["source"]], pack["key_block"]
    host = [
        values_of("rows", (2, heads, rows, pack["head_dim"] - 8), dtype, rows)
        for heads, rows in ((4, block + 9), (2, 2 * block + 70), (2, 2 * block + 70))
    ]
    for transforms in TRANSFORMS:
        options = {"granularity": MODES[scaling], "amax": 14.0, "negate_q": True} | transforms
        whole = specified(*host, pack, **options)
        for kept in ("q", "k", "v", "kv", "qk"):
            given = [x.cuda() if name in kept else None for name, x in zip("qkv", host, strict=True)]
            absent = {name: None for x in "qkv" if x not in kept for name in (x, f"{x}_descale")}
            if "k" not in kept:
                absent["k_mean"] = None
            check(poisoned(*given, pack, **options), replace(whole, **absent))


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate"])
@pytest.mark.parametrize("scaling", MODES)
def test_the_bits_of_a_call_on_key_and_value(scaling: str, precision: str, transforms: dict[str, bool]) -> None:
    """Head dims with and without padding, either sign of the scale, both masks: result, LSE and amax."""
    made = {"scaling": scaling, "precision": precision} | transforms
    common = {"enable_gqa": True, "return_lse": True, "return_amax": True}
    for head_dim in (64, 80, 128, 256):
        q, k, v = operands(head_dim)
        for options in ({}, {"scale": -0.1, "is_causal": True, "causal_alignment": "bottom_right"}):
            if not supports(q, k, v, enable_gqa=True, **options, **made)[0]:
                continue
            packed = pack_kv(k, v, **made, query_shape=q.shape, is_causal="is_causal" in options)
            want = attention(q, k, v, **common, **options, **made)
            for got, expected in zip(attention(q, packed, **common, **options), want, strict=True):
                assert torch.equal(got, expected), (head_dim, options)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scaling", MODES)
def test_the_bytes_are_those_of_the_cpu(scaling: str, source: str) -> None:
    for head_dim in (64, 72, 128):
        _, k, v = operands(head_dim, dtype=SOURCES[source])
        for transforms in TRANSFORMS:
            needs(k, k, v, scaling=scaling, **transforms)
            packed = pack_kv(k, v, scaling=scaling, **transforms)
            host = pack_kv(k.cpu(), v.cpu(), scaling=scaling, kernel=packed.kernel, **transforms)
            for name in ("k", "v", "k_descale", "v_descale", "k_mean"):
                got, want = getattr(packed, name), getattr(host, name)
                assert (got is None) == (want is None) and (got is None or torch.equal(got.cpu(), want)), name


def test_queries_of_every_size() -> None:
    """Few and many tiles, masks and none: the kernel that is chosen reads what was packed for another load, and
    gives the bits that it gives on key and value."""
    for head_dim in (64, 128):
        _, k, v = operands(head_dim)
        for query_shape in ((2, 2, 1, head_dim), (2, 64, 3000, head_dim)):
            packed = pack_kv(k, v, query_shape=query_shape)
            for heads, rows, causal in ((2, 1, False), (6, 300, True), (64, 3000, False), (64, 3000, True)):
                q = torch.randn(2, heads, rows, head_dim, device="cuda").bfloat16()
                options = {"enable_gqa": True, "is_causal": causal}
                if not supports(q, packed, **options)[0]:  # a small profile may lack the kernel
                    continue
                variant = chosen(q, packed, **options)
                assert variant.key_block == packed.key_block
                if score_amax(variant) != packed.amax:
                    continue
                want = attention(q, k, v, kernel=variant.id, **options)
                assert torch.equal(attention(q, packed, **options), want)


@pytest.mark.edge(42)
@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
def test_graphs(transforms: dict[str, bool]) -> None:
    """Attention alone on what was packed outside, and packing in the graph: replays with new queries and new keys."""
    q, k, v = operands()
    packed = pack_kv(k, v, query_shape=q.shape, **transforms)
    common = {"enable_gqa": True, "return_lse": True}
    attention(q, packed, **common)  # loads the library and the kernels
    outside, inside = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(outside):
        from_outside = attention(q, packed, **common)
    with torch.cuda.graph(inside):
        from_inside = attention(q, pack_kv(k, v, query_shape=q.shape, **transforms), **common)
    old = k.clone(), v.clone()
    for seed in range(5):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        outside.replay()
        inside.replay()
        for got, want in zip(from_outside, attention(q, *old, **common, **transforms), strict=True):
            assert torch.equal(got, want)
        for got, want in zip(from_inside, attention(q, k, v, **common, **transforms), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_result_goes_into_a_part_of_a_larger_tensor(head_dim: int, layout: str) -> None:
    """Some heads and rows of it, by the second call in place; nothing beside them is written."""
    q, k, v = operands(head_dim)
    packed = pack_kv(k, v, query_shape=q.shape)
    given = {"is_causal": True, "enable_gqa": True, "return_lse": True, "layout": layout}
    q = q.transpose(1, 2).contiguous() if layout == "bshd" else q
    want, lse = attention(q, packed, **given)
    room = torch.empty(2, 340, 9, head_dim) if layout == "bshd" else torch.empty(2, 9, 340, head_dim)
    room = room.bfloat16().cuda()
    out = room[:, 17:317, 2:8] if layout == "bshd" else room[:, 2:8, 17:317]
    for _ in range(3):
        room.fill_(7.0)
        result, sums = attention(q, packed, **given, out=out)
        assert result is out and torch.equal(out, want) and torch.equal(sums, lse)
        out.fill_(7.0)
        assert bool((room == 7.0).all())


def test_packing_right_before_it() -> None:
    """The attention kernel may start before the kernel in front of it ends: a hundred times the same bits, with other
    keys packed in between and memory that is used again."""
    q, k, v = operands()
    want = attention(q, k, v, enable_gqa=True)
    for _ in range(100):
        noise = torch.randn_like(k)
        attention(q, pack_kv(noise, noise, query_shape=q.shape), enable_gqa=True)
        assert torch.equal(attention(q, pack_kv(k, v, query_shape=q.shape), enable_gqa=True), want)


@pytest.mark.edge(37)
def test_other_devices_are_refused() -> None:
    q, k, v = operands()
    with pytest.raises(UnsupportedError, match="key is on cuda:0, query is on cpu"):
        attention(q.cpu(), pack_kv(k, v), enable_gqa=True)
    with pytest.raises(UnsupportedError, match="key is on cpu, query is on cuda:0"):
        attention(q, pack_kv(k.cpu(), v.cpu()), enable_gqa=True)


def test_compile() -> None:
    """Queries of several lengths in one graph, by inductor: the bits of eager mode."""
    torch._dynamo.reset()
    step = lambda q, packed: attention(q, packed, enable_gqa=True, return_lse=True)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True)
    for rows in (300, 17, 1000):
        q, k, v = operands(seqlen_q=rows)
        packed = pack_kv(k, v, smooth_k=True)
        for got, want in zip(compiled(q, packed), step(q, packed), strict=True):
            assert torch.equal(got, want)
