"""Attention over several processes on cards: one card that all share through gloo, and NCCL where there are two.

Regressions these catch: bits that depend on how many ranks there are, a kernel that starts before its keys are there,
an LSE for merging that is of another sum.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from gpu import built_manifest, needs
from reference import relative_l2

from fp8cutlass import attention, merge_attention, pack_kv, parallel
from fp8cutlass.call.merge import weights
from fp8cutlass.native.merge import merges
from fp8cutlass.parallel import agree
from fp8cutlass.parallel.attend import groups_of

pytestmark = pytest.mark.gpu

METHODS = ("gather", "ulysses", "ring")
PATIENCE = timedelta(seconds=15)
PROBLEMS = {  # tokens, or lengths of ranks; heads, kv_heads, head_dim, causal
    "full": (6144, 8, 8, 64, False),
    "zigzag": (6144, 16, 8, 128, True),
    "uneven": ((1300, 811), 8, 4, 128, True),
    "uneven4": ((900, 0, 1, 1210), 8, 4, 128, True),
}


def operands(name: str) -> list[torch.Tensor]:
    tokens, heads, kv_heads, head_dim, _ = PROBLEMS[name]
    count = tokens if isinstance(tokens, int) else sum(tokens)
    generator = torch.Generator().manual_seed(count)
    shapes = ((1, h, count, head_dim) for h in (heads, kv_heads, kv_heads))
    return [torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes]


def shards_of(name: str, count: int) -> parallel.Shards:
    tokens = PROBLEMS[name][0]
    if not isinstance(tokens, int):
        return parallel.contiguous(tokens)
    return (parallel.zigzag if PROBLEMS[name][4] else parallel.contiguous)(tokens, count)


def work(rank: int, count: int, nccl: bool) -> dict[str, Any]:
    group = None
    if nccl:
        torch.cuda.set_device(rank)
        group = dist.new_group(range(count), backend="nccl")
    found: dict[str, Any] = {}
    for name, (tokens, *_, causal) in PROBLEMS.items():
        if not isinstance(tokens, int) and len(tokens) != count:
            continue
        shards = shards_of(name, count)
        mine = [shards.shard(x, rank) for x in operands(name)]
        for method in METHODS:
            word = "zigzag" if causal and isinstance(tokens, int) else "contiguous"
            given: dict[str, Any] = {"method": method, "shards": word, "is_causal": causal, "enable_gqa": True}
            with parallel.count_sent() as sent:
                out = parallel.attention(*mine, group, **given)
            again = parallel.attention(*mine, group, **given)
            assert torch.equal(out, again)
            plan = agree.known(groups_of(group))[-1]
            found[f"{name} {method}"] = out.cpu(), plan.kernel, sent.bytes
    return found


def check(found: list[Any], count: int) -> None:
    assert all(isinstance(x, dict) for x in found), found
    for key in found[0]:
        name, method = key.split()
        *_, causal = PROBLEMS[name]
        kernel = found[0][key][1]
        assert {of_rank[key][1] for of_rank in found} == {kernel}
        q, k, v = operands(name)
        made: dict[str, Any] = {"is_causal": causal, "enable_gqa": True}
        want = attention(q, k, v, kernel=kernel, **made).cpu()
        out = shards_of(name, count).unshard([of_rank[key][0] for of_rank in found])
        if method == "ring":
            assert relative_l2(out, want.double()) < 0.005, key
        elif "split" in kernel and name.startswith(
            "uneven"
        ):  # its CTAs share keys by the row tile, which shards cut elsewhere
            assert relative_l2(out, want.double()) < 0.002, key
        else:
            assert torch.equal(out, want), key
        tokens, _, kv_heads, head_dim, _ = PROBLEMS[name]
        if isinstance(tokens, int) and method != "ulysses":
            bf16 = (count - 1) * 4 * kv_heads * tokens // count * head_dim
            for of_rank in found:  # e4m3 and descales; shards of these lengths end between blocks, so no rows move
                assert 0.5 * bf16 < of_rank[key][2] < 0.503 * bf16, (key, of_rank[key][2], bf16)


@pytest.fixture
def library() -> None:
    """The processes find the library that this one has."""
    from fp8cutlass.native import extension

    os.environ.setdefault("FP8CUTLASS_LIBRARY", str(extension.find_library()))


@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_a_card(count: int, tmp_path: Path, library: None) -> None:
    for _, heads, kv_heads, head_dim, causal in PROBLEMS.values():
        q = torch.zeros(1, heads, 256, head_dim, dtype=torch.bfloat16, device="cuda")
        needs(q, q[:, :kv_heads], q[:, :kv_heads], is_causal=causal, enable_gqa=True)
    # A ring takes parts of a call by kernels of one key block, which a profile may lack.
    if built_manifest().profile != "release":
        pytest.skip("needs the kernels of profile release")
    check(ranks.run(count, work, tmp_path, count, False), count)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_cards_over_nccl(count: int, tmp_path: Path, library: None) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} cards")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    check(ranks.run(count, work, tmp_path, count, True), count)


def left_alone(rank: int, blocking: str, begun: str) -> tuple[str, str]:
    """The other rank ends after a call in which all was well; what the next call of this one raises."""
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": blocking, "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(rank)
    group = dist.new_group(range(2), timeout=PATIENCE, backend="nccl")
    q, k, v = (torch.randn(1, 8, 1024, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    parallel.attention(q, k, v, group, method="gather")
    torch.cuda.synchronize()
    if rank:
        os._exit(9)
    Path(begun).write_text(str(time.monotonic()))

    def call() -> None:
        parallel.attention(q, k, v, group, method="gather")
        torch.cuda.synchronize()

    found = ranks.error_of(call)
    Path(begun).write_text(f"{begun_at(begun)} {time.monotonic()}")
    return found


def begun_at(path: str) -> float:
    return float(Path(path).read_text().split()[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("blocking", ["1", "0"])
def test_a_rank_that_ends_is_an_error_on_the_other(blocking: str, tmp_path: Path, library: None) -> None:
    """With a blocking wait torch raises at the timeout. Without, its watchdog ends the process, up to 70 s later."""
    begun = tmp_path / "begun"
    found = ranks.run(2, left_alone, tmp_path, blocking, str(begun))
    waited = time.monotonic() - begun_at(str(begun))
    assert found[1] == 9
    if blocking == "1":
        raised = float(begun.read_text().split()[1]) - begun_at(str(begun))
        assert found[0][0] in ("DistBackendError", "RuntimeError"), found[0]
        assert raised < 2 * PATIENCE.total_seconds(), raised
    else:
        assert found[0] not in (("", ""), 0), "a call went on without the other rank"
        assert waited < PATIENCE.total_seconds() + 90, (waited, found[0])


@pytest.mark.parametrize("precision", ["fast", "balanced", "accurate", "high"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_an_lse_for_merging(precision: str, head_dim: int, causal: bool) -> None:
    """The result is that without an LSE; the LSE is the emulator's, and that of the unquantised P within its codes."""
    q, k, v = (
        torch.randn(2, h, 700, head_dim, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (4, 2, 2)
    )
    made: dict[str, Any] = {"enable_gqa": True, "precision": precision, "is_causal": causal}
    on_card = [x.cuda() for x in (q, k, v)]
    needs(*on_card, **made)
    out, lse = attention(*on_card, return_lse="merge", **made)
    plain = attention(*on_card, **made)
    exact = attention(*on_card, return_lse=True, **made)[1]
    assert torch.equal(out, plain)
    far = (lse - exact).cpu()
    # Of a row with few keys each P has one rounding to e4m3, 1/16 of it at most, and "fast" interpolates as well.
    assert float(far.abs().max()) < (0.08 if precision == "fast" else 1 / 16), far.abs().max()
    assert precision == "fast" or float(far.square().mean().sqrt()) < 0.01
    packed = pack_kv(*on_card[1:], query_shape=q.shape, is_causal=causal, precision=precision)
    assert torch.equal(attention(on_card[0], packed, return_lse="merge", enable_gqa=True, is_causal=causal)[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [36, 64, 128, 256])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_kernel_merges_as_torch_does(dtype: torch.dtype, head_dim: int, layout: str) -> None:
    """In place and not, of a slice of rows as a ring has it, with rows without keys; on a stream, in a graph."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shape = (2, 3, 101, head_dim) if layout == "bhsd" else (2, 101, 3, head_dim)
    a, b = (torch.randn(shape, generator=generator, device="cuda") for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 3, 101, generator=generator, device="cuda") for _ in range(2))
    lse_a[0, 1, 5], lse_b[0, 1, 5:9] = -torch.inf, -torch.inf
    b = b.to(dtype)
    rows = (lambda x: x[:, :, 20:90]) if layout == "bhsd" else (lambda x: x[:, 20:90])
    for cut in (lambda x: x, rows):
        first, second = cut(a), cut(b)
        of_first, of_second = (lse_a, lse_b) if cut is not rows else (lse_a[:, :, 20:90], lse_b[:, :, 20:90])
        as_heads = [x if layout == "bhsd" else x.transpose(1, 2) for x in (first, second)]
        assert merges(as_heads[0], of_first, as_heads[1], of_second)
        total, weight = weights(of_first, of_second)
        weight = (weight if layout == "bhsd" else weight.transpose(1, 2)).unsqueeze(-1)
        wanted = torch.lerp(first, second.float(), weight)
        out, lse = merge_attention(first, of_first, second, of_second, layout=layout)
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse, total, rtol=2e-6, atol=2e-6)
        room, room_lse = first.clone(), of_first.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            merge_attention(room, room_lse, second, of_second, layout=layout, inplace=True)
        room.copy_(first), room_lse.copy_(of_first)
        graph.replay()
        assert torch.equal(room, out) and torch.equal(room_lse, lse)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_parts_are_one_call(head_dim: int) -> None:
    q, k, v = (
        torch.randn(1, 4, 1536, head_dim, generator=torch.Generator().manual_seed(i)).bfloat16().cuda()
        for i in range(3)
    )
    needs(q, k, v)
    packed = pack_kv(k, v)
    want = attention(q, packed)
    first, second = packed.narrow(0, 768), packed.narrow(768, 768)
    out, _ = merge_attention(*attention(q, first, return_lse="merge"), *attention(q, second, return_lse="merge"))
    assert relative_l2(out.cpu(), want.cpu().double()) < 0.005
    rows = q[:, :, 512:1024]
    needs(rows, k, v, is_causal=True)
    causal = attention(q, k, v, is_causal=True, return_lse=True)
    kernel = pack_kv(k, v, query_shape=q.shape, is_causal=True).kernel
    whole = attention(q, k, v, is_causal=True, kernel=kernel)
    assert torch.equal(attention(rows, k, v, is_causal=True, causal_offset=512, kernel=kernel), whole[:, :, 512:1024])
    assert causal[0].shape == whole.shape
