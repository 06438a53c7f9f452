"""Ragged batches and windows on a card: every built kernel against the emulator, which is its specification.

Regressions these catch: a row tile that the plan leaves out or lists twice; a sequence that reads its neighbour's keys,
values or descales; a window that hides a key too many or too few; what lies beyond a sequence's end that reaches a
result; lengths that are read when a graph is captured instead of when it runs; lengths that lie and reach outside.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu import built_manifest, built_variants
from kernel_gates import emulator_limit

from fp8cutlass import attention_varlen, quantize
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import kernel_operands, quantised, score_amax
from fp8cutlass.call.ragged import (
    RaggedCall,
    blocks_of,
    by_torch,
    emulate_sequence,
    fp8_by_torch,
    launch,
    launch_made,
)
from fp8cutlass.dtypes import OPERANDS
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.native import extension
from fp8cutlass.quant.quantize import V_AMAX

pytestmark = pytest.mark.gpu

FAR = 1 << 30
ROWS, KEYS = [100, 0, 517, 1, 256, 300, 64, 3], [100, 33, 700, 900, 0, 200, 64, 130]
WINDOWS = {"full": [(-1, -1)], "causal": [(-1, 0)], "window": [(64, 0), (200, 37), (0, 0), (-1, 90), (150, -1)]}


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def batch(v: Variant, rows: list[int] = ROWS, keys: list[int] = KEYS) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, v.head_dim, generator=generator).to(dtype)

    return draw(sum(rows), 4), draw(sum(keys), 2), draw(sum(keys), 2), ends(rows), ends(keys)


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-6))


def emulated(v: Variant, tensors: tuple[Any, ...], window: tuple[int, int], bottom_right: bool) -> tuple[Any, Any]:
    """Each sequence by the same kernel's emulation."""
    q, k, values, cu_q, cu_k = tensors
    nothing = (None, None, 0, 0, ())
    call = RaggedCall(
        *(q, k, values, cu_q, cu_k), *nothing, v.head_dim**-0.5, *window, bottom_right, q.dtype, "fast", True, ""
    )
    out, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf)
    for s in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[s : s + 2].tolist()), slice(*cu_k[s : s + 2].tolist())
        if rows.start < rows.stop and keys.start < keys.stop:
            parts = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], values[keys])]
            one, log_sum = emulate_sequence(replace(call), *parts, (), v)
            out[rows], lse[:, rows] = one[0].transpose(0, 1), log_sum[0]
    return out, lse


def on_card(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x.cuda() for x in tensors]


@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("v", built_variants("ragged"), ids=lambda v: v.id)
def test_every_ragged_kernel_is_its_emulation(v: Variant, bottom_right: bool) -> None:
    tensors = batch(v)
    precision = "fast" if v.score == "f16" else "accurate"
    alignment = "bottom_right" if bottom_right else "top_left"
    for window in WINDOWS[v.mask]:
        options: dict[str, Any] = {"window_size": window, "causal_alignment": alignment, "precision": precision}
        out, lse = attention_varlen(*on_card(tensors), 517, 900, **options, return_lse=True, kernel=v.id)
        # Without the LSE the softmax of a tile may be made of fewer keys.
        assert torch.equal(attention_varlen(*on_card(tensors), 517, 900, **options, kernel=v.id), out), window
        wanted, log_sum = emulated(v, tensors, window, bottom_right)
        out, lse = out.cpu(), lse.cpu()
        assert not out.isnan().any() and far(out, wanted) <= emulator_limit(v), window
        assert torch.equal(lse.isneginf(), log_sum.isneginf())
        seen = ~log_sum.isneginf()
        assert float((lse - log_sum)[seen].abs().max()) < 0.01
        assert (out[log_sum.transpose(0, 1).isneginf()] == 0).all()


@pytest.mark.parametrize("v", built_variants("window"), ids=lambda v: v.id)
def test_every_window_kernel_is_its_emulation(v: Variant) -> None:
    number = built_manifest().index[v.id]
    generator = torch.Generator().manual_seed(2)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    for rows, keys in ((1000, 1000), (300, 1500), (700, 200), (40, 3000)):
        q = torch.randn(2, 4, rows, v.head_dim, generator=generator).to(dtype)
        k, values = (torch.randn(2, 2, keys, v.head_dim, generator=generator).to(dtype) for _ in range(2))
        call = Call("half", dtype, v.head_dim**-0.5)
        granularity = OPERANDS[v.dtype].granularity(built_manifest().scaling["block"])
        made = kernel_operands(call, v, granularity, Tensors(q.cuda(), k.cuda(), values.cuda()))
        one = quantised(call, v, granularity, Tensors(q, k, values))
        for left, right in WINDOWS["window"]:
            last, first = keys - rows + (FAR if right < 0 else right), keys - rows - (FAR if left < 0 else left)
            lse = torch.full((2, 4, rows), torch.nan).cuda()
            out, alone = (torch.full_like(q, torch.nan).cuda() for _ in range(2))
            for into, sums in ((out, lse), (alone, None)):
                torch.ops.fp8cutlass_C.forward(
                    number, made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale, None, into, sums,
                    None, v.head_dim**-0.5, last, first,
                )  # fmt: skip
            # Without the LSE the softmax of a tile may be made of fewer keys.
            assert torch.equal(alone, out), (rows, keys, left, right)
            wanted = emulate(
                one.q, one.k, one.v, one.q_descale, one.k_descale, one.v_descale, variant=v, scale=v.head_dim**-0.5,
                causal_offset=last, window_offset=first,
            )  # fmt: skip
            assert not out.isnan().any() and far(out.cpu(), wanted.out) <= emulator_limit(v), (rows, keys, left, right)
            assert torch.equal(lse.cpu().isneginf(), wanted.lse.isneginf())


def pieces(v: Variant, call: RaggedCall, workspace: torch.Tensor) -> list[torch.Tensor]:
    """Of a workspace: Q (H, T, D), K (Hkv, columns, D), V (Hkv, D, columns) and their descales."""
    (tokens, heads, _), kv_heads = call.q.shape, call.k.shape[1]
    blocks = blocks_of(call.k.shape[0], call.cu_k.shape[0] - 1, v.key_block)
    columns, d = blocks * v.key_block, v.head_dim
    found, begin = [], 0
    for shape, words in (
        ((heads, tokens, d), 1), ((kv_heads, columns, d), 1), ((kv_heads, d, columns), 1),
        ((heads, tokens), 4), ((kv_heads, blocks), 4), ((kv_heads, blocks), 4),
    ):  # fmt: skip
        size = math.prod(shape) * words
        piece = workspace[begin : begin + size]
        found.append((piece.view(torch.float32) if words == 4 else piece).view(shape).cpu())
        begin += -(-size // 256) * 256
    return found


LAYOUTS = {
    "all": (ROWS, KEYS, None),
    "used": (ROWS, KEYS, [40, 33, 699, 0, 0, 256, 1, 129]),
    "many": ([1, 2] * 40, [1, 300, 0, 64] * 20, None),
    "one": ([777], [1300], [1299]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v", built_variants("ragged"), ids=lambda v: v.id)
def test_every_byte_is_that_of_torch(v: Variant, layout: str) -> None:
    """Blocks, tails, gaps and descales, from tensors with strides of their own; a narrower head_dim."""
    extension.load()
    rows, keys, used = LAYOUTS[layout]
    q, k, values, cu_q, cu_k = batch(v, rows, keys)
    head_dim = v.head_dim - (8 if layout == "many" else 0)
    given = [x[..., :head_dim] for x in (q, k, values)]
    apart = [
        torch.cat([x, x], 1).cuda()[:, x.shape[1] :, :head_dim] for x in (q, k, values)
    ]  # rows and heads with gaps
    used_k = None if used is None else torch.tensor(used, dtype=torch.int32)
    for scale in (0.125, -0.125):
        call = RaggedCall(
            *given, cu_q, cu_k, None, used_k, 0, 0, (), scale, -1, 0, True, q.dtype, "fast", False, ""
        )  # fmt: skip
        wanted = by_torch(call, v)
        workspace = torch.full((1 << 26,), 0x7F, dtype=torch.uint8).cuda()
        torch.ops.fp8cutlass_C.attend_ragged(
            built_manifest().index[v.id], *apart, cu_q.cuda(), cu_k.cuda(), None,
            None if used_k is None else used_k.cuda(), None, score_amax(v), V_AMAX, scale, FAR, 0, True, False,
            workspace,
        )  # fmt: skip
        made = pieces(v, call, workspace)
        names = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
        right = (wanted.q.transpose(0, 1), wanted.k.transpose(0, 1), wanted.v, *(d[0] for d in wanted.descales))
        for name, ours, theirs in zip(names, made, right, strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("v", built_variants("ragged"), ids=lambda v: v.id)
def test_who_quantises_q_changes_no_bit(v: Variant) -> None:
    """Nor does it change which rows belong to no sequence: those are 0 and -inf whatever was there."""
    q, k, values, cu_q, cu_k = batch(v)
    cu_q = cu_q.clone()
    cu_q[0], cu_q[-1] = 3, cu_q[-1] - 2
    used = torch.tensor([50, 0, 517, 1, 100, 299, 64, 0], dtype=torch.int32)
    window = WINDOWS[v.mask][0]
    call = RaggedCall(
        *on_card((q, k, values, cu_q, cu_k, used)), None, 0, 0, (), 0.125, *window, True, q.dtype, "fast", True, ""
    )
    number, results = built_manifest().index[v.id], []
    for leave_q in (True, False):
        lse = torch.full(q.shape[1::-1], torch.nan).cuda()
        results.append((launch(call, v, number, lse, leave_q), lse))
    (out, lse), (other, log_sum) = results
    assert torch.equal(out, other) and torch.equal(lse, log_sum)
    alive = torch.zeros(len(q), dtype=torch.bool)
    for s, n in enumerate(used.tolist()):
        alive[int(cu_q[s]) : min(int(cu_q[s]) + n, int(cu_q[s + 1]))] = True
    assert (out.cpu()[~alive] == 0).all() and lse.cpu()[:, ~alive].isneginf().all()
    assert not out.isnan().any() and not lse.isnan().any()
    at_home = replace(call, **{name: getattr(call, name).cpu() for name in ("q", "k", "v", "cu_k")})
    made = by_torch(at_home, v)
    made = replace(made, q=made.q.cuda(), k=made.k.cuda(), v=made.v.cuda(), descales=on_card(made.descales))
    assert torch.equal(launch_made(call, made, v, number, torch.full_like(lse, torch.nan)), out)


def one_kernel() -> Variant:
    found = built_variants("ragged", mask="causal", head_dim=64, out="bf16", softmax="linear")
    if not found:
        pytest.skip("no ragged kernel of head_dim 64 is built")
    return found[0]


def test_what_lies_beyond_a_sequence_never_reaches_it() -> None:
    v = one_kernel()
    tensors = on_card(batch(v))
    used = torch.tensor([n // 2 for n in KEYS], dtype=torch.int32)
    for x in tensors[1:3]:
        for s, n in enumerate(KEYS):
            x[int(ends(KEYS)[s]) + n // 2 : int(ends(KEYS)[s]) + n] = torch.nan
    out = attention_varlen(*tensors, 517, 900, seqused_k=used.cuda(), causal=True)
    clean = [x.cpu() for x in tensors[:3]]
    keep = torch.cat([torch.arange(int(ends(KEYS)[s]), int(ends(KEYS)[s]) + n // 2) for s, n in enumerate(KEYS)])
    parts = (clean[0], clean[1][keep], clean[2][keep], ends(ROWS), ends(used.tolist()))
    wanted, _ = emulated(v, parts, (-1, 0), True)
    assert not out.isnan().any() and far(out.cpu(), wanted) <= emulator_limit(v)


def test_runs_repeat_to_the_bit() -> None:
    v = one_kernel()
    tensors = on_card(batch(v))
    first = attention_varlen(*tensors, 517, 900, causal=True)
    for _ in range(200):
        assert torch.equal(attention_varlen(*tensors, 517, 900, causal=True), first)


def test_a_graph_reads_the_lengths_when_it_runs() -> None:
    v = one_kernel()
    q, k, values, cu_q, cu_k = on_card(batch(v))
    lengths = cu_q.clone(), cu_k.clone()
    attention_varlen(q, k, values, *lengths, 517, 900, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_varlen(q, k, values, *lengths, 517, 900, causal=True)
    for shift in (0, 37, 64, 5):
        lengths[0].copy_((cu_q - shift).clamp(min=0)), lengths[1].copy_((cu_k + shift).clamp(max=sum(KEYS)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, attention_varlen(q, k, values, *lengths, 517, 900, causal=True))


@pytest.mark.parametrize("wrong", [[0, 90, 20, 60], [-5, 10, 700, 50], [50, 40, 30, 0], [0, 2**31 - 1, 5, 60]])
def test_lengths_that_lie_reach_nothing_outside(wrong: list[int]) -> None:
    """Run under memcheck, too: no fault here means only that the card noticed none."""
    v = one_kernel()
    q, k, values, _, _ = on_card(batch(v, [20, 20, 20], [20, 20, 20]))
    lies = torch.tensor(wrong, dtype=torch.int32).cuda()
    attention_varlen(q, k, values, lies, lies.flip(0), 20, 20, causal=True)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shared", ["tensor", "head"])
def test_fp8_operands(shared: str) -> None:
    found = built_variants("ragged", mask="causal", head_dim=64, out="bf16", softmax="exp2")
    if not found:
        pytest.skip("no ragged kernel for FP8 operands is built")
    tensors = batch(found[0])
    made = [quantize(x.transpose(0, 1)[None], granularity="tensor") for x in tensors[:3]]
    fp8 = [x[0].transpose(0, 1) for x, _ in made]
    heads = (4, 2, 2)
    given = [
        d if shared == "tensor" else d.expand(len(ROWS), h).contiguous() for (_, d), h in zip(made, heads, strict=True)
    ]
    names = ("q_descale", "k_descale", "v_descale")
    here = attention_varlen(*fp8, *tensors[3:], 517, 900, causal=True, **dict(zip(names, given, strict=True)))
    there = attention_varlen(
        *on_card((*fp8, *tensors[3:])), 517, 900, causal=True,
        **dict(zip(names, on_card(tuple(given)), strict=True)),
    )  # fmt: skip
    assert far(there.cpu(), here) <= 0.02  # the CPU's kernel has other tiles


@pytest.mark.parametrize("v", built_variants("ragged"), ids=lambda v: v.id)
def test_one_call_on_fp8_operands_is_that_of_torch_to_the_bit(v: Variant) -> None:
    """V of a sequence in another block, rows of no sequence that keep what was there, a sign, and a narrower head_dim;
    rows and heads with gaps. Elements of 448, which kernels with f16 scores get divided by powers of two."""
    q, k, values, cu_q, cu_k = batch(v)
    cu_q[0], cu_q[-1] = 3, cu_q[-1] - 2
    used = torch.tensor([50, 0, 517, 1, 100, 299, 64, 0], dtype=torch.int32)
    number, dtype = built_manifest().index[v.id], {"bf16": torch.bfloat16, "fp16": torch.float16}[v.out]
    for scale, head_dim in ((0.125, v.head_dim), (-0.125, v.head_dim), (0.125, v.head_dim - 16)):
        large = [(x * 2.0 ** (torch.arange(len(x)) % 9)[:, None, None]).clamp(-448, 448) for x in (q, k, values)]
        fp8 = [x.to(torch.float8_e4m3fn).view(torch.uint8).cuda() for x in large]
        apart = [torch.cat([x, x], 1)[:, x.shape[1] :, :head_dim].view(torch.float8_e4m3fn) for x in fp8]
        descales = tuple((torch.rand(8, heads) / 100).cuda() for heads in (4, 2, 2))
        call = RaggedCall(
            *apart, *on_card((cu_q, cu_k, used)), None, 0, 0, descales, scale, *WINDOWS[v.mask][0], True, dtype, "fast",
            True, "",
        )  # fmt: skip
        lse, other = (torch.full((4, len(q)), torch.nan).cuda() for _ in range(2))
        out = launch(call, v, number, lse)
        wanted = launch_made(call, fp8_by_torch(call, v), v, number, other)
        assert torch.equal(out, wanted) and torch.equal(lse, other)
        assert not out.isnan().any()
