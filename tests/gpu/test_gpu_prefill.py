"""Long chunks of queries over a paged cache on a card, beside steps of decode in one call.

Regressions these catch: what the host's stand-ins cannot show of ``route`` and ``gather``; rows that two kernels write,
or none; a length of another replay; a kernel that begins before its keys are copied; a result that depends on when it
is computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import built_decodes, built_variants
from kernel_gates import emulator_limit
from paged_cases import Batch, make
from test_gpu_kvcache import on_card, run
from test_kvcache import call_of

from fp8cutlass import explain_kvcache
from fp8cutlass.call.kvcache import KVCall, gathered
from fp8cutlass.call.kvprefill import LEAST, emulate_chunk, operands
from fp8cutlass.manifest import Variant

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
KEYS, ROWS = [700, 0, 130, 3, 640, 5000, 2000], [300, 2, 5, 1, 128, 127, 1500]
LONG = [s for s, rows in enumerate(ROWS) if rows >= LEAST]
WINDOWS = {"full": [(-1, -1)], "causal": [(-1, 0)], "window": [(200, 3), (64, 0), (-1, 9)]}
FORMATS: list[dict[str, Any]] = [
    {}, {"v_scale": "pow2", "page_size": 16}, {"format": "nhd", "page_size": 16}, {"format": "hnd", "page_size": 48},
]  # fmt: skip
DECODED = {d.head_dim for d in built_decodes()}
EXP2 = [v for v in built_variants("ragged", softmax="exp2") if v.key_block == 128 and v.head_dim in DECODED]


def batch_for(v: Variant, **arguments: Any) -> Batch:
    dtype = torch.float16 if v.out == "fp16" else torch.bfloat16
    return make(KEYS, ROWS, (8, 2), v.head_dim, dtype=dtype, **arguments)


def chunk(call: KVCall, s: int, v: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of a long chunk by the specification."""
    assert call.page_table is not None and call.cu_q is not None
    keys, of = gathered(call, s, call.page_table[s], int(call.used[s])), slice(*call.cu_q[s : s + 2].tolist())
    copied = operands(keys.k.to(E4M3), keys.v.to(E4M3), keys.k_descale, keys.v_descale)
    return emulate_chunk(call.q[of], copied, v, scale=call.scale, left=call.left, right=call.right)


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-6))


@pytest.mark.parametrize("arguments", FORMATS, ids=str)
@pytest.mark.parametrize("v", EXP2, ids=lambda v: v.id)
def test_every_chunk_is_its_emulation_and_every_step_is_exact(v: Variant, arguments: dict[str, Any]) -> None:
    batch = batch_for(v, **arguments)
    there = on_card(batch, arguments)
    for window in WINDOWS[v.mask]:
        options: dict[str, Any] = {"window_size": window, "causal": False}
        out, lse = (x.cpu() for x in run(there, **options))
        assert not out.isnan().any()
        call = call_of(batch, left=window[0], right=window[1])
        references, begin = batch.references(**options), 0
        for s, (reference, count) in enumerate(zip(references, ROWS, strict=True)):
            of = slice(begin, begin + count)
            begin += count
            dead = reference.lse[0].isneginf()
            assert torch.equal(lse[:, of].isneginf(), dead) and bool((out[of].transpose(0, 1)[dead] == 0).all())
            if s in LONG:
                wanted, log_sum = chunk(call, s, v)
                assert far(out[of], wanted) <= emulator_limit(v), (s, window)
                assert float((lse[:, of] - log_sum)[~dead].abs().max()) < 0.01
            elif not bool(dead.all()):
                assert far(out[of].transpose(0, 1), reference.out[0]) <= (0.0006 if v.out == "fp16" else 0.002), s


def one() -> Variant:
    found = [v for v in EXP2 if (v.head_dim, v.mask, v.out) == (64, "causal", "bf16")]
    if not found:
        pytest.skip("no ragged kernel of head_dim 64 is built")
    return found[0]


def test_what_it_says() -> None:
    v = one()
    there = on_card(batch_for(v), {})
    given = {"page_table": there.table, "cache_seqlens": there.lengths.cuda(), "cu_seqlens_q": there.ends.cuda()}
    said = explain_kvcache(there.q, there.cache, **given)
    assert f"prefill:   {v.id}" in said and "of 128 queries and more" in said
    assert "by the same kernel" in explain_kvcache(there.q, there.cache, **given, max_seqlen_q=127)


def test_runs_repeat_to_the_bit() -> None:
    there = on_card(batch_for(one()), {})
    first, sums = run(there)
    for _ in range(200):
        out, lse = run(there)
        assert torch.equal(out, first) and torch.equal(lse, sums)


def test_a_graph_follows_lengths_across_the_limit() -> None:
    """A sequence is a long chunk in one replay and a step of decode in the next."""
    there = on_card(batch_for(one()), {})
    lengths, ends = there.lengths.cuda(), there.ends.cuda()
    table = there.table.where(there.table < 2**30, 0)
    given: dict[str, Any] = {"page_table": table, "cache_seqlens": lengths, "cu_seqlens_q": ends}
    there.run(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = there.run(**given)
    plain = ends.clone()
    for shift in (0, -180, 127, 1, 300):
        ends[1:-1] = (plain[1:-1] + shift).clamp(0, int(plain[-1]))
        lengths[2] += 5
        graph.replay()
        torch.cuda.synchronize()
        wanted, log_sum = there.run(**given)
        for x, y in ((out, wanted), (lse, log_sum)):  # bits: a length that grows reaches slots of NaN
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), shift


def test_a_nan_of_v_reaches_the_rows_that_see_it() -> None:
    batch = batch_for(one())
    clean, _ = run(on_card(batch, {}))
    page, token = divmod(600, batch.cache.page_size)
    batch.cache.views().v[batch.table[0, page], token, 1, 9] = 0x7F
    out, _ = run(on_card(batch, {}))
    broken = torch.zeros_like(out, dtype=torch.bool)
    broken[600 - (KEYS[0] - ROWS[0]) : ROWS[0], 4:, 9] = True
    assert torch.equal(out.isnan(), broken)
    for s in LONG[1:]:  # whose bits depend on no other sequence
        of = slice(sum(ROWS[:s]), sum(ROWS[: s + 1]))
        assert torch.equal(out[of], clean[of])


@pytest.mark.parametrize("wrong", [[0, 600, 300, 700], [-5, 2**31 - 1, 400, 1300], [0, 700, 1400, 2000]])
def test_numbers_that_lie_reach_nothing_outside(wrong: list[int]) -> None:
    """Run under memcheck, too: no fault here means only that the card noticed none."""
    batch = make([700, 700, 100], [500, 400, 400], (8, 2), 64, dtype=torch.bfloat16)
    there = on_card(batch, {})
    for number in (2**31 - 1, -(2**31)):
        lengths = torch.tensor([700, number, 100], dtype=torch.int32).cuda()
        table = torch.full_like(there.table, number)
        ends = torch.tensor(wrong, dtype=torch.int32).cuda()
        run(there, cache_seqlens=lengths, cu_seqlens_q=ends, page_table=table)
        torch.cuda.synchronize()
