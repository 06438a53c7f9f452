"""Builds candidates, checks them against the emulator, times them, and writes their rows for the generator."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from codegen import evidence as measurements
from codegen.axes import Softmax
from codegen.evidence import Class
from codegen.families import FAMILIES
from codegen.keys import precision_of
from codegen.variant import parse_id
from fp8cutlass import attention
from fp8cutlass.accuracy.measures import relative_l2
from fp8cutlass.choose.dispatch import decide
from fp8cutlass.choose.problem import Problem
from fp8cutlass.manifest import load_manifest
from fp8cutlass.native import extension

from . import evidence, machine
from .candidates import candidates, classes, complete, fields_of, losers, times_of
from .grid import QUICK, Settings, measure
from .machine import ROOT
from .peers import Own
from .report import brief
from .results import Row, Writer, read
from .shapes import Shape

WORK = ROOT / "build" / "tune"
GENERATED = ROOT / "generated"
CARD = FAMILIES[measurements.FAMILY].card  # whose loads the table is made for

# The kernels are held to 0.8% of the emulator (tests/gpu/test_gpu_variants.py). Beyond 128 columns every further step
# of 32 products may round an f16 score the other way.
EMULATOR_L2 = 8e-3
SMALL = (1, 2, 300)  # batch, heads, tokens: a tail in both directions

# For an estimate: what capturing and checking a kernel takes, launches of a long problem, and useful rate of an H200.
KERNEL_S, LAUNCHES, FLOPS = 0.06, 20, 8e14
EMULATOR_S = 0.3  # of one kernel, on two cores

Say = Callable[[str], object]


class TuneError(RuntimeError):
    """Nothing was changed; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What is to be built and timed: the ids of each class's candidates, its shapes, and today's choice for each."""

    arch: str
    shapes: Mapping[Class, Sequence[Shape]]
    kernels: Mapping[Class, Sequence[str]]
    defaults: Mapping[Class, Mapping[Shape, str]]

    @property
    def ids(self) -> list[str]:
        """Every kernel to build, sorted."""
        return sorted({kernel for of in self.kernels.values() for kernel in of})

    @property
    def seconds(self) -> float:
        """About what checking all of them and the first look take, without building; the second is shorter."""
        return EMULATOR_S * len(self.ids) + sum(
            len(self.kernels[of]) * max(KERNEL_S, LAUNCHES * shape.flops / FLOPS)
            for of, shapes in self.shapes.items()
            for shape in shapes
        )


def choices(directory: Path, arch: str, of: Class, shapes: Iterable[Shape]) -> dict[Shape, str]:
    """What the table in ``directory`` chooses for bf16 operands on its model card, where that is of the class."""
    found = {}
    for shape in shapes:
        problem = Problem(
            arch=arch,
            head_dim=shape.head_dim,
            seqlen_q=shape.seqlen_q,
            seqlen_k=shape.seqlen_k,
            batch=shape.batch,
            heads=shape.heads,
            dtype="e4m3",
            out="bf16",
            scaling="block",
            causal=shape.causal,
            precision=precision_of(of[2]),
            sm_count=CARD.sms,
        )
        variant = decide(directory, problem)[0]
        if variant.softmax == of[2] and variant.family == arch:
            found[shape] = variant.id
    return found


def make_plan(arch: str, shapes: Sequence[Shape], softmaxes: Sequence[Softmax], most: int) -> Plan:
    """Candidates and defaults of the shapes; a class that today's table has no kernel of is left out."""
    mine, kernels, defaults = {}, {}, {}
    for of, its in classes(shapes, softmaxes).items():
        if chosen := choices(GENERATED, arch, of, its):
            mine[of], defaults[of] = list(chosen), chosen
            kernels[of] = [v.id for v in candidates(of, chosen, most, chosen.values())]
    return Plan(arch, mine, kernels, defaults)


def _run(*command: str | Path) -> None:
    """A step that writes to the terminal; TuneError where it fails."""
    if subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode:
        raise TuneError(f"{' '.join(map(str, command[:4]))} failed")


def build(plan: Plan, jobs: int | None, say: Say) -> Path:
    """Render and compile the candidates, unless a library with all of them is there; returns the library."""
    library, generated = WORK / "fp8cutlass" / "_C.so", WORK / "generated"
    manifest = library.parent / "_built" / "manifest.json"
    if library.is_file() and manifest.is_file() and set(plan.ids) <= set(load_manifest(manifest.parent).index):
        say(f"{library} holds all {len(plan.ids)} candidates")
        return library
    only = [part for kernel in plan.ids for part in ("--only", kernel)]
    _run(sys.executable, "-m", "codegen", "--arch", plan.arch, "--out", generated, *only)
    script: list[str | Path] = [sys.executable, ROOT / "scripts" / "build_extension.py", "--generated", generated]
    _run(*script, "--build-dir", WORK, "--dest", library.parent, *(["--jobs", str(jobs)] if jobs else []))
    return library


def use(library: Path) -> None:
    """Make this process answer from a library, on the CPU as well; none may be loaded yet."""
    os.environ["FP8CUTLASS_LIBRARY"] = str(library)
    os.environ["FP8CUTLASS_GENERATED"] = str(library.parent / "_built")
    extension.load()


def disagreement(kernel: str, head_dim: int, causal: bool) -> str | None:
    """What is wrong with a kernel's result on a small problem, against the emulator; None where it is right."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, seqlen = SMALL
    size = (batch, heads, seqlen, head_dim)
    q, k, v = (torch.randn(size, generator=generator).to(torch.bfloat16) for _ in range(3))
    limit = EMULATOR_L2 * max(1.0, head_dim / 128) ** 0.5
    expected = attention(q, k, v, is_causal=causal, kernel=kernel)
    try:
        out = attention(q.cuda(), k.cuda(), v.cuda(), is_causal=causal, kernel=kernel)
    except RuntimeError as failure:
        return str(failure).splitlines()[0]
    if not isinstance(out, torch.Tensor) or not isinstance(expected, torch.Tensor):
        raise TypeError("attention returned more than its output")
    error = relative_l2(out.cpu(), expected)
    return None if error <= limit else f"relative L2 {error:.3g} from the emulator, the limit is {limit:.2g}"


def _timed(
    shapes: Iterable[Shape], kernels: Sequence[str], defaults: Mapping[Shape, str], settings: Settings
) -> Iterable[list[Row]]:
    for shape in shapes:
        default = defaults.get(shape, kernels[0])
        yield measure(shape, [Own(kernel=default, every=True, among=kernels)], settings)


def time_all(
    plan: Plan, right: set[str], writer: Writer, deadline: float, say: Say
) -> tuple[list[Row], dict[Class, dict[Shape, str]]]:
    """Both rounds: every candidate briefly, then those that may get rows at length. Rows of the second round, and the
    shapes that they speak for with their defaults. TuneError where the time does not suffice."""
    rows: list[Row] = []
    tuned: dict[Class, dict[Shape, str]] = {}
    for of in plan.shapes:
        kernels = [kernel for kernel in plan.kernels[of] if kernel in right]
        defaults = plan.defaults[of]
        first: list[Row] = []
        if wrong := sorted({*defaults.values()} - right):
            raise TuneError(f"{wrong[0]} is today's choice, and its result is wrong")
        for found in _timed(list(defaults), kernels, defaults, QUICK):
            first += found
            say(brief(found))
            if time.monotonic() > deadline:
                raise TuneError("the time is spent: fewer shapes, or --most, or a larger --budget")
        for field in fields_of(of, list(defaults), first, defaults):
            if wrong := sorted({*field.kernels} - right):
                raise TuneError(f"{wrong[0]} has rows, and its result is wrong")
            say(f"{of[0]} {of[1]} {of[2]} {field.load}: {len(field.kernels)} kernels on {len(field.shapes)} shapes")
            second: list[Row] = []
            for found in _timed(field.shapes, field.kernels, defaults, Settings()):
                second += found
                writer.write(found)
                if time.monotonic() > deadline:
                    raise TuneError("the time is spent: fewer shapes, or --most, or a larger --budget")
            kept, dropped = complete(field, second)
            for line in dropped:
                say(f"left out: {line}")
            rows += kept
            there = {row.shape for row in kept} & set(defaults)
            tuned.setdefault(of, {}).update({shape: defaults[shape] for shape in there})
    return rows, tuned


def adopt(plan: Plan, stamp: Mapping[str, str], rows: Sequence[Row], tuned: Mapping[Class, Mapping[Shape, str]]) -> int:
    """Put rows into the generator's file and regenerate; returns how many. TuneError where the file would have holes,
    or a shape would get a slower kernel than it has: nothing is changed then."""
    found = evidence.records(stamp, rows)
    path = measurements.PATH
    with path.open(newline="", encoding="utf-8") as file:
        before = list(csv.DictReader(file))
    backup = path.with_suffix(".before")
    shutil.copyfile(path, backup)
    adopted = False
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            evidence.write(file, [*before, *found])
        try:
            measurements.read(path)
        except measurements.EvidenceError as error:
            raise TuneError(str(error)) from error
        trial = WORK / "table"
        _run(sys.executable, "-m", "codegen", "--out", trial)
        slower: list[str] = []
        times = times_of(rows)
        for of, old in tuned.items():
            slower += losers(old, choices(trial, plan.arch, of, old), times)
        if slower:
            raise TuneError("the new table would be slower than the old one: " + "; ".join(slower))
        adopted = True
    finally:
        if not adopted:
            shutil.copyfile(backup, path)
        backup.unlink()
    _run(sys.executable, "-m", "codegen")
    return len(found)


def refuse_files(rows: Path) -> None:
    """TuneError where one of the files that a measurement goes to could not take it: it would be lost. ``rows`` is
    overwritten where it holds rows of a run, and is not where it is something else."""
    try:
        measurements.read(measurements.PATH)
        if rows.exists():
            read(rows)
    except (measurements.EvidenceError, OSError, ValueError) as error:
        raise TuneError(f"nothing is measured, as it could not be stored: {error}") from error


def tune_on_card(
    plan: Plan, library: Path, budget: float, folder: Callable[[Mapping[str, str]], Path], commit: str, say: Say
) -> int:
    """Check, time and adopt what is built, within ``budget`` seconds; the rows of the second round go to ``tune.csv``
    in the folder of the card. Returns how many rows the generator got."""
    deadline = time.monotonic() + budget
    use(library)
    here = extension.device_arch(torch.device("cuda"))
    if here != plan.arch:
        raise TuneError(f"this card runs {here}, not {plan.arch}")
    stamp = machine.stamp(commit)
    path = folder(stamp) / "tune.csv"
    refuse_files(path)
    right = set()
    for kernel in plan.ids:
        v = parse_id(kernel)
        if reason := disagreement(kernel, v.head_dim, v.causal):
            say(f"left out: {kernel}: {reason}")
        else:
            right.add(kernel)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows, tuned = time_all(plan, right, Writer(file, stamp), deadline, say)
    return adopt(plan, stamp, rows, tuned)
