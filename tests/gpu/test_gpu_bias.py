"""Biases on a card: every built kernel that adds one against the emulator, and whole calls.

Regressions these catch: a bias of another row, key, head or batch; one that is scaled, or added in octaves; strides of
0; values that two keys share a word of, where they are not aligned; rows or keys that are read beyond the end; a band
that is forgotten; NaN that reaches another row; a bias that a graph or a known call keeps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from biases import cast, layouts, normal
from gpu import built_manifest, built_variants, is_emulated
from kernel_gates import emulator_limit, lse_limit

from fp8cutlass import attention, explain, pack_kv, supports
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import kernel_operands, quantised
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.native import extension

pytestmark = pytest.mark.gpu

FAR = 1 << 30
HEADS = 4
SIZES = ((300, 300), (70, 1501), (700, 200), (1, 400), (129, 127))
BANDS = ((-1, -1), (-1, 0), (64, 37))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIASED = built_variants("biased")
DEVIATION = 3.0
LAYOUTS = layouts(HEADS, DEVIATION)


def operands(v: Variant, rows: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    q = torch.randn(2, HEADS, rows, v.head_dim, generator=generator)
    k, x = (torch.randn(2, 2, keys, v.head_dim, generator=generator) for _ in range(2))
    return [t.to(dtype) for t in (q, k, x)]


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-6))


def check(v: Variant, rows: int, keys: int, ends: tuple[int, int], bias: torch.Tensor, layout: str) -> None:
    """One kernel, straight, against its emulation."""
    tensors = operands(v, rows, keys)
    call, granularity = Call("half", tensors[0].dtype, v.head_dim**-0.5), built_manifest().scaling[v.scaling]
    made = kernel_operands(call, v, granularity, Tensors(*(x.cuda() for x in tensors)))
    one = quantised(call, v, granularity, Tensors(*tensors))
    last, first = keys - rows + (FAR if ends[1] < 0 else ends[1]), keys - rows - (FAR if ends[0] < 0 else ends[0])
    out = torch.full_like(tensors[0], torch.nan).cuda()
    lse = torch.full((2, HEADS, rows), torch.nan).cuda()
    extension.load()
    extension.compiled().forward(
        built_manifest().index[v.id], made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale, None, out,
        lse, None, v.head_dim**-0.5, last, first, bias=moved(bias),
    )  # fmt: skip
    wanted = emulate(
        one.q, one.k, one.v, one.q_descale, one.k_descale, one.v_descale, variant=v, scale=v.head_dim**-0.5,
        scaling=v.scaling, causal_offset=last, window_offset=first, bias=bias,
    )  # fmt: skip
    where = (rows, keys, ends, layout, bias.dtype)
    assert not out.isnan().any() and far(out, wanted.out) <= emulator_limit(v), where
    assert torch.equal(lse.cpu().isneginf(), wanted.lse.isneginf()), where
    seen = ~wanted.lse.isneginf()
    most = lse_limit(v, 20.0, emulated=is_emulated(v))  # logits of standard deviation 1, and biases of 3
    assert float((lse.cpu() - wanted.lse)[seen].abs().max()) < most, where
    assert not out.cpu()[~seen].any(), where


def moved(bias: torch.Tensor) -> torch.Tensor:
    """On the card, with the same strides and the same place in its storage."""
    storage = torch.tensor([], dtype=bias.dtype).set_(bias.untyped_storage()).cuda()
    return storage.as_strided(bias.shape, bias.stride(), bias.storage_offset())


@pytest.mark.parametrize("v", BIASED, ids=lambda v: v.id)
def test_every_kernel_is_its_emulation(v: Variant) -> None:
    for rows, keys in SIZES:
        for ends in BANDS:
            for dtype in DTYPES:
                check(v, rows, keys, ends, normal(DEVIATION, 2, HEADS, rows, keys).to(dtype), "full")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v", BIASED, ids=lambda v: v.id)
def test_every_kernel_on_every_layout(v: Variant, layout: str) -> None:
    for rows, keys in (*SIZES[:2], (130, 400)):
        for dtype in DTYPES:
            check(v, rows, keys, (-1, -1), cast(LAYOUTS[layout](rows, keys), dtype), layout)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_reaches_its_row_alone(value: float) -> None:
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 2, 300, 300, device="cuda")
    want = attention(q, k, v, bias)
    bias[0, 1, 77, 130] = value
    got = attention(q, k, v, bias)
    assert got[0, 1, 77].isnan().all()
    got[0, 1, 77] = want[0, 1, 77]
    assert torch.equal(got, want)


def test_nothing_beyond_the_end_is_read() -> None:
    """NaN lies behind the last key of each row, and behind the last row."""
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (70, 301, 301))
    for dtype in DTYPES:
        room = torch.full((1, 2, 71, 304), torch.nan, device="cuda", dtype=dtype)
        room[:, :, :70, :301] = torch.randn(1, 2, 70, 301, device="cuda")
        bias = room[:, :, :70, :301]
        assert torch.equal(attention(q, k, v, bias), attention(q, k, v, bias.contiguous()))


CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "return_lse": True},
    {"window_size": (40, 9), "causal_alignment": "bottom_right"},
    {"precision": "accurate"},
    {"precision": "high"},
    {"sinks": torch.tensor([-3.0, 0.5, 4.0, 40.0]), "return_lse": True},
    {"smooth_k": True, "hadamard": True},
    {"scaling": "head"},
]


@pytest.mark.parametrize("options", CALLS, ids=[str(list(c)) for c in CALLS])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
def test_calls_are_close_to_those_of_the_cpu(head_dim: int, options: dict[str, Any]) -> None:
    """Known calls give the bits of the first, and read the bias that they are given."""
    q, k, x = (torch.randn(2, h, n, head_dim, dtype=torch.bfloat16) for h, n in ((4, 300), (2, 400), (2, 400)))
    bias = normal(DEVIATION, 2, 4, 300, 400).bfloat16()

    def results(bias: torch.Tensor, device: str) -> list[torch.Tensor]:
        how = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        found = attention(*(t.to(device) for t in (q, k, x, bias)), enable_gqa=True, **how)
        return list(found) if isinstance(found, tuple) else [found]

    first = results(bias, "cuda")
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(results(bias, "cuda"), first, strict=True))
    assert far(first[0], results(bias, "cpu")[0]) < 0.06  # another kernel: tiles of other sizes
    other = results(bias.roll(1, 3), "cuda")
    assert not torch.equal(other[0], first[0]) and far(other[0], results(bias.roll(1, 3), "cpu")[0]) < 0.06


def test_packed_keys_fp8_operands_and_graphs() -> None:
    """A bias is read when a graph runs, not when it is captured."""
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 4, 300, 300, device="cuda", dtype=torch.bfloat16)
    want = attention(q, k, v, bias)
    assert torch.equal(attention(q, pack_kv(k, v, precision="accurate"), attn_mask=bias), want)
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    got = attention(*fp8, bias, q_descale=1.0, k_descale=1.0, v_descale=1.0, out_dtype=torch.bfloat16)
    assert far(got, want.cpu()) < 0.1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, bias)
    graph.replay()
    assert torch.equal(out, want)
    bias.mul_(-1)
    graph.replay()
    assert torch.equal(out, attention(q, k, v, bias)) and not torch.equal(out, want)


def test_compile_keeps_one_graph() -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(2, 200, 200, device="cuda")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, bias), attention(q, k, v, bias))


def test_what_has_no_kernel_is_told() -> None:
    q = torch.randn(1, 2, 100, 192, device="cuda", dtype=torch.bfloat16)
    served, why = supports(q, q, q, torch.zeros(100, 100, device="cuda"))
    assert not served and "an attn_mask that is added to scores" in why and "head_dim up to 128" in why
    served, why = supports(q[..., :64], q[..., :64], q[..., :64], torch.zeros(100, 100, device="cuda"), softcap=2.0)
    assert not served and "without softcap" in why


def test_explain_names_it() -> None:
    q = torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.bfloat16)
    text = explain(q, q, q, torch.zeros(100, 100, device="cuda"), is_causal=True)
    assert "_biased" in text and "the kernel for biases" in text and "added to the scaled scores" in text
