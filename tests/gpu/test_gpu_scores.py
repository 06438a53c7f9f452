"""Caps and sinks on a card: every built kernel with sinks, and every one that caps scores, against the emulator.

Regressions these catch: a cap that is left out, taken after the mask or with another tile's descale; a sink that is
added by no CTA, by each CTA of a cluster, for each tile or to a row that sees nothing; that of another head, where two
heads share a tile; an LSE without it; sinks that are forgotten by a call that is known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import built_manifest, built_variants, is_emulated
from kernel_gates import emulator_limit, lse_limit

from fp8cutlass import attention, attention_varlen, pack_kv
from fp8cutlass.call.call import Call, Tensors
from fp8cutlass.call.launch import kernel_operands, quantised
from fp8cutlass.call.ragged import emulate_sequence
from fp8cutlass.call.ragged_call import RaggedCall
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.native import extension
from fp8cutlass.quant.sinks import join_lse

pytestmark = pytest.mark.gpu

FAR = 1 << 30
CAP = 3.0
HEADS = 4
SINKS = torch.tensor([-3.0, 0.5, 4.0, 40.0])
SIZES = ((300, 300), (70, 1500), (700, 200), (1, 400))
WINDOWS = {"full": [(-1, -1)], "causal": [(-1, 0)], "window": [(64, 0), (200, 37), (-1, 0), (-1, -1)]}
# To the emulator's limit a cap adds the card's tanh: 2^-11 of a logit of 3 at most, of P and of the rows alike.
TANH = 3 * 2.0**-11


def operands(v: Variant, rows: int, keys: int) -> list[torch.Tensor]:
    """Logits of standard deviation 3, so that the cap matters everywhere."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    q = 3 * torch.randn(2, HEADS, rows, v.head_dim, generator=generator)
    k, x = (torch.randn(2, 2, keys, v.head_dim, generator=generator) for _ in range(2))
    return [t.to(dtype) for t in (q, k, x)]


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-6))


def largest(q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest logit."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    return float((q.float() @ keys.transpose(2, 3)).abs().max()) * q.shape[3] ** -0.5


def limit(v: Variant, softcap: float) -> float:
    return emulator_limit(v) + (TANH if softcap else 0.0)


def check(v: Variant, rows: int, keys: int, ends: tuple[int, int], softcap: float, sinks: torch.Tensor | None) -> None:
    """One kernel, straight, against its emulation."""
    tensors = operands(v, rows, keys)
    call, granularity = Call("half", tensors[0].dtype, v.head_dim**-0.5), built_manifest().scaling[v.scaling]
    made = kernel_operands(call, v, granularity, Tensors(*(x.cuda() for x in tensors)))
    one = quantised(call, v, granularity, Tensors(*tensors))
    last, first = keys - rows + (FAR if ends[1] < 0 else ends[1]), keys - rows - (FAR if ends[0] < 0 else ends[0])
    out = torch.full_like(tensors[0], torch.nan).cuda()
    lse = torch.full((2, HEADS, rows), torch.nan).cuda()
    on_card = None if sinks is None else sinks.cuda()
    extension.load()
    extension.compiled().forward(
        built_manifest().index[v.id], made.q, made.k, made.v, made.q_descale, made.k_descale, made.v_descale, None, out,
        lse, None, v.head_dim**-0.5, last, first, False, softcap, on_card,
    )  # fmt: skip
    if on_card is not None:
        join_lse(lse, on_card)
    wanted = emulate(
        one.q, one.k, one.v, one.q_descale, one.k_descale, one.v_descale, variant=v, scale=v.head_dim**-0.5,
        scaling=v.scaling, causal_offset=last, window_offset=first if v.mask == "window" else None, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip
    assert not out.isnan().any() and far(out, wanted.out) <= limit(v, softcap), (rows, keys, ends, sinks)
    assert torch.equal(lse.cpu().isneginf(), wanted.lse.isneginf())
    seen = ~wanted.lse.isneginf()
    most = 0.02 if softcap else lse_limit(v, largest(*tensors[:2]), emulated=is_emulated(v))
    assert float((lse.cpu() - wanted.lse)[seen].abs().max()) < most
    assert not out.cpu()[~seen].any()


CAPPED = [v for v in built_variants("capped") if v.walk == "dense"]


@pytest.mark.parametrize("v", CAPPED, ids=lambda v: v.id)
def test_every_capped_kernel_is_its_emulation(v: Variant) -> None:
    for rows, keys in SIZES:
        for ends in WINDOWS[v.mask]:
            for sinks in (None, SINKS):
                check(v, rows, keys, ends, CAP, sinks)


PLAIN = [v for v in (*built_variants("fwd"), *built_variants("window")) if v.out != "e4m3" and v.dtype == "e4m3"]


@pytest.mark.parametrize("v", PLAIN, ids=lambda v: v.id)
def test_every_kernel_with_sinks_is_its_emulation(v: Variant) -> None:
    """Clusters, too, where each CTA has a part of the keys."""
    for rows, keys in SIZES[1:3]:
        check(v, rows, keys, WINDOWS[v.mask][0], 0.0, SINKS)


RAGGED = [*built_variants("ragged"), *(v for v in built_variants("capped") if v.walk == "ragged")]
ROWS, KEYS = [100, 0, 517, 1, 256, 64, 3], [100, 33, 700, 900, 0, 64, 130]


@pytest.mark.parametrize("v", RAGGED, ids=lambda v: v.id)
def test_every_ragged_kernel_is_its_emulation(v: Variant) -> None:
    softcap = CAP if v.kind == "capped" else 0.0
    generator = torch.Generator().manual_seed(4)
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    q = (3 * torch.randn(sum(ROWS), HEADS, v.head_dim, generator=generator)).to(dtype)
    k, x = (torch.randn(sum(KEYS), 2, v.head_dim, generator=generator).to(dtype) for _ in range(2))
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (ROWS, KEYS)]
    precision = "fast" if v.score == "f16" else "accurate"
    for window in WINDOWS["window"] if softcap else WINDOWS[v.mask][:1]:
        out, lse = attention_varlen(
            *(t.cuda() for t in (q, k, x, *ends)), 517, 900, window_size=window, precision=precision, return_lse=True,
            kernel=v.id, softcap=softcap, sinks=SINKS.cuda(),
        )  # fmt: skip
        call = RaggedCall(
            q, k, x, *ends, None, None, 0, 0, (), v.head_dim**-0.5, *window, True, dtype, precision, True, "", softcap,
            SINKS,
        )  # fmt: skip
        wanted, log_sum = torch.zeros_like(q), torch.full((HEADS, len(q)), -torch.inf)
        for s in range(len(ROWS)):
            at, of = slice(*ends[0][s : s + 2].tolist()), slice(*ends[1][s : s + 2].tolist())
            if at.start < at.stop and of.start < of.stop:
                parts = [t.transpose(0, 1)[None] for t in (q[at], k[of], x[of])]
                one, sums = emulate_sequence(call, *parts, (), v)
                wanted[at], log_sum[:, at] = one[0].transpose(0, 1), sums[0]
        assert not out.isnan().any() and far(out, wanted) <= limit(v, softcap), window
        assert torch.equal(lse.cpu().isneginf(), log_sum.isneginf())
        seen = ~log_sum.isneginf()
        most = 0.02 if softcap else lse_limit(v, 15.0, emulated=is_emulated(v))  # five standard deviations of a logit
        assert float((lse.cpu() - log_sum)[seen].abs().max()) < most


CALLS: list[dict[str, Any]] = [
    {"sinks": SINKS},
    {"sinks": SINKS.bfloat16(), "return_lse": True},
    {"softcap": CAP},
    {"softcap": CAP, "sinks": SINKS, "is_causal": True, "return_lse": True},
    {"softcap": CAP, "sinks": SINKS, "window_size": (40, 0), "causal_alignment": "bottom_right"},
    {"sinks": SINKS, "hadamard": True},
]


@pytest.mark.parametrize("options", CALLS, ids=[str(list(c)) for c in CALLS])
def test_known_calls_give_the_bits_of_the_first(options: dict[str, Any]) -> None:
    """And other sinks of the same shape count: they are no part of what is kept."""
    v = next(v for v in built_variants("fwd") if v.head_dim == 64)
    q, k, x = (t.cuda().bfloat16() for t in operands(v, 300, 400))
    how = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in options.items()} | {"enable_gqa": True}

    def results(**more: Any) -> tuple[torch.Tensor, ...]:
        found = attention(q, k, x, **how | more)
        return found if isinstance(found, tuple) else (found,)

    first = results()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))
    cpu = attention(*(t.cpu() for t in (q, k, x)), **{n: t.cpu() if isinstance(t, torch.Tensor) else t
                                                      for n, t in how.items()})  # fmt: skip
    assert far(first[0], cpu[0] if isinstance(cpu, tuple) else cpu) < 0.08  # another kernel: P of other roundings
    if "sinks" in how:
        other = results(sinks=how["sinks"] - 3)
        assert not torch.equal(other[0], first[0])
        assert torch.equal(results()[0], first[0])


def test_packed_keys_and_graphs() -> None:
    """Sinks and scores are read when a graph runs, not when it is captured."""
    v = next(v for v in built_variants("fwd") if v.head_dim == 64)
    q, k, x = (t.cuda().bfloat16() for t in operands(v, 300, 400))
    sinks = SINKS.cuda()
    packed = pack_kv(k, x, precision="accurate")
    for keys in ((k, x), (packed, None)):
        how: dict[str, Any] = {"enable_gqa": True, "precision": "accurate", "softcap": CAP, "sinks": sinks}
        want = attention(q, *keys, **how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, *keys, **how)
        graph.replay()
        assert torch.equal(out, want)
        sinks.copy_(SINKS - 2)
        graph.replay()
        assert torch.equal(out, attention(q, *keys, **how)) and not torch.equal(out, want)
        sinks.copy_(SINKS)
