"""Times of a family's attention calls: by SDPA as the library calls it, and by the adapter where it serves the call."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from fp8cutlass import stats
from fp8cutlass.integrations.dense import attend
from fp8cutlass.integrations.refusal import Refusal
from fp8cutlass.integrations.transformers.band import Band, padded
from fp8cutlass.integrations.transformers.serve import Features, refusal, serve

from ..decode import or_infinite
from ..grid import Settings
from ..results import FAILED, OK, Timed, first_line
from ..turns import all_timed
from .cases import TRANSFORMERS, Case

SDPA, OURS = "sdpa", "ours"
SERVED, LEFT = "served", "left"  # what the adapter does with a call
SHORTEST = 5 / 8  # of padded sequences, of the tensor's length; the longest fills it
NO_SINK = -30.0  # a sink that leaves results as they are: SDPA has none
LIMITS = {"fp8": 0.1, "bf16": 0.02}


@dataclass(frozen=True)
class FamilyTime(Timed):
    """What was found of one contender on one call. ``count`` is how often a forward makes it, ``choice`` what the
    adapter does with it, ``why`` the reason where it leaves it to the library. ``error`` is relative to SDPA."""

    family: str
    part: str
    source: str
    count: int
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    mask: str
    contender: str
    precision: str
    choice: str
    why: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Operands:
    """q (B, H, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv) in bf16, (B, S, H, D) in memory, as models have them;
    which keys count, (B, Sk) or None for all; the mask that SDPA gets; sinks, (H,)."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor | None
    mask: torch.Tensor | None
    band: Band  # what rows may see; the adapter of transformers reads it off the mask, once a forward
    sinks: torch.Tensor | None


def make(case: Case, device: torch.device | str, seed: int = 0) -> Operands:
    """Standard normal operands."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, tokens: int, width: int) -> torch.Tensor:
        size = (case.batch, tokens, heads, width)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k = draw(case.heads, case.rows, case.head_dim), draw(case.kv_heads, case.keys, case.head_dim)
    v = draw(case.kv_heads, case.keys, case.values)
    valid = None
    if case.padded:
        least = max(1, int(case.keys * SHORTEST))
        lengths = torch.linspace(least, case.keys, case.batch, device=device).long()
        valid = torch.arange(case.keys, device=device) < lengths[:, None]
    sinks = torch.full((case.heads,), NO_SINK, device=device) if case.sinks else None
    return Operands(case, q, k, v, valid, _mask(case, valid, device), _band(case, valid), sinks)


def _band(case: Case, valid: torch.Tensor | None) -> Band:
    band = Band(*case.window, case.keys - case.rows)
    found = band if valid is None else padded(band, valid, case.rows, case.keys)
    if found is None:
        raise ValueError("the padding has a hole")
    return found


def _mask(case: Case, valid: torch.Tensor | None, device: torch.device | str) -> torch.Tensor | None:
    """As the library gives it to SDPA: (B or 1, 1, Sq, Sk) bool or bf16, or none."""
    if case.bias:
        row, key = torch.arange(case.rows, device=device), torch.arange(case.keys, device=device)
        slope = torch.arange(case.heads, device=device)[:, None, None] / case.keys
        return (-slope * (row[:, None] - key).abs()).bfloat16()[None]
    if case.text:
        seen = torch.arange(case.keys, device=device) < max(1, case.keys - case.text // 2)
        seen = seen.expand(case.batch, 1, 1, case.keys)
        return torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, -10_000.0) if case.added else seen
    windowed = case.window != (-1, -1) and not case.causal
    if valid is None and not windowed:
        return None
    band = Band(*case.window, case.keys - case.rows)
    seen = band.dense(1, case.rows, case.keys, torch.device(device))
    return seen if valid is None else seen & valid[:, None, None, :]


def by_sdpa(o: Operands) -> torch.Tensor:
    """(B, H, Sq, Dv)."""
    case = o.case
    shared = case.heads != case.kv_heads
    causal = case.causal and o.mask is None
    return F.scaled_dot_product_attention(o.q, o.k, o.v, o.mask, 0.0, causal, enable_gqa=shared)


def by_adapter(o: Operands) -> torch.Tensor | Refusal:
    """(B, H, Sq, Dv), or why the adapter leaves the call to the library."""
    case = o.case
    if case.door == TRANSFORMERS:
        bias = o.mask if case.bias else None
        if (found := refusal(o.q, o.k, o.v, Features(softcap=case.softcap, position_bias=bias))) is not None:
            return found
        out = serve(o.q, o.k, o.v, o.band, None, case.softcap, o.sinks, bias)
        return out if isinstance(out, Refusal) else out.transpose(1, 2)
    shared = case.heads != case.kv_heads
    with stats.collect() as seen:
        out = attend(
            "benchmarks", case.family, o.q, o.k, o.v, attn_mask=o.mask, is_causal=case.causal and o.mask is None,
            enable_gqa=shared,
        )  # fmt: skip
    if out is not None:
        return out
    return next(Refusal(stats.Reason(key.what)) for key in seen.result().counts if key.kind == "fallback")


def _error(o: Operands, wanted: torch.Tensor, out: torch.Tensor) -> float:
    """Of rows that are no padding."""
    if o.valid is not None:
        rows = o.valid[:, -o.case.rows :]
        out, wanted = (x.transpose(1, 2)[rows] for x in (out, wanted))
    difference = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    return or_infinite(difference)


def _served(out: torch.Tensor | Refusal) -> torch.Tensor:
    if isinstance(out, Refusal):
        raise RuntimeError(f"the adapter served the call before, and now it does not: {out.reason.value}")
    return out


def measure(case: Case, device: torch.device, settings: Settings) -> list[FamilyTime]:
    """The row of SDPA, and that of ours where the adapter serves the call."""
    gc.collect()  # not during a capture, where a graph that goes may call the driver
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.no_grad():
        o = make(case, device)
        try:
            answer = by_adapter(o)
            wanted = by_sdpa(o)
        except Exception as failure:  # a case that breaks must not end the run
            return [_row(case, OURS, "fp8", "", "", FAILED, first_line(failure))]
        why = answer.reason.value if isinstance(answer, Refusal) else ""
        choice = LEFT if why else SERVED
        ways: list[tuple[str, str, Callable[[], torch.Tensor]]] = [(SDPA, "bf16", partial(by_sdpa, o))]
        if choice == SERVED:
            ways.append((OURS, "fp8", lambda: _served(by_adapter(o))))
        error_of = partial(_error, o, wanted)
        contenders = [(_row(case, name, kind, choice, why, OK), launch, error_of) for name, kind, launch in ways]
        return all_timed(contenders, device, settings, LIMITS)


def _row(case: Case, name: str, precision: str, choice: str, why: str, status: str, reason: str = "") -> FamilyTime:
    return FamilyTime(
        case.family, case.part, case.source, case.count, case.batch, case.heads, case.kv_heads, case.rows, case.keys,
        case.head_dim, case.mask, name, precision, choice, why, status, reason,
    )  # fmt: skip


def small(case: Case) -> Case:
    """The same kind of call at a size for the CPU."""
    group = max(1, case.heads // case.kv_heads)
    keys = min(case.keys, 64)
    rows = min(case.rows, keys if case.rows == case.keys else 24)
    left, right = case.window
    return replace(
        case, batch=min(case.batch, 2), heads=min(group, 4), kv_heads=1 if group > 1 else min(group, 4), rows=rows,
        keys=keys, window=(min(left, 15) if left >= 0 else left, right),
        head_dim=min(case.head_dim, 64) if not case.value_dim else 64, value_dim=32 if case.value_dim else 0,
    )  # fmt: skip


def total(rows: Sequence[FamilyTime]) -> tuple[float, float] | None:
    """Microseconds of a forward's attention by SDPA, and by the adapter's choice; None where a time is missing."""
    base = choice = 0.0
    for row in rows:
        if row.median_us is None:
            return None
        us = row.count * row.median_us
        if row.contender == SDPA:
            base += us
        if (row.contender == OURS) == (row.choice == SERVED):
            choice += us
    return (base, choice) if base and not math.isnan(base) else None
