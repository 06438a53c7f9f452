"""Which kernels are worth timing on which shapes, and which of them get rows in ``tuning/``. Nothing here needs torch.

A class of kernels (head_dim, mask, softmax) competes separately for each load of the dispatch table, and the generator
compares times on the same problems only: a kernel that enters a class and load is timed on all of its problems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from codegen.arch import TARGETS
from codegen.axes import Kind, Mask, Operand, Out, Scaling, Softmax
from codegen.evidence import FAMILY, Class, Problem, evidence
from codegen.families import family_of
from codegen.keys import seqlen_bucket
from codegen.legal import check
from codegen.matrix import matrix_of
from codegen.select import modelled_us
from codegen.variant import Variant

from .results import OK, Row
from .shapes import Shape, held_out

WORTH = 1.01  # a kernel enters where it beats all that are there by this, or it was noise
NOISE = 1.01  # what the new choice may take of the old one's time in the same run


@dataclass(frozen=True)
class Field:
    """The kernels of one class and load (ids), and the shapes that they are all timed on."""

    of: Class
    load: str
    kernels: tuple[str, ...]
    shapes: tuple[Shape, ...]


def problem_of(shape: Shape) -> Problem:
    """A shape as the generator's measurements know it."""
    return Problem(**{field.name: getattr(shape, field.name) for field in fields(Problem)})


def shape_of(problem: Problem, of: Class) -> Shape:
    """The reverse."""
    sizes = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    return Shape(head_dim=of[0], causal=of[1], **sizes)


def refusal(arch: str) -> str | None:
    """Why nothing can be tuned for an architecture."""
    if family_of(arch).name != FAMILY:
        cards = ", ".join(TARGETS[arch].cards)
        return f"{arch} ({cards}) has no file of measurements: the generator reads those of {FAMILY} only"
    return None


def tunable(shapes: Iterable[Shape]) -> list[Shape]:
    """Without those that nothing may be tuned on, and those whose head_dim has no kernels of its own."""
    matrix = matrix_of(FAMILY, Kind.FWD)
    served = matrix.head_dim if matrix else ()
    return [shape for shape in shapes if shape.head_dim in served and not held_out(shape)]


def classes(shapes: Iterable[Shape], softmaxes: Sequence[Softmax]) -> dict[Class, list[Shape]]:
    """The shapes of each class."""
    found: dict[Class, list[Shape]] = defaultdict(list)
    for shape in shapes:
        for softmax in softmaxes:
            found[shape.head_dim, shape.causal, softmax].append(shape)
    return dict(found)


def legal(of: Class) -> list[Variant]:
    """Every kernel of a class that the matrix declares and the rules allow, in the mode that measurements are of."""
    matrix = matrix_of(FAMILY, Kind.FWD)
    if matrix is None:
        return []
    head_dim, causal, softmax = of
    mine = replace(matrix, head_dim=(head_dim,), mask=(Mask.of(causal),), softmax=(softmax,))
    mine = replace(mine, scaling=(Scaling.BLOCK,), dtype=(Operand.E4M3,), out=(Out.BF16,))
    return [v for v in mine.points if check(v) is None]


def candidates(of: Class, shapes: Iterable[Shape], most: int, kept: Iterable[str]) -> list[Variant]:
    """The legal kernels of a class; with ``most``, of each cell that the shapes fall into those that the model puts
    first, those that were measured before, and ``kept`` (ids)."""
    every = legal(of)
    if not most:
        return every
    chosen = set(kept) | {v.id for v in every if v.shape in measured_shapes(of)}
    for seqlen, load in {(seqlen_bucket(s.seqlen_k), problem_of(s).load) for s in shapes}:
        chosen |= {v.id for v in sorted(every, key=lambda v: (modelled_us(v, seqlen, load), v.id))[:most]}
    return [v for v in every if v.id in chosen]


def measured_shapes(of: Class, load: str | None = None) -> set[str]:
    """The kernels (``Variant.shape``) that have rows for a class, or for one load of it."""
    problems = evidence().get(of, {})
    return {shape for problem, rows in problems.items() if load in (None, problem.load) for shape in rows}


def times_of(rows: Iterable[Row]) -> dict[Shape, dict[str, float]]:
    """Microseconds by shape and kernel, of right results only."""
    found: dict[Shape, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.status == OK and row.median_us is not None:
            found[row.shape][row.kernel] = row.median_us
    return dict(found)


def fields_of(of: Class, shapes: Sequence[Shape], rows: Iterable[Row], defaults: Mapping[Shape, str]) -> list[Field]:
    """What is to be timed for rows of a class, from a first look at all candidates on ``shapes``.

    In each load: the kernels that have rows there, the ones that dispatch chooses today, and on each shape the fastest
    candidate where it beats all of these. Where a kernel is new, the problems that have rows are timed once more.
    """
    ids = {v.shape: v.id for v in legal(of)}
    first = times_of(rows)
    found = []
    for load in dict.fromkeys(problem_of(shape).load for shape in shapes):
        mine = [shape for shape in shapes if problem_of(shape).load == load and shape in first]
        if not mine:
            continue
        present = {ids[shape] for shape in measured_shapes(of, load) if shape in ids}
        kernels = present | {defaults[shape] for shape in mine}
        known = frozenset(kernels)
        for shape in mine:
            times = first[shape]
            best = min(times, key=lambda kernel: (times[kernel], kernel))
            floor = min((us for kernel, us in times.items() if kernel in known), default=float("inf"))
            if times[best] * WORTH < floor:
                kernels.add(best)
        old = [] if kernels == present else [p for p in evidence().get(of, {}) if p.load == load]
        every = dict.fromkeys([*mine, *(shape_of(problem, of) for problem in sorted(old))])
        found.append(Field(of, load, tuple(sorted(kernels)), tuple(every)))
    return found


def complete(field: Field, rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """The rows of a field without kernels that lack a right result somewhere, and a line about each of those."""
    times = times_of(rows)
    lacking = {k: [s for s in field.shapes if k not in times.get(s, {})] for k in field.kernels}
    dropped = [f"{k} has no right result on {where[0].label}" for k, where in lacking.items() if where]
    wanted = set(field.shapes)
    return [r for r in rows if r.shape in wanted and r.kernel in lacking and not lacking[r.kernel]], dropped


def losers(old: Mapping[Shape, str], new: Mapping[Shape, str], times: Mapping[Shape, Mapping[str, float]]) -> list[str]:
    """A line for each shape on which the newly chosen kernel is slower than the one before, in the same run."""
    found = []
    for shape, kernel in new.items():
        before, after = times[shape].get(old[shape]), times[shape].get(kernel)
        if after is None:
            found.append(f"{shape.label}: {kernel} is chosen and was not timed")
        elif before is not None and after > before * NOISE:
            found.append(f"{shape.label}: {kernel} takes {after:.2f} us, {old[shape]} took {before:.2f}")
    return found
