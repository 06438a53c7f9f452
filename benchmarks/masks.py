"""Masks: what is timed beside torch's FlexAttention, how it is checked, and the rows that are kept.

Every problem is a rule of rows and keys. `BlockMask` and FlexAttention get it in their own forms, before the timing.
Useful operations count the keys that rows see.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F

from fp8cutlass import BlockMask, attention, explain
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.masks.bits import pack as bits_of
from fp8cutlass.masks.bits import unpack

from . import turns
from .grid import Settings
from .mask_problems import Problem, Rule
from .results import OK, UNAVAILABLE, Timed, first_line
from .turns import ErrorOf, Launch, all_timed

OURS, DENSE, SEEN, FLEX = "fp8cutlass", "fp8cutlass_no_mask", "fp8cutlass_tensor", "flex_attention"
PACK = "pack_mask"  # a boolean tensor to lists and bits, without attention
SDPA = "sdpa"  # torch's, with a bias
CONTENDERS = (OURS, DENSE, SEEN, PACK, FLEX, SDPA)
OF_BIASES, OF_MASKS = (OURS, DENSE, FLEX, SDPA), (OURS, DENSE, SEEN, PACK, FLEX)
PEERS = (FLEX, SDPA)
MOST_CELLS = 1 << 28  # of a boolean tensor that is made to be packed in a call
SAMPLED_ROWS = 64  # of the first and the last head, of the first and the last batch
BYTES_PACKED = 1.125  # of a pair: a byte is read, a bit written
CHUNK = 1024  # rows whose keys are counted at a time


@dataclass(frozen=True)
class Data:
    """Random bf16 operands of a problem, (B, H, S, D), with its mask."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rule: Rule
    mask: BlockMask
    bias: torch.Tensor | None = None  # (1, H, Sq, Sk), instead of the mask

    def seen(self, batch: int, head: int, rows: torch.Tensor) -> torch.Tensor:
        """(rows, keys) bool."""
        b, h = (torch.tensor(n, device=rows.device) for n in (batch, head))
        keys = torch.arange(self.problem.keys, device=rows.device)
        return self.rule(b, h, rows[:, None], keys).expand(len(rows), self.problem.keys)

    def pairs(self) -> int:
        """Pairs of a row and a key that it sees, of all batches, of one head."""
        found = 0
        for batch in range(self.problem.batch):
            for start in range(0, self.problem.rows, CHUNK):
                rows = torch.arange(start, min(start + CHUNK, self.problem.rows), device=self.q.device)
                found += int(self.seen(batch, 0, rows).sum())
        return found

    def error(self, out: torch.Tensor, masked: bool = True) -> float:
        """Relative L2 error of an output (B, H, Sq, D) on some rows, against float32; NaN counts as infinite."""
        p, off, size = self.problem, 0.0, 0.0
        rows = torch.linspace(0, p.rows - 1, min(SAMPLED_ROWS, p.rows), device=out.device).round().long()
        for b in dict.fromkeys((0, p.batch - 1)):
            for h in dict.fromkeys((0, p.heads - 1)):
                of = h // (p.heads // p.kv_heads)
                scores = self.q[b, h][rows].float() @ self.k[b, of].float().T * p.head_dim**-0.5
                if masked and self.bias is not None:
                    scores = scores + self.bias[0, h][rows].float()
                elif masked:
                    scores = scores.masked_fill(~self.seen(b, h, rows), -torch.inf)
                wanted = scores.softmax(-1).nan_to_num() @ self.v[b, of].float()
                off += float((out[b, h][rows].float() - wanted).square().sum())
                size += float(wanted.square().sum())
        error = math.sqrt(off / size)
        return error if error == error else math.inf


def make_data(problem: Problem, device: torch.device, seed: int = 0) -> Data:
    """Draw the operands of a problem, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        size = (problem.batch, heads, tokens, problem.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    q, k, v = (
        draw(problem.heads, problem.rows), draw(problem.kv_heads, problem.keys), draw(problem.kv_heads, problem.keys)
    )  # fmt: skip
    bias = None
    if problem.bias is not None:
        size = (1, problem.heads, problem.rows, problem.keys)
        bias = torch.randn(size, generator=generator, device=device, dtype=problem.bias)
    return Data(problem, q, k, v, *problem.forms(device), bias)


@dataclass(frozen=True)
class MaskTime(Timed):
    """What was found of one contender on one problem. ``visited`` and ``seen`` are shares: of the tiles of 128 rows
    and keys, and of the pairs of a row and a key."""

    mask: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    contender: str
    precision: str
    status: str
    reason: str = ""
    kernel: str = ""
    visited: float | None = None
    seen: float | None = None
    tflops: float | None = None
    gbytes_s: float | None = None  # of packing


def row_of(p: Problem, contender: str, precision: str, status: str, reason: str = "", **more: Any) -> MaskTime:
    where = (p.name, p.batch, p.heads, p.kv_heads, p.rows, p.keys, p.head_dim)
    return MaskTime(*where, contender, precision, status, reason, **more)


def _ours(data: Data, mask: BlockMask | torch.Tensor | None) -> tuple[Launch, str]:
    """The whole of ``attention`` from bf16, and the kernel that it runs. UnsupportedError where none serves."""
    text = explain(data.q, data.k, data.v, mask, enable_gqa=True)
    if text.startswith("no kernel"):
        raise UnsupportedError(text)
    return (
        lambda: cast(torch.Tensor, attention(data.q, data.k, data.v, mask, enable_gqa=True)),
        text.split()[1],
    )


def _packing(seen: torch.Tensor) -> tuple[Launch, ErrorOf]:
    """The packing of a boolean tensor alone: by the kernel on a card, by torch operations elsewhere."""
    keys = seen.shape[3]

    def launch() -> torch.Tensor:
        bits = bits_of(seen, keys).bits
        if bits is None:
            raise RuntimeError("a packed tensor has bits")
        return bits

    def error(bits: torch.Tensor) -> float:
        return 0.0 if torch.equal(unpack(bits)[:, :, : seen.shape[2], :keys], seen) else math.inf

    return launch, error


def _flex(data: Data) -> Launch:
    """FlexAttention in bf16, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p, bias = data.problem, data.bias
    how: dict[str, Any] = {}
    if bias is not None:
        how["score_mod"] = lambda score, b, h, i, j: score + bias[0, h, i, j]
    else:
        batches = p.batch if data.mask.shape[0] > 1 else None
        # Made by torch operations: the assembler takes minutes for the kernel that would make it.
        how["block_mask"] = create_block_mask(data.rule, batches, None, p.rows, p.keys, device=str(data.q.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def launch() -> torch.Tensor:
        return cast(torch.Tensor, compiled(data.q, data.k, data.v, enable_gqa=True, **how))

    launch()  # compiles, which no graph can capture
    return launch


def _sdpa(data: Data) -> Launch:
    """torch's attention, whose mask has the type of the operands."""
    mask = None if data.bias is None else data.bias.to(data.q.dtype)
    return lambda: F.scaled_dot_product_attention(data.q, data.k, data.v, mask, enable_gqa=True)


def contenders(data: Data, wanted: Sequence[str]) -> tuple[list[MaskTime], list[tuple[MaskTime, Launch, ErrorOf]]]:
    """Rows of those that are not there, and the others with what they launch and how far they are off."""
    p, missing = data.problem, []
    there: list[tuple[MaskTime, Launch, ErrorOf]] = []
    for name in (name for name in wanted if name in (OF_MASKS if data.bias is None else OF_BIASES)):
        precision, kernel = ("bf16" if name in PEERS else "fp8"), ""
        try:
            if name in PEERS:
                launch = _flex(data) if name == FLEX else _sdpa(data)
            elif name in (SEEN, PACK):
                if p.rows * p.keys > MOST_CELLS:
                    continue
                seen = data.mask.dense()
                if name == PACK:
                    there.append((row_of(p, name, precision, OK), *_packing(seen)))
                    continue
                launch, kernel = _ours(data, seen)
            else:
                given = data.mask if data.bias is None else data.bias
                launch, kernel = _ours(data, given if name == OURS else None)
        except Exception as refusal:  # a contender that is not there must not end the run
            missing.append(row_of(p, name, precision, UNAVAILABLE, first_line(refusal)))
            continue
        row = row_of(p, name, precision, OK, kernel=kernel)
        there.append((row, launch, partial(data.error, masked=name != DENSE)))
    return missing, there


def measure(problem: Problem, device: torch.device, settings: Settings, wanted: Sequence[str]) -> list[MaskTime]:
    """Rows of one problem, taken in turns."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()
    data = make_data(problem, device)
    missing, there = contenders(data, wanted)
    counted, pairs = data.mask.counted(), data.pairs()
    visited = (counted.part + counted.whole) / max(1, sum(counted))
    seen = pairs / (problem.batch * problem.rows * problem.keys)
    flops = 4.0 * problem.heads * problem.head_dim * pairs
    rows = []
    for row in all_timed(there, device, settings):
        mine = flops if row.contender != DENSE else flops / seen
        us = row.median_us
        packs = row.contender == PACK
        held = math.prod(data.mask.shape[:2]) * data.mask.rows * problem.keys
        tflops = None if us is None or packs else mine / us * 1e-6
        gbytes_s = held * BYTES_PACKED / us * 1e-3 if us and packs else None
        rows.append(replace(row, visited=visited, seen=seen, tflops=tflops, gbytes_s=gbytes_s))
    return missing + rows


def record(
    path: Path,
    stamp: Mapping[str, str],
    wanted: Sequence[Problem],
    names: Sequence[str],
    device: torch.device,
    settings: Settings,
    budget: float,
    say: Callable[[str], object],
) -> tuple[list[MaskTime], int]:
    """Measure until ``budget`` seconds have passed, writing the rows so far after each problem; returns the rows, and
    how many problems are left."""
    return turns.record(
        path, stamp, MaskTime, wanted, lambda p: measure(p, device, settings, names), lambda p: p.label, "masks",
        budget, say,
    )  # fmt: skip
