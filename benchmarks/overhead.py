"""What an eager call costs the host: time per call without waiting for the card, beside calls that do parts of it."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fp8cutlass import PagedKVCache, attention, attention_varlen, attention_with_kvcache, pack_kv, quantize
from fp8cutlass.call.card import prepared_call
from fp8cutlass.choose.target import target
from fp8cutlass.integrations import dense
from fp8cutlass.manifest import PACKAGE_DIR

from .data import make_data
from .peers.own import Own, half_plan, launcher, make_operands
from .report import heading, table
from .shapes import Shape

WARM_UPS = 20
# The card's queue holds about a thousand launches; a call makes a few. A longer batch would wait for the card.
CALLS = 50
BATCHES = 40
KEPT_UP = 0.1  # of a batch's time: what the card may still have to do at its end

Step = Callable[[], object]


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a call on the host: mean over all calls, median and minimum over the batches' means.

    ``behind_us`` is what the card still had to do after a batch, for each call: where it is a tenth of the mean or
    more, the host has waited for the card, and the figure is the card's.
    """

    what: str
    mean_us: float
    median_us: float
    min_us: float
    behind_us: float
    calls: int

    @property
    def kept_up(self) -> bool:
        return self.behind_us < KEPT_UP * self.mean_us


def host_time(
    what: str,
    call: Step,
    synchronise: Step,
    *,
    calls: int = CALLS,
    batches: int = BATCHES,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> HostTime:
    """Time ``batches`` of ``calls`` calls; between them ``synchronise`` waits for the card. ``clock`` counts ns."""
    for _ in range(WARM_UPS):
        call()
    issued, behind = [], []
    gc.collect()
    for _ in range(batches):
        synchronise()
        begun = clock()
        for _ in range(calls):
            call()
        returned = clock()
        synchronise()
        done = clock()
        issued.append((returned - begun) / calls / 1e3)
        behind.append((done - returned) / calls / 1e3)
    mean, median = statistics.fmean(issued), statistics.median(issued)
    return HostTime(what, mean, median, min(issued), statistics.median(behind), calls * batches)


def steps(shape: Shape, device: torch.device | str = "cuda") -> dict[str, Step]:
    """What is timed, by name: whole calls, what they are made of, and what torch itself needs."""
    data = make_data(shape, device)
    q, k, v = data.q, data.k, data.v
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = (quantize(x, granularity="head") for x in (q, k, v))
    descales: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "scaling": "head",
    }
    numbers: dict[str, Any] = {name: 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    q_narrow, k_narrow, v_narrow = (x[..., :-16] for x in (q8, k8, v8))
    packed = pack_kv(k, v, query_shape=q.shape, is_causal=shape.causal)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    at = target(q.device)
    variant, number = Own().choose(data, at)
    operands = make_operands(data, variant, at, "block")
    out = torch.empty_like(q)
    operator = cache(lambda: prepared_call(*half_plan(data, variant, at, "block")))
    return {
        "attention, bf16": lambda: attention(q, k, v, **options),
        "attention, bf16, kernel pinned": lambda: attention(q, k, v, kernel=variant.id, **options),
        "attention, FP8 with descales": lambda: attention(q8, k8, v8, **options, **descales),
        "attention, FP8 with numbers": lambda: attention(q8, k8, v8, **options, **numbers),
        "attention, FP8, padded": lambda: attention(q_narrow, k_narrow, v_narrow, **options, **descales),
        "attention, bf16, PackedKV": lambda: attention(q, packed, **options),
        "attention, bf16, torch.compile": lambda: compiled(q, k, v, **options),
        "pack_kv": lambda: pack_kv(k, v, query_shape=q.shape, is_causal=shape.causal),
        **_of_serving(q, k, v, shape.causal),
        "part: the extension's operator": lambda: operator()(q, k, v),
        "part: quantise and pack": lambda: make_operands(data, variant, at, "block"),
        "part: launch the kernel": launcher(number, operands, out, data.scale),
        "torch: scaled_dot_product_attention, bf16": lambda: F.scaled_dot_product_attention(q, k, v, **options),
        "torch: empty_like": lambda: torch.empty_like(q),
    }


def _of_serving(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Step]:
    """Ragged batches, pages, and what adapters add to a dense call."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    ragged_q, ragged_k, ragged_v = (x.transpose(1, 2).reshape(-1, x.shape[1], head_dim) for x in (q, k, v))
    ends_q, ends_k = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (rows, keys))
    columns = -(-keys // 64)
    cache = PagedKVCache(batch * columns, kv_heads, head_dim, 64, device=q.device)
    table = torch.arange(batch * columns, dtype=torch.int32, device=q.device).view(batch, columns)
    lengths = torch.full((batch,), keys - 1, dtype=torch.int32, device=q.device)
    one, new_k, new_v = (x[:, :, :1].transpose(1, 2).contiguous() for x in (q, k, v))
    slots = table[:, -1].long() * 64 + (keys - 1) % 64
    pages: dict[str, Any] = {"page_table": table, "cache_seqlens": lengths}
    shared = heads != kv_heads
    return {
        "attention_varlen, bf16": lambda: attention_varlen(
            ragged_q, ragged_k, ragged_v, ends_q, ends_k, rows, keys, causal=causal
        ),
        "attention_with_kvcache, a token": lambda: attention_with_kvcache(one, cache, **pages),
        "attention_with_kvcache, a token that is appended": lambda: attention_with_kvcache(
            one, cache, k=new_k, v=new_v, **pages
        ),
        "PagedKVCache.append, a token": lambda: cache.append(new_k[:, 0], new_v[:, 0], slots),
        "adapter, bf16": lambda: dense.attend(
            "benchmarks", "", q, k, v, is_causal=causal, enable_gqa=shared, short=True
        ),
    }


def measure(todo: Mapping[str, Step], synchronise: Step, calls: int, batches: int) -> tuple[list[HostTime], list[str]]:
    """The time of each step, and a line for each that cannot run here."""
    found, failed = [], []
    for what, call in todo.items():
        try:
            found.append(host_time(what, call, synchronise, calls=calls, batches=batches))
        except Exception as error:  # torch.compile needs a compiler, an old torch lacks kernels: the others count
            failed.append(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return found, failed


def by_module(call: Step, calls: int) -> list[tuple[str, float]]:
    """Where the host's time goes under cProfile, which makes Python calls dearer than they are: microseconds of a call
    spent in each module of the package itself, and in everything else, the longest first."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    spent: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        path, where = Path(file), "torch and Python"
        if path.is_relative_to(PACKAGE_DIR):
            where = ".".join(path.relative_to(PACKAGE_DIR).with_suffix("").parts)
        spent[where] += own * 1e6 / calls
    return sorted(spent.items(), key=lambda item: -item[1])


def markdown(
    stamp: Mapping[str, str],
    shape: Shape,
    found: Sequence[HostTime],
    failed: Sequence[str],
    modules: Sequence[tuple[str, float]],
) -> str:
    """The tables, under the stamp that says where they come from."""
    body = [
        [row.what, f"{row.mean_us:.1f}", f"{row.median_us:.1f}", f"{row.min_us:.1f}", "yes" if row.kept_up else "no"]
        for row in found
    ]
    lines = heading(f"Host time of an eager call at {shape.label},", stamp)
    header = ["us a call, nothing waited for", "mean", "median of batches", "least batch", "the card kept up"]
    lines += ["", *table(header, body), *(f"\nnot timed: {line}" for line in failed)]
    if modules:
        lines += ["", "Under cProfile, which makes Python dearer than it is, us of a bf16 call by module:", ""]
        lines += table(["module", "us"], [[name, f"{us:.1f}"] for name, us in modules if us >= 0.1])
    return "\n".join(lines) + "\n"
