"""Edge cases at the limits of memory, grids and launches, on a card.

Regressions these catch: a byte read or written past a tensor, an offset that wraps around at 2^31, a persistent loop
that waits for an item nobody brings, a launch whose failure nobody reports, counters that a graph leaves dirty.
"""

from __future__ import annotations

import faulthandler
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import gpu
import pytest
import torch
from gpu import ROOT, built_manifest, fp8_variants, is_emulated, needs, out_descale_for, run_kernel
from kernel_gates import emulator_limit
from mapped import at_the_end, mapping
from reference import Operands, operands_of, randn, relative_l2

import fp8cutlass
from fp8cutlass.call.call import Outputs
from fp8cutlass.call.launch import run_operands
from fp8cutlass.emulator.emulate import emulate
from fp8cutlass.manifest import Variant
from fp8cutlass.memory import TENSOR_MAP_STRIDE
from fp8cutlass.native.fused import Operands as Packed

pytestmark = pytest.mark.gpu

VARIANTS = fp8_variants()
EACH = list({(v.family, v.head_dim, v.schedule, v.cluster, v.out): v for v in reversed(VARIANTS)}.values())
SCHEDULES = list({(v.family, v.schedule, v.cluster, v.causal): v for v in reversed(VARIANTS)}.values())
E4M3 = torch.float8_e4m3fn


def by_id(variants: list[Variant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("variant", variants, ids=lambda v: v.id)


def operands(variant: Variant, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int) -> Operands:
    d = variant.head_dim
    q = randn(1, heads, seqlen_q, d, seed=1, device="cuda")
    k, v = (randn(1, kv_heads, seqlen_k, d, seed=s, device="cuda") for s in (2, 3))
    return operands_of(variant, q, k, v)


def options_of(x: Operands, variant: Variant) -> dict[str, Any]:
    """Bottom right where the kernel has a mask."""
    offset = x.fp8[1].shape[2] - x.fp8[0].shape[2] if variant.causal else 0
    return {"scale": 0.1, "causal_offset": offset, "out_descale": out_descale_for(variant)}


@pytest.mark.edge(2, 32)
@by_id(EACH)
def test_guard_bytes_round_the_outputs(variant: Variant) -> None:
    """O, LSE and amax in the middle of a poisoned room: with tails in both directions, nothing beside them changes."""
    x = operands(variant, 3, 1, variant.tile_m + 6, variant.tile_n + 37)
    plan, tensors = gpu.call_of(x, variant, **options_of(x, variant))
    rows, pad = tensors.q.shape[2], 16
    room = torch.full((1, 3, rows + 8, variant.head_dim + 2 * pad), 7.0, device="cuda").to(plan.call.out_dtype)
    out = room[:, :, 4 : 4 + rows, pad : pad + variant.head_dim]
    floats = torch.full((3 * rows + 129,), 7.0, device="cuda")
    lse, amax = floats[64 : 64 + 3 * rows].view(1, 3, rows), floats[-1:]
    made = gpu.as_the_kernel_reads(plan, tensors)
    run_operands(plan, tensors, made, Outputs(out, lse, amax))
    outside = torch.ones_like(room, dtype=torch.bool)
    outside[:, :, 4 : 4 + rows, pad : pad + variant.head_dim] = False
    assert bool((room.float()[outside] == 7.0).all()), "bytes beside O were written"
    assert bool((floats[:64] == 7.0).all()) and bool((floats[64 + 3 * rows : -1] == 7.0).all())
    want = run_kernel(x, variant, **options_of(x, variant))
    assert torch.equal(out.contiguous().view(torch.uint8), want[0].contiguous().view(torch.uint8))
    assert torch.equal(lse, want[1]) and torch.equal(amax, want[2])


@pytest.mark.edge(1, 2)
@by_id(EACH)
def test_operands_that_end_where_their_mapping_ends(variant: Variant) -> None:
    """Q, K, packed V, descales and outputs, each in the last bytes before unmapped addresses: a fault would end the
    process; the bits are those of other places."""
    x = operands(variant, 2, 1, variant.tile_m + 6, variant.tile_n + 37)
    plan, tensors = gpu.call_of(x, variant, **options_of(x, variant))
    want = run_kernel(x, variant, **options_of(x, variant))
    given = gpu.as_the_kernel_reads(plan, tensors)
    with ExitStack() as stack:
        moved = {
            name: at_the_end(stack.enter_context(mapping(t.numel() * t.element_size())), t)
            for name, t in vars(given).items()
            if t is not None
        }
        outputs = [at_the_end(stack.enter_context(mapping(t.numel() * t.element_size())), t) for t in want]
        for t in outputs:
            t.view(torch.uint8).zero_()
        run_operands(plan, tensors, Packed(**vars(given) | moved), Outputs(*outputs))
        torch.cuda.synchronize()
        got = [t.clone() for t in outputs]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.edge(19)
def test_heads_two_to_the_40_bytes_apart() -> None:
    """No tensor map has such a stride: the operand is copied."""
    q, k, v = (randn(1, 2, s, 64, seed=s, device="cuda").to(E4M3) for s in (40, 130, 130))
    options = {"scaling": "head", "q_descale": 0.5, "k_descale": 0.25, "v_descale": 2.0}
    want = fp8cutlass.attention(q, k, v, **options)
    with mapping(130 * 64, span=TENSOR_MAP_STRIDE + 130 * 64) as room:  # pages begin at multiples of their size
        far = room.as_strided(k.shape, (0, TENSOR_MAP_STRIDE, 64, 1), 0)
        far.copy_(k.view(torch.uint8))
        got = fp8cutlass.attention(q, far.view(E4M3), v, **options)
        torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.edge(17)
def test_more_than_two_to_the_31_elements() -> None:
    """Q, K, V and O of 2.15e9 elements each: the first and the last heads have the bits that they have alone."""
    heads, tokens, head_dim = 65_600, 512, 64
    needed = heads * tokens * head_dim * (4 * 2 + 3) * 1.2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on the card")
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = (1, heads, tokens, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    kernel = fp8cutlass.supports(q, k, v)[1].split()[0]
    got = fp8cutlass.attention(q, k, v, kernel=kernel)
    for part in (slice(0, 3), slice(heads // 2, heads // 2 + 3), slice(heads - 3, heads)):
        alone = fp8cutlass.attention(q[:, part], k[:, part], v[:, part], kernel=kernel)
        assert torch.equal(got[:, part], alone), part


@pytest.mark.edge(20, 49)
@pytest.mark.parametrize("shape", [(65_537, 1, 3), (1, 65_537, 3), (1, 1, 65_537 * 128)], ids=str)
def test_more_than_a_grid_dimension_holds(shape: tuple[int, int, int]) -> None:
    """Batches, heads and query tiles alone: the last rows have the bits that they have alone."""
    batch, heads, tokens = shape
    size = torch.linspace(-1, 1, batch * heads * tokens, device="cuda").view(batch, heads, tokens, 1)
    q = (randn(1, 1, 1, 32, seed=1, device="cuda") * size).bfloat16()
    k = randn(1, 1, 70, 32, seed=2, device="cuda").expand(batch, heads, 70, 32)
    kernel = fp8cutlass.supports(q, k, k)[1].split()[0]
    got = fp8cutlass.attention(q, k, k, kernel=kernel)
    for at in ((slice(0, 1), slice(0, 1), slice(0, 130)), (slice(-1, None), slice(-1, None), slice(-130, None))):
        alone = fp8cutlass.attention(q[at], k[at[:2]], k[at[:2]], kernel=kernel)
        assert torch.equal(got[at], alone)


FAILING = """
import sys
sys.path[:0] = ["tests", "python"]
import torch
from gpu import built_manifest, fp8_variants, card_arch
from fp8cutlass.native import extension
variant = next(v for v in fp8_variants() if v.family == "sm90a" and v.scaling == "block" and v.out == "bf16")
d, number = variant.head_dim, built_manifest().index[variant.id]
extension.load()
k = torch.zeros(1, 1, 128, d, dtype=torch.uint8, device="cuda")
v = torch.zeros(1, 1, d, 128, dtype=torch.uint8, device="cuda")
out = torch.zeros(1, 1, 128, d, dtype=torch.bfloat16, device="cuda")
one = torch.ones(128, device="cuda")
def call(q):
    torch.ops.fp8cutlass_C.forward(
        number, q, k, v, one, one[:1], one[:1], None, out, None, None, 1.0, 0)
    torch.cuda.synchronize()
for _ in range(3):
    try:
        call(k[:, :, :1].expand(1, 1, 128, d))
        print("served")
    except RuntimeError as error:
        print("refused" if "failed to launch" in str(error) else error)
call(k)
print("served")
"""


@pytest.mark.edge(21)
def test_a_launch_that_fails_is_reported_each_time() -> None:
    """Rows that are all the same row: no tensor map says so, and the operators above copy them. Three calls, three
    errors; then the next good call runs, as none of them is left behind. In a process of its own."""
    if not any(v.family == "sm90a" for v in VARIANTS):
        pytest.skip("kernels of sm89 have no launch that can be made to fail")
    done = subprocess.run(
        [sys.executable, "-c", FAILING], cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.stdout.split() == ["refused"] * 3 + ["served"], done.stdout + done.stderr


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Ends the process, with a traceback, when it hangs: a kernel that waits cannot be interrupted."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.edge(48)
@by_id(SCHEDULES)
def test_items_around_the_number_of_multiprocessors(variant: Variant) -> None:
    """Fewer items than multiprocessors, as many, twice as many and one; items of one tile and of several."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for items in (1, sms - 1, sms, 2 * sms + 1):
        for keys in (variant.tile_n, 2 * variant.stages * variant.tile_n + 5):
            x = operands(variant, items, 1, variant.tile_m, keys)
            options = options_of(x, variant)
            with watchdog(60):
                out, _, _ = run_kernel(x, variant, **options)
                torch.cuda.synchronize()
            want = emulate(
                *x.fp8, *x.descales, variant=variant, emulated_mma=is_emulated(variant), return_lse=False, **options
            )
            assert relative_l2(out.float(), want.out.float()) <= emulator_limit(variant), (items, keys)


@pytest.mark.edge(43)
@pytest.mark.parametrize("scaling", ["tensor", "head", "block", "token"])
def test_graphs_of_several_batch_sizes(scaling: str) -> None:
    """Captured largest first, replayed in any order, values and descales new each time, eager calls between."""
    heads, seqlen_q, seqlen_k, d = 8, 130, 700, 64
    shapes = {"q": (heads, seqlen_q), "k": (heads, seqlen_k), "v": (heads, seqlen_k)}
    tensors, options = _fp8(1, shapes, d, scaling, 0)
    needs(*tensors, **options)
    graphs = {}
    for batch in (64, 8, 3, 1):  # on a card more items than CTAs, and fewer
        tensors, options = _fp8(batch, shapes, d, scaling, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fp8cutlass.attention(*tensors, **options)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fp8cutlass.attention(*tensors, **options)
        graphs[batch] = graph, captured, tensors, options
    order = [batch for batch in graphs for _ in range(6)]
    random.Random(1).shuffle(order)
    for turn, batch in enumerate(order):
        graph, captured, tensors, options = graphs[batch]
        fresh, new = _fp8(batch, shapes, d, scaling, turn + 1)
        for old, x in zip((*tensors, *_descales(options)), (*fresh, *_descales(new)), strict=True):
            (old.view(torch.uint8) if old.dtype == E4M3 else old).copy_(x.view(torch.uint8) if x.dtype == E4M3 else x)
        graph.replay()
        assert torch.equal(captured, fp8cutlass.attention(*fresh, **new)), (turn, batch)


FIRST_CALLS = """
import threading, torch, fp8cutlass
generator = torch.Generator().manual_seed(1)
x = torch.randn(1, 2, 70, 64, generator=generator).bfloat16().cuda()
torch.cuda.synchronize()
gate, results, errors = threading.Barrier(8), [], []
def call():
    gate.wait()
    try:
        results.append(fp8cutlass.attention(x, x, x))
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=call) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
torch.cuda.synchronize()
print(len(results), all(torch.equal(r, results[0]) for r in results), errors)
"""


@pytest.mark.edge(39)
def test_the_first_calls_of_a_process_at_once() -> None:
    """Eight threads load the library, its kernels and its counters at the same time."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout == "8 True []\n", done.stdout + done.stderr


def _descales(options: dict[str, object]) -> list[torch.Tensor]:
    return [x for name, x in options.items() if name.endswith("_descale") and isinstance(x, torch.Tensor)]


def _fp8(
    batch: int, shapes: dict[str, tuple[int, int]], d: int, scaling: str, seed: int
) -> tuple[list[torch.Tensor], dict[str, object]]:
    """FP8 operands and canonical descales."""
    granularity = built_manifest().scaling[scaling]
    tensors, options = [], {"scaling": scaling}
    for i, (name, shape) in enumerate(shapes.items()):
        x = randn(batch, *shape, d, seed=10 * seed + i, device="cuda")
        x8, options[f"{name}_descale"] = fp8cutlass.quantize(x, granularity=granularity[name])
        tensors.append(x8)
    return tensors, options
