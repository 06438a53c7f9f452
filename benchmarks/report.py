"""Ratios against the peers of the same run, and the tables in markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from codegen.keys import PRECISIONS

from .results import OK, UNAVAILABLE, Row
from .shapes import GRID_HEAD_DIMS, GRID_SEQLENS, HISTORY, Shape

OWN = "fp8cutlass"
CALL = "fp8cutlass_call"  # `attention` itself from bf16 tensors, captured: quantisation and all; no line of the figure
FP8_PEERS = ("fa3_fp8", "cudnn_fp8")
BF16_PEERS = ("fa3_bf16", "cudnn_bf16", "fa2_bf16")
SAGE = "sage_call"  # a whole call, as it quantises inside
CONTENDERS = (OWN, *FP8_PEERS, *BF16_PEERS, SAGE)  # the order of every table and legend

TARGETS = {64: (1.8, 1.4), 128: (1.4, 1.15), 256: (1.12, 1.0)}  # head_dim: geometric mean and minimum of the ratio
HISTORY_TARGET_US = 6.0

Cell = dict[str, Row]  # contender -> its row


def at_precision(name: str, precision: str) -> str:
    """The name of our contender at a precision of ``attention``; the first, "fast", is what the names stand for."""
    return name if precision == PRECISIONS[0] else f"{name}_{precision}"


OTHERS = tuple(at_precision(OWN, precision) for precision in PRECISIONS[1:])  # in the tables where they were measured
CALLS = tuple(at_precision(CALL, precision) for precision in PRECISIONS)


def cells(rows: Iterable[Row]) -> dict[Shape, Cell]:
    """The measured rows of each shape: those whose output was right, of our kernels the chosen one."""
    found: dict[Shape, Cell] = defaultdict(dict)
    for row in rows:
        if row.status == OK and row.chosen:
            found[row.shape][row.contender] = row
    return dict(found)


def best_peer(cell: Mapping[str, Row], peers: Sequence[str] = FP8_PEERS) -> Row | None:
    """The fastest of the peers that ran."""
    ran = [cell[name] for name in peers if name in cell]
    return min(ran, key=lambda row: row.median_us or math.inf, default=None)


def ratio(cell: Mapping[str, Row], peers: Sequence[str] = FP8_PEERS, *, quantised: bool = False) -> float | None:
    """How many times faster ours is than the fastest of ``peers``, with ``quantised`` its quantisation included; None
    where either is missing."""
    own, peer = cell.get(OWN), best_peer(cell, peers)
    if own is None or peer is None:
        return None
    us = own.with_quantisation_us if quantised else own.median_us
    return peer.median_us / us if us and peer.median_us else None


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm; ValueError for no values, or one that is not positive."""
    if not values or min(values) <= 0:
        raise ValueError(f"the geometric mean needs positive values, got {list(values)}")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class Verdict:
    """The grid cells of a head_dim against its target. ``complete`` when all cells have ours and every FP8 peer."""

    head_dim: int
    mean: float
    minimum: float
    worst: Shape
    count: int
    complete: bool

    @property
    def met(self) -> bool:
        mean, minimum = TARGETS[self.head_dim]
        return self.complete and self.mean >= mean and self.minimum >= minimum


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One verdict for each head_dim with a ratio."""
    by_shape = cells(rows)
    found = []
    for head_dim in GRID_HEAD_DIMS:
        mine = {shape: cell for shape, cell in by_shape.items() if shape.in_grid and shape.head_dim == head_dim}
        ratios = {shape: value for shape, cell in mine.items() if (value := ratio(cell)) is not None}
        if not ratios:
            continue
        full = sum(all(name in cell for name in (OWN, *FP8_PEERS)) for cell in mine.values())
        worst = min(ratios, key=ratios.__getitem__)
        values = list(ratios.values())
        found.append(
            Verdict(head_dim, geometric_mean(values), min(values), worst, len(values), full == 2 * len(GRID_SEQLENS))
        )
    return found


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" + " ---: |" * (len(header) - 1)]
    return lines + ["| " + " | ".join(line) + " |" for line in body]


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def short(seqlen: int) -> str:
    """A sequence length as tables and axes write it: 512, 16k."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def _line(label: str, row: Sequence[Cell], value: Callable[[Cell], float | None], digits: int = 0) -> list[str] | None:
    """A table line, or None where it would be empty."""
    texts = [_number(value(cell), digits) for cell in row]
    return [label, *texts] if any(texts) else None


def _call_ratio(cell: Cell, peers: Sequence[str] = BF16_PEERS) -> float | None:
    """How many times faster a whole call of ours is than the fastest of ``peers``."""
    return ratio({**cell, OWN: cell[CALL]}, peers) if CALL in cell else None


def _of(contender: str, read: Callable[[Row], float | None]) -> Callable[[Cell], float | None]:
    return lambda cell: read(cell[contender]) if contender in cell else None


def _slower(cell: Cell, name: str) -> float | None:
    """How many times as long as our fast kernel the one of this name takes."""
    us = {x: cell[x].median_us for x in (OWN, name) if x in cell}
    fast, other = us.get(OWN), us.get(name)
    return other / fast if fast and other else None


def _with_quantisation(row: Row) -> float | None:
    total = row.with_quantisation_us
    return None if total is None else row.shape.tflops(total)


def _grid_tables(by_shape: Mapping[Shape, Cell]) -> list[str]:
    lines: list[str] = []
    groups = sorted({(shape.head_dim, shape.causal) for shape in by_shape if shape.in_grid})
    for head_dim, causal in groups:
        shapes = sorted(s for s in by_shape if s.in_grid and (s.head_dim, s.causal) == (head_dim, causal))
        row = [by_shape[shape] for shape in shapes]
        body = [_line(name, row, _of(name, lambda r: r.tflops)) for name in CONTENDERS]
        body.append(_line("**ours / better FP8 peer**", row, ratio, 2))
        body.append(_line("ours / best bf16", row, partial(ratio, peers=BF16_PEERS), 2))
        body.append(
            _line("ours, quantisation included / best bf16", row, partial(ratio, peers=BF16_PEERS, quantised=True), 2)
        )
        body += [_line(f"{n}, quantisation included", row, _of(n, _with_quantisation)) for n in (OWN, *FP8_PEERS)]
        body.append(_line(f"{OWN}, us", row, _of(OWN, lambda r: r.median_us), 1))
        for name in OTHERS:
            body.append(_line(f"{name}, us", row, _of(name, lambda r: r.median_us), 1))
            body.append(_line(f"{name} / {OWN}, times its time", row, partial(_slower, name=name), 2))
        body.append(_line("a whole call of ours, us", row, _of(CALL, lambda r: r.median_us), 1))
        body += [_line(f"{name}, us", row, _of(name, lambda r: r.median_us), 1) for name in CALLS[1:]]
        body.append(_line("a whole call of ours / best bf16", row, _call_ratio, 2))
        body.append(_line(f"a whole call of ours / {SAGE}", row, partial(_call_ratio, peers=(SAGE,)), 2))
        body.append(_line("quantisation and packing, us", row, _of(OWN, lambda r: r.quantise_us), 1))
        mask = "causal" if causal else "full"
        lines += ["", f"### head_dim {head_dim}, {mask}, useful TFLOPS", ""]
        lines += table(["", *(short(shape.seqlen_k) for shape in shapes)], [line for line in body if line])
    return lines


def _other_table(by_shape: Mapping[Shape, Cell]) -> list[str]:
    shapes = sorted(shape for shape in by_shape if not shape.in_grid)
    if not shapes:
        return []
    measured = {name for shape in shapes for name in by_shape[shape]}
    extra = [name for name in (*OTHERS, *CALLS[1:]) if name in measured]
    times = {name: _of(name, lambda r: r.median_us) for name in (*CONTENDERS, CALL, *extra)}
    ratios: dict[str, Callable[[Cell], float | None]] = {
        "ours / better FP8 peer": ratio,
        "ours / best bf16": partial(ratio, peers=BF16_PEERS),
        "whole call / best bf16": _call_ratio,
        f"whole call / {SAGE}": partial(_call_ratio, peers=(SAGE,)),
    }
    ratios |= {f"{name} / {OWN}, times its time": partial(_slower, name=name) for name in OTHERS if name in measured}
    body = [
        [
            shape.label,
            *(_number(read(by_shape[shape]), 2) for read in times.values()),
            *(_number(read(by_shape[shape]), 2) for read in ratios.values()),
        ]
        for shape in shapes
    ]
    title = "### other shapes (batch, heads, seqlen, head_dim): us, and times faster"
    return ["", title, "", *table(["", *times, *ratios], body)]


def _verdict_table(rows: Sequence[Row]) -> list[str]:
    body = []
    for verdict in verdicts(rows):
        mean, minimum = TARGETS[verdict.head_dim]
        state = "met" if verdict.met else "missed" if verdict.complete else "incomplete"
        body.append(
            [
                str(verdict.head_dim),
                f"{verdict.mean:.3f}",
                f"{mean:g}",
                f"{verdict.minimum:.3f}",
                f"{minimum:g}",
                f"{short(verdict.worst.seqlen_k)} {verdict.worst.mask}",
                str(verdict.count),
                state,
            ]
        )
    lines: list[str] = []
    if body:
        header = ["head_dim", "geometric mean", "target", "minimum", "target", "worst cell", "cells", ""]
        lines += ["", "### ours / better of the FP8 peers", "", *table(header, body)]
    history = cells(rows).get(HISTORY, {}).get(OWN)
    if history is not None and history.median_us is not None:
        state = "met" if history.median_us <= HISTORY_TARGET_US else "missed"
        lines += ["", f"{HISTORY.label}: {history.median_us:.2f} us, target {HISTORY_TARGET_US:g} us: {state}"]
    return lines


def _quality_table(rows: Sequence[Row]) -> list[str]:
    """The largest error and spread of each contender, and what did not count."""
    body = []
    for name in (*CONTENDERS, *OTHERS, *CALLS):
        mine = [row for row in rows if row.contender == name and row.status != UNAVAILABLE]
        errors = [row.error for row in mine if row.error is not None]
        spreads = [row.spread for row in mine if row.spread is not None]
        if errors or spreads:
            worst = _number(max(errors, default=None), 4)
            body.append([name, worst, _number(100 * max(spreads), 1) + "%" if spreads else ""])
    lines = []
    if body:
        header = ["", "largest relative L2 error", "largest (max - min) / median of the times"]
        lines += ["", "### outputs and times", "", *table(header, body)]
    excluded: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.status != OK:
            excluded[row.contender, row.kernel, row.status, row.reason].append(row)
    for (name, kernel, status, reason), group in excluded.items():
        where = group[0].shape.label if len(group) == 1 else f"{len(group)} shapes"
        lines += ["", f"{name}{' ' + kernel if kernel else ''}: {status} on {where}: {reason}"]
    return lines


def not_timed(rows: Iterable[Any], place: Callable[[Any], str]) -> list[str]:
    """A line for each row without a time, and each reason once for contenders that are not there at all; after an
    empty one, if there are any. ``place`` says where a row was measured."""
    lines = dict.fromkeys(
        f"* {row.contender}: {row.reason}"
        if row.status == UNAVAILABLE
        else f"* {row.contender} on {place(row)}: {row.status}: {row.reason}"
        for row in rows
        if row.median_us is None
    )
    return ["", *lines] if lines else []


def heading(title: str, stamp: Mapping[str, str]) -> list[str]:
    """The lines that a report begins with: what it is about, on which card, and the stamp that says where it ran."""
    lines = [f"## {title} on {stamp.get('card', 'an unnamed card')}", ""]
    return lines + [f"* {name}: {value}" for name, value in stamp.items()]


def markdown(stamp: Mapping[str, str], rows: Sequence[Row]) -> str:
    """All tables of a run, under the stamp that says where it ran."""
    by_shape = cells(rows)
    clocks = sorted(row.clock_mhz for row in rows if row.clock_mhz is not None)
    lines = heading("Attention", stamp)
    if clocks:
        lines.append(f"* clock under load: {clocks[0]:.0f} to {clocks[-1]:.0f} MHz")
    lines += _verdict_table(rows) + _grid_tables(by_shape) + _other_table(by_shape) + _quality_table(rows)
    return "\n".join(lines) + "\n"


def brief(rows: list[Row]) -> str:
    """One line about a shape."""
    best = cells(rows).get(rows[0].shape, {})
    parts = [f"{name} {best[name].median_us:.1f}" for name in (*CONTENDERS, *OTHERS, *CALLS) if name in best]
    others = sum(not row.chosen for row in rows)
    parts += [f"{others} other kernels"] if others else []
    parts += [f"{row.contender} {row.status}" for row in rows if row.chosen and row.median_us is None]
    return f"{rows[0].shape.label}, us: {', '.join(parts)}"
