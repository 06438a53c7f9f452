"""Attention over several cards, one process a card: time, what the exchange adds, bytes on the wire, beside torch's
context_parallel in bf16."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8cutlass import attention, parallel
from fp8cutlass.parallel import agree, exchange, gather, heads, moves, ring, ulysses
from fp8cutlass.parallel.attend import groups_of

from .parallel_model import Problem, seconds
from .parallel_rows import ParallelTime
from .results import FAILED, OK, WRONG, first_line

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
METHODS = ("gather", "ulysses", "ring", "both_gather", "both_ring")
TORCH = ("torch_flash", "torch_cudnn")
MOST_CALLS, ENOUGH_US = 16, 150_000  # calls of a repetition: as many as take so long, and no more
WARM_US = 400_000  # of calls before the first repetition: a card that was idle is some 7% faster for so long
HEAT_S = 2.0  # of products before the first contender
RING_LIMIT = 0.005  # relative L2 distance of a ring from one card
BF16_LIMIT = 0.08  # of torch's bf16 from ours: what e4m3 costs


def timed(call: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    """Microseconds of a call on the slowest rank, median over repetitions, and their spread. Calls follow one another
    without a wait, as those of a model's layers do, on cards that are as warm as such calls keep them."""
    call()
    each = min(_slowest(call, 1) for _ in range(2))
    count = max(1, min(MOST_CALLS, int(ENOUGH_US / each)))
    for _ in range(math.ceil(WARM_US / (each * count))):
        _slowest(call, count)
    found = [_slowest(call, count) for _ in range(repetitions)]
    median = statistics.median(found)
    return median, (max(found) - min(found)) / median


def heat() -> None:
    """Keep the card busy, as clocks take a second or two to settle after it was idle."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + HEAT_S
    while time.monotonic() < end:
        for _ in range(16):
            torch.mm(x, x)
        torch.cuda.synchronize()


def _slowest(call: Callable[[], Any], count: int) -> float:
    """Of ``count`` calls the time of one, of the slowest rank. Ranks begin together."""
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    mine = torch.tensor([begin.elapsed_time(end) * 1e3 / count], device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


# Where each method looks up the exchanges; what stands in for them returns buffers of the right size at once.
PLACES: dict[tuple[Any, str], Callable[..., exchange.Pending]] = {
    (gather, "all_gather"): lambda mine, group: _done(mine.new_empty((group.size(), mine.numel()))),
    (ring, "pass_on"): lambda mine, n, group: _done(mine if n == mine.numel() else mine.new_empty((n,))),
    (ulysses, "all_to_all"): lambda parts, sizes, received, group: _done(parts.new_empty((sum(received),))),
    (heads, "all_to_all"): lambda parts, sizes, received, group: _done(parts.new_empty((sum(received),))),
    (moves, "all_to_all"): lambda parts, sizes, received, group: _done(parts.new_empty((sum(received),))),
}


def _done(result: torch.Tensor) -> exchange.Pending:
    return exchange.Pending([], result)


@contextmanager
def exchanged(stand_in: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Puts ``stand_in(real, immediate)`` in the place of each exchange."""
    kept = {place: getattr(*place) for place in PLACES}
    for place, immediate in PLACES.items():
        setattr(*place, stand_in(kept[place], immediate))
    try:
        yield
    finally:
        for place, real in kept.items():
            setattr(*place, real)


def parts(call: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    """Microseconds of a call without its exchanges, and of its exchanges alone, one after the other."""
    seen: list[Callable[[], Any]] = []

    def remembered(real: Callable[..., Any], _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(lambda: real(*args).wait())
            return real(*args)

        return run

    with exchanged(remembered):
        call()
    with exchanged(lambda _, immediate: immediate):
        products, _ = timed(call, repetitions)
    alone, _ = timed(lambda: [run() for run in seen], repetitions)
    return products, alone


def operands(p: Problem) -> list[torch.Tensor]:
    """(1, H, S, D) of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(1, h, p.tokens, p.head_dim) for h in (p.heads, p.kv_heads, p.kv_heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator) for s in shapes]


def measured(
    p: Problem, contenders: Sequence[str], repetitions: int, check: bool, multiple: int = 1
) -> Iterator[ParallelTime]:
    """A row for each contender that there is for so many ranks. Our shards end at multiples of ``multiple``. One card's
    time is measured before each contender, on all cards: how fast they are changes by some percent in a run."""
    rank, whole = dist.get_rank(), operands(p)
    q, k, v = whole
    mask = "zigzag" if p.causal else "full"
    base = ParallelTime(p.ranks, p.tokens, p.heads, p.kv_heads, p.head_dim, mask, "", OK)
    made: dict[str, Any] = {"is_causal": p.causal, "enable_gqa": p.heads != p.kv_heads}
    heat()
    for name in contenders:
        row: ParallelTime | None
        one = None
        if check:  # else too long for one card
            one, _ = timed(lambda: attention(q, k, v, **made), repetitions)
        try:
            if name in TORCH:
                row = _torch(replace(base, contender=name), p, whole, repetitions)
            else:
                row = _ours(replace(base, contender=name), p, whole, made, repetitions, check, rank, multiple)
        except Exception as error:  # on all ranks alike; one that breaks must not end the run
            row = replace(base, contender=name, status=FAILED, reason=first_line(error))
        if row is not None:
            yield replace(row, one_card_us=one)


def _ours(
    row: ParallelTime,
    p: Problem,
    whole: list[torch.Tensor],
    made: dict[str, Any],
    repetitions: int,
    check: bool,
    rank: int,
    multiple: int,
) -> ParallelTime | None:
    both, _, outer = row.contender.partition("_")
    group: Any = None
    inner = 1
    if outer:
        if p.ranks < 4:
            return None
        inner = 2 if p.ranks == 4 else p.ranks // 2
        group = dist.device_mesh.init_device_mesh("cuda", (p.ranks // inner, inner))
    word = "zigzag" if p.causal else "contiguous"
    shards = getattr(parallel, word)(p.tokens, p.ranks // inner, multiple=multiple).split(inner)
    mine = [shards.shard(x, rank) for x in whole]
    given: dict[str, Any] = {"method": outer or both, "shards": word if multiple == 1 else shards, **made}

    def call() -> torch.Tensor:
        q, k, v = mine
        return parallel.attention(q, k, v, group, **given)  # type: ignore[return-value]

    with parallel.count_sent() as sent:
        out = call()
    most = torch.tensor([sent.bytes], device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    plan = agree.known(groups_of(group))[-1]
    error, status, reason = None, OK, ""
    if check:
        q, k, v = whole
        pinned: Any = plan.kernel if given["method"] != "ring" else None
        want = shards.shard(attention(q, k, v, kernel=pinned, **made), rank)
        error = 0.0 if torch.equal(out, want) else float((out.float() - want.float()).norm() / want.float().norm())
        worst = torch.tensor([error], device="cuda")
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        error = float(worst)
        limit = RING_LIMIT if given["method"] == "ring" else 0.0
        if not error <= limit:
            status, reason = WRONG, f"relative L2 distance {error:.3g} from one card, the limit is {limit:g}"
    us, spread = timed(call, repetitions)
    products, alone = parts(call, repetitions)
    hidden = None if not alone else min(1.0, max(0.0, 1.0 - (us - products) / alone))
    method = "ulysses" if outer else both
    return replace(
        row, status=status, reason=reason, kernel=plan.kernel, us=us, spread=spread, products_us=products,
        exchange_us=alone, hidden=hidden, sent_bytes=int(most), model_us=seconds(p, method) * 1e6, error=error,
    )  # fmt: skip


def _torch(row: ParallelTime, p: Problem, whole: list[torch.Tensor], repetitions: int) -> ParallelTime:
    """torch's ring with bf16 on the wire; heads of K and V are repeated before it, as it serves no groups."""
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.FLASH_ATTENTION if row.contender == "torch_flash" else SDPBackend.CUDNN_ATTENTION
    shared = p.heads // p.kv_heads
    buffers = [x.repeat_interleave(shared, 1) if x.shape[1] != p.heads else x.clone() for x in whole]
    q, k, v = buffers
    _attention._cp_options.enable_load_balance = p.causal
    mesh = dist.device_mesh.init_device_mesh("cuda", (p.ranks,))
    with torch.no_grad(), sdpa_kernel([backend]):
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)):
            us, spread = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=p.causal), repetitions)
    sent = (p.ranks - 1) * 2 * 2 * p.heads * (p.tokens // p.ranks) * p.head_dim
    return replace(row, us=us, spread=spread, sent_bytes=sent)


def begin() -> None:
    """Join the default group over NCCL, as torchrun or ``spawn`` say."""
    os.environ.update(NO_MULTICAST)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(
        "nccl", timeout=timedelta(minutes=2), device_id=torch.device("cuda", torch.cuda.current_device())
    )
