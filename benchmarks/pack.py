"""What quantising and packing costs: the kernel that makes operands from bf16, in each form that changes its launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from fp8cutlass.call.plan import score_amax
from fp8cutlass.choose.target import target
from fp8cutlass.errors import UnsupportedError
from fp8cutlass.manifest import load_manifest
from fp8cutlass.native import fused
from fp8cutlass.native.fused import Operands
from fp8cutlass.timing import Capture, capture, interleave

from .data import Data, make_data
from .grid import Settings, timed
from .machine import Monitor
from .peers import Own
from .report import heading, table
from .shapes import Shape

BYTES = 3  # an element of Q, K and V: 2 are read and 1 is written


@dataclass(frozen=True)
class Form:
    """Arguments of ``attention`` that change what is launched. With ``passes`` 2 a first kernel finds maxima of groups
    larger than a block, reading their operands once more."""

    scaling: str
    smooth_k: bool = False
    hadamard: bool = False

    @property
    def label(self) -> str:
        return ", ".join([self.scaling, *(["smooth K"] if self.smooth_k else []), *["Hadamard"] * self.hadamard])


FORMS = (
    Form("block"),
    Form("block", smooth_k=True),
    Form("block", hadamard=True),
    Form("block", smooth_k=True, hadamard=True),
    Form("head"),
    Form("tensor"),
    Form("token"),  # whose V has a descale for each channel
    Form("token", smooth_k=True, hadamard=True),
)


@dataclass(frozen=True)
class PackTime:
    """Microseconds to make the operands of ``kernel`` from bf16 on one shape; ``spread`` is (max - min) / median.

    ``tb_per_s`` counts 3 bytes an element of Q, K and V, whatever ``passes`` over some of them read beyond.
    """

    form: str
    head_dim: int
    key_block: int
    batch: int
    heads: int
    seqlen: int
    passes: int
    median_us: float
    min_us: float
    spread: float
    tb_per_s: float
    launches: int
    replays: int
    clock_mhz: float | None
    power_w: float | None
    kernel: str


def tb_per_s(shape: Shape, microseconds: float) -> float:
    """10^12 bytes a second that an operand traffic of 3 bytes an element is."""
    rows = shape.heads * shape.seqlen_q + 2 * shape.kv_heads * shape.seqlen_k
    return BYTES * shape.batch * rows * shape.head_dim / microseconds * 1e-6


@dataclass(frozen=True)
class Ready:
    """A form that can be launched: ``launch`` writes every byte of ``made``."""

    row: PackTime
    made: Operands
    launch: Callable[[], object]


def prepare(form: Form, data: Data) -> Ready:
    """Allocate the operands of the kernel that dispatch chooses. UnsupportedError where there is none."""
    at = target(data.q.device)
    variant, _ = Own(scaling=form.scaling).choose(data, at)
    granularity = load_manifest(at.directory).scaling[form.scaling]
    made = fused.empty_operands(
        data.q,
        data.k,
        data.v,
        head_dim=variant.head_dim,
        key_block=variant.key_block,
        granularity=granularity,
        smooth_k=form.smooth_k,
    )

    def launch() -> None:
        fused.fill(
            made,
            data.q,
            data.k,
            data.v,
            key_block=variant.key_block,
            amax=score_amax(variant),
            granularity=granularity,
            negate_q=False,
            hadamard=form.hadamard,
        )

    shape = data.shape
    passes = 2 if set(granularity.values()) & set(fused.BEYOND_BLOCKS) else 1
    where = (shape.head_dim, variant.key_block, shape.batch, shape.heads, shape.seqlen_q)
    row = PackTime(form.label, *where, passes, 0.0, 0.0, 0.0, 0.0, 0, 0, None, None, variant.id)
    return Ready(row, made, launch)


def _tensors(made: Operands) -> list[torch.Tensor]:
    return [x for field in fields(made) if (x := getattr(made, field.name)) is not None]


def check(ready: Ready, replay: Callable[[], object], synchronise: Callable[[], object]) -> str | None:
    """What is wrong with a replay: it must write what an eager launch writes, over bytes that are no result. The bits
    themselves are held to the CPU's by tests/gpu/test_gpu_pack.py."""
    ready.launch()
    synchronise()
    expected = [x.clone() for x in _tensors(ready.made)]
    for x in _tensors(ready.made):
        x.view(torch.uint8).fill_(0xFF)
    replay()
    synchronise()
    wrong = sum(
        int((x.view(torch.uint8) != y.view(torch.uint8)).sum())
        for x, y in zip(_tensors(ready.made), expected, strict=True)
    )
    return f"{wrong} bytes of a replay are not those of an eager launch" if wrong else None


def measure(shape: Shape, settings: Settings, forms: Sequence[Form] = FORMS) -> tuple[list[PackTime], list[str]]:
    """The time of each form on a shape, taken in turns, and a line for each that did not run or was wrong."""
    data = make_data(shape)
    running: list[tuple[PackTime, Capture]] = []
    failed = []
    for form in forms:
        try:
            ready = prepare(form, data)
            recorded = capture(ready.launch, settings.target_us)
            reason = check(ready, recorded.graph.replay, torch.cuda.synchronize)
        except (UnsupportedError, RuntimeError) as failure:
            reason = str(failure).strip().splitlines()[0]
        if reason is None:
            running.append((ready.row, recorded))
        else:
            failed.append(f"{form.label} at {shape.label}: {reason}")
    monitor = Monitor()
    timings = interleave([recorded for _, recorded in running], settings.replays, monitor.sample)
    found = [
        replace(row, tb_per_s=tb_per_s(shape, timing.median_us), **timed(timing, monitor))
        for (row, _), timing in zip(running, timings, strict=True)
    ]
    return found, failed


def brief(shape: Shape, found: Sequence[PackTime]) -> str:
    """One line about a shape."""
    return f"{shape.label}, us: " + ", ".join(f"{row.form} {row.median_us:.1f}" for row in found)


def markdown(stamp: Mapping[str, str], found: Sequence[PackTime], failed: Sequence[str]) -> str:
    """The table, under the stamp that says where it comes from."""
    plain = {row.head_dim: row.median_us for row in found if row.form == FORMS[0].label}
    body = []
    for row in found:
        beside = f"{row.median_us / plain[row.head_dim]:.2f}" if row.head_dim in plain else ""
        cells = [f"{row.median_us:.1f}", f"{100 * row.spread:.1f}%", f"{row.tb_per_s:.2f}", beside]
        body.append([row.form, str(row.head_dim), str(row.key_block), str(row.passes), *cells])
    lines = heading("Quantising and packing", stamp)
    shapes = dict.fromkeys(f"({row.batch}, {row.heads}, {row.seqlen}, {row.head_dim})" for row in found)
    lines += [
        "",
        f"Q, K and V of {', '.join(shapes)}, bf16, to the operands of the kernel that dispatch chooses. TB/s:",
    ]
    lines += [f"{BYTES} bytes an element, whatever a first pass over some operands reads beyond.", ""]
    header = ["scaling", "head_dim", "key block", "passes", "us", "spread", "TB/s", f"times {FORMS[0].label}"]
    lines += [*table(header, body), *(f"\nnot timed: {line}" for line in failed)]
    return "\n".join(lines) + "\n"
