"""Calls on FP8 operands and on packed keys, each by one operator: the bits of torch operations and ``forward``.

Regressions these catch: V that is packed in another order, columns or keys behind the last that are not zeros, a
descale of another head, a sign that is lost, an attention kernel that starts before its operands are written, a graph
that holds on to the operands of its capture.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from gpu import built_packs, call_of, fp8_variants, needs, out_descale_for
from reference import operands_of, randn

from fp8cutlass import attention, pack_kv, quantize
from fp8cutlass.call import memo
from fp8cutlass.call.call import Outputs, Tensors
from fp8cutlass.call.card import known, run_on_card
from fp8cutlass.call.launch import fp8_operands, run_operands
from fp8cutlass.call.plan import Plan, score_amax
from fp8cutlass.manifest import Variant
from fp8cutlass.native.fused import Operands, quantise_and_pack

pytestmark = pytest.mark.gpu

VARIANTS = list({(v.family, v.head_dim, v.key_block, v.scaling, v.dtype): v for v in fp8_variants()}.values())
SHAPES = (2, 6, 2, 257, 391), (1, 2, 1, 5, 1), (3, 2, 2, 70, 128)  # batch, heads, kv_heads, rows, keys


def by_torch(plan: Plan, t: Tensors) -> Outputs:
    """V packed, operands padded, descales padded by torch; then the kernel."""
    return run_operands(plan, t, fp8_operands(plan.call, plan.variant, t))


def equal(got: Outputs, want: Outputs) -> bool:
    pairs = [(x, y) for x, y in zip(got, want, strict=True) if x is not None]
    return all(
        x.stride() == y.stride() and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in pairs
    )


def fp8_call(variant: Variant, shape: tuple[int, ...], width: int, scaling: str, scale: float) -> tuple[Plan, Tensors]:
    batch, heads, kv_heads, rows, keys = shape
    q = randn(batch, heads, rows, width, seed=1, device="cuda")
    k, v = (randn(batch, kv_heads, keys, width, seed=seed, device="cuda") for seed in (2, 3))
    operands = operands_of(variant, q, k, v, scaling)
    options = {"scale": scale, "scaling": scaling, "causal_offset": keys - rows if variant.causal else 0}
    return call_of(operands, variant, out_descale=out_descale_for(variant), **options)


def test_each_head_dim_has_its_kernel() -> None:
    assert {p["head_dim"] for p in built_packs(fp8=True)} == {v.head_dim for v in fp8_variants()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.id)
def test_the_bits_of_torch_operations(variant: Variant) -> None:
    """Head dims with and without padding, either sign of the scale, every mode that the kernel serves, tails."""
    widths = (variant.head_dim, variant.head_dim - 16, variant.head_dim - 8)
    for width, shape, scaling, scale in product(widths, SHAPES, variant.scalings, (0.125, -0.125)):
        plan, t = fp8_call(variant, shape, width, scaling, scale)
        assert equal(run_on_card(plan, t), by_torch(plan, t)), (width, shape, scaling, scale)


LOWERED = list({
    (v.family, v.head_dim, v.key_block): v
    for v in fp8_variants()
    if v.score == "f16" and v.scaling == "block" and v.out == "bf16" and not v.causal
}.values())  # fmt: skip


@pytest.mark.parametrize("variant", LOWERED, ids=lambda v: v.id)
def test_lowered_operands(variant: Variant) -> None:
    """Elements of 448, in rows and blocks whose largest ones differ, for kernels with f16 scores: by the bits, and near
    the softmax of what the operands stand for. A row with a NaN is NaN, and no other."""
    names, head_dim = ("q_descale", "k_descale", "v_descale"), variant.head_dim
    for width, (batch, heads, kv_heads, rows, keys), scaling, scale in product(
        (head_dim, head_dim - 16, head_dim - 8), SHAPES, ("tensor", "head", "block"), (0.125, -0.125)
    ):
        sizes = ((heads, rows, 1), (kv_heads, keys, 2), (kv_heads, keys, 3))
        real = [randn(batch, h, n, width, seed=seed, device="cuda") for h, n, seed in sizes]
        real[1] *= 2.0 ** -(torch.arange(keys, device="cuda") // 100)[:, None]
        given = [quantize(x, granularity="tensor" if scaling == "tensor" else "head") for x in real]
        q, k, v = (x for x, _ in given)
        q[0, 0, 0, 0] = torch.nan
        options: dict[str, Any] = dict(zip(names, (d for _, d in given), strict=True))
        options |= {"scaling": scaling, "scale": scale, "enable_gqa": True, "kernel": variant.id, "return_lse": True}
        plan, t = memo_plan(q, k, v, **options)
        assert plan.call.lowered and plan.variant.id == variant.id
        got = run_on_card(plan, t)
        assert equal(got, by_torch(plan, t)), (width, keys, scaling, scale)
        assert got.out[0, 0, 0].isnan().all() and got.out.isnan().sum() == width
        wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in real]
        want = torch.softmax(scale * wide[0] @ wide[1].transpose(2, 3), 3) @ wide[2]
        got.out[0, 0, 0] = want[0, 0, 0].to(got.out.dtype)
        assert float((got.out.double() - want).norm() / want.norm()) < 0.1


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.id)
def test_operands_as_they_lie(variant: Variant) -> None:
    """The memory order (B, S, H, D), rows of a wider tensor, one head for all, rows that are all the same."""
    plan, t = fp8_call(variant, SHAPES[0], variant.head_dim, variant.scaling, 0.125)

    def changed(how: Any) -> Tensors:
        return t._replace(**{n: how(getattr(t, n).view(torch.uint8)).view(getattr(t, n).dtype) for n in "qkv"})

    ways = {
        "seq major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "inside": lambda x: torch.cat([x, x ^ 1], 3)[..., : x.shape[3]],
        "not on 16 bytes": lambda x: torch.nn.functional.pad(x, (8, 0))[..., 8:],
        "columns apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        "one head": lambda x: x[:, :1].expand_as(x),
        "one row": lambda x: x[:, :, :1].expand_as(x),
    }
    for name, how in ways.items():
        other = changed(how)
        assert equal(run_on_card(plan, other), by_torch(plan, other)), name


@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_descales_of_every_form(scaling: str) -> None:
    """Through ``attention``: the second call, which leaves them to the operator, gives the bits of the first with
    canonical ones, and of what was not made by the operator."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, n, 64, generator=generator).cuda() for h, n in ((6, 70), (2, 391), (2, 391)))
    q8, k8, v8 = (quantize(x.bfloat16(), granularity="tensor", amax=14)[0] for x in (q, k, v))
    needs(q.bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True, scaling=scaling, precision="accurate")
    canonical = {
        "tensor": ((1,),) * 3,
        "head": ((2, 6), (2, 2), (2, 2)),
        "block": ((2, 6, 70), (2, 2, 4), (2, 2, 4)),
        "token": ((2, 6, 70), (2, 2, 391), (2, 2, 64)),
    }[scaling]
    names = ("q_descale", "k_descale", "v_descale")
    forms: list[dict[str, Any]] = [dict.fromkeys(names, 0.03), dict.fromkeys(names, torch.tensor(0.03).cuda())]
    finest = {
        n: torch.rand(shape, generator=generator).cuda() + 0.01 for n, shape in zip(names, canonical, strict=True)
    }
    forms += [finest, {n: torch.stack([x, 2 * x], -1)[..., 1] for n, x in finest.items()}]
    if scaling != "tensor":
        heads = {n: torch.rand(h, generator=generator).cuda() for n, h in zip(names, (6, 2, 2), strict=True)}
        forms += [heads, {n: torch.stack([x, 2 * x]) for n, x in heads.items()}]
        forms += [{n: torch.stack([x, 2 * x], 1).t() for n, x in heads.items()}, finest | {"q_descale": 0.03}]
    for given in forms:
        spread = {}
        for (name, x), shape in zip(given.items(), canonical, strict=True):
            x = torch.as_tensor(x, dtype=torch.float32).cuda()
            x = x[:, :, None] if x.dim() == 2 and len(shape) == 3 else x[:, None] if (
                x.dim() == 1 and len(shape) == 3 and x.numel() > 1
            ) else x  # fmt: skip
            spread[name] = x.expand(shape).contiguous()
        memo.forget()
        # Only with descales of heads operands are lowered, which "fast" does.
        precision = "accurate" if scaling == "block" else "fast"
        options = {"enable_gqa": True, "scaling": scaling, "return_lse": True, "precision": precision}
        want = attention(q8, k8, v8, **spread, **options)
        for _ in range(2):
            got = attention(q8, k8, v8, **given, **options)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), given
    memo.forget()


def test_wrong_descales_are_refused_before_a_launch() -> None:
    """The operator itself, whatever Python lets through."""
    variant = next(v for v in VARIANTS if v.scaling == "block")
    plan, t = fp8_call(variant, SHAPES[0], variant.head_dim, "head", 0.125)
    assert t.v_descale is not None
    for wrong, words in (
        (t.v_descale.double(), "v_descale must be float32"),
        (t.v_descale.cpu(), "v_descale is not on the device of q"),
        (t.v_descale[:, :, None].expand(2, 2, 4), "v_descale has shape"),
        (t.v_descale[:1], "v_descale has shape"),
        (t.v_descale.new_ones(6), "v_descale has shape"),
        (None, "v_descale is missing"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run_on_card(plan, t._replace(v_descale=wrong))


@pytest.mark.parametrize("width", [64, 56])
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_packed_keys_give_the_bits_of_two_kernels(scaling: str, width: int) -> None:
    """Q by the kernel that packs, then ``forward``, as before there was an operator for both."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, h, n, width, generator=generator).bfloat16().cuda() for h, n in ((6, 70), (2, 391), (2, 391))
    )
    for made in ({}, {"hadamard": True}, {"smooth_k": True}):
        needs(q, k, v, enable_gqa=True, scaling=scaling, **made)
        for scale in (0.1, -0.1):
            held = pack_kv(k, v, scaling=scaling, query_shape=q.shape, **made)
            memo.forget()
            options = {"enable_gqa": True, "return_amax": True, "scale": scale}
            first, second = (attention(q, held, **options) for _ in range(2))
            plan, t = memo_plan(q, held, **options)
            packed = quantise_and_pack(
                q, None, None, head_dim=plan.variant.head_dim, key_block=plan.variant.key_block,
                amax=score_amax(plan.variant), granularity=plan.granularity, negate_q=scale < 0,
                hadamard=bool(made.get("hadamard")),
            )  # fmt: skip
            want = run_operands(plan, t, Operands(packed.q, t.k, t.v, packed.q_descale, t.k_descale, t.v_descale))
            for got in (first, second):
                assert torch.equal(got[0], want.out) and torch.equal(got[1], want.amax)


def memo_plan(*args: Any, **options: Any) -> tuple[Plan, Tensors]:
    """The plan and the tensors of a call of ``attention``."""
    from fp8cutlass.call.plan import resolve
    from fp8cutlass.call.request import request_of
    from fp8cutlass.call.settle import settle

    call, tensors = settle(request_of(*args, **options))
    return resolve(call, tensors.q, tensors.k), tensors


def test_a_hundred_times_the_same_bits() -> None:
    """The attention kernel may start before the kernel in front of it ends, and memory is used again."""
    variant = next(v for v in VARIANTS if v.scaling == "block" and v.dtype == "e4m3")
    plan, t = fp8_call(variant, (2, 6, 2, 700, 900), variant.head_dim - 16, "block", -0.125)
    other = t._replace(v=t.v.view(torch.uint8).flip(2).view(t.v.dtype), q_descale=t.q_descale * 2)  # type: ignore[operator]
    want, wanted = by_torch(plan, t), by_torch(plan, other)
    for _ in range(100):
        assert equal(run_on_card(plan, t), want)
        assert equal(run_on_card(plan, other), wanted)


def test_in_a_graph() -> None:
    """A capture of a known call replays with new operands and new descales.

    Operands are 7.5 at most, so that scores fit f16, which kernels of codes keep them in (docs/design/numerics.md).
    """
    variant = next(v for v in fp8_variants() if (v.scaling, v.dtype, v.out) == ("block", "e4m3", "bf16"))
    plan, t = fp8_call(variant, SHAPES[0], variant.head_dim - 16, "block", 0.125)
    descales = (t.q_descale, t.k_descale, t.v_descale)
    run = known(replace(plan, call=replace(plan.call, return_lse=False, return_amax=False)), t, descales)
    assert run is not None
    run(t.q, t.k, t.v, *descales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(t.q, t.k, t.v, *descales).out
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (t.q, t.k, t.v):
            x.view(torch.uint8).copy_(torch.randint(0, 0x50, x.shape, dtype=torch.uint8))
        for x in descales:
            assert x is not None
            x.copy_(torch.rand_like(x) + 0.1)
        graph.replay()
        assert out.isfinite().all()
        assert torch.equal(out, by_torch(plan, t).out)
