"""From a problem to a kernel: what the caller pins, what was measured here, or what the table says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from .. import log
from ..errors import NoKernelError, UnsupportedError
from ..manifest import KEY_BLOCK, Manifest, Variant, load_manifest
from . import tuned
from .problem import Decision, Problem
from .reuse import KVForm, misfits, readable
from .special import PRECISE_ENOUGH, Asked, for_special, special_kernels
from .stand_in import NO_NUMBER, no_integer_kernel, stand_in, stands_in
from .table import Table
from .why import explained, load_times

_logger = log.requested("dispatch")  # None unless FP8CUTLASS_LOG asks for it
_logged: set[tuple[Problem, Decision]] = set()  # grows only while something is logged


@cache
def load_table(directory: Path) -> Table:
    """Read ``directory/table.txt`` once."""
    return Table(directory)


def padded_head_dim(head_dim: int, accepted: Sequence[int]) -> int:
    """The smallest of the kernels' head dims that serves this one by zero padding."""
    if not 0 < head_dim <= accepted[-1]:
        kind = NoKernelError if head_dim > 0 else UnsupportedError
        raise kind(
            f"head_dim must lie in 1..{accepted[-1]}, got {head_dim}; kernels are for "
            f"{', '.join(map(str, accepted))}, others are padded up to the next"
        )
    return next(served for served in accepted if served >= head_dim)


def pinned(manifest: Manifest, problem: Problem, kernel: str) -> Decision:
    """The decision of a caller who names the kernel; UnsupportedError lists every field that does not fit."""
    variant = manifest.find(kernel)
    wanted: dict[str, object] = {"dtype": problem.dtype, "out": problem.out}
    if problem.special:
        asked = Asked.by(problem)
        wanted |= {"kind": asked.kind, "mask": asked.band, "walk": "dense"}
    else:
        wanted |= {"kind": "fwd", "causal": problem.causal}
    wrong = [
        f"kernel={kernel!r} has {name}={getattr(variant, name)!r}, the call needs {name}={value!r}"
        for name, value in wanted.items()
        if getattr(variant, name) != value
    ]
    if not 0 < problem.head_dim <= variant.head_dim:
        wrong.append(
            f"kernel={kernel!r} is for head_dim 1..{variant.head_dim}, the call needs head_dim={problem.head_dim}"
        )
    if problem.scaling not in variant.scalings:
        served = " or ".join(map(repr, variant.scalings))
        wrong.append(f"kernel={kernel!r} has scaling {served}, the call needs scaling={problem.scaling!r}")
    precise = PRECISE_ENOUGH.get(problem.precision, ())
    if variant.softmax not in precise:
        wrong.append(
            f"kernel={kernel!r} has softmax={variant.softmax!r}, precision={problem.precision!r} takes "
            f"{' or '.join(map(repr, precise)) or 'none'}"
        )
    if not _fits_blocks(variant, problem):
        wrong.append(
            f"kernel={kernel!r} has key_block={variant.key_block}, FP8 operands with scaling='block' have a descale "
            f"per {KEY_BLOCK} keys: pass bf16 or fp16, or scaling='head' or 'tensor'"
        )
    if wrong:
        raise UnsupportedError(*wrong)
    return Decision(variant=kernel, criterion="pinned by the caller", evidence="none")


def serving(manifest: Manifest, problem: Problem, chosen: str) -> list[Variant]:
    """Every kernel that serves the problem, of the family and the head_dim of the table's choice."""
    first = manifest.find(chosen)
    found = []
    for variant in manifest.variants:
        if (variant.family, variant.head_dim) == (first.family, first.head_dim) and problem.arch in variant.targets:
            with suppress(UnsupportedError):
                pinned(manifest, problem, variant.id)
                found.append(variant)
    return found


def unchosen(manifest: Manifest, problem: Problem, chosen: str) -> Iterator[Decision]:
    """Every kernel that serves the problem, the fastest softmax first, for keys that no kernel near in the table reads.

    Some are there to read keys that were packed for a call with the other mask; no cell of the table need choose those.
    """
    fast = PRECISE_ENOUGH[problem.precision].index
    for v in sorted(serving(manifest, problem, chosen), key=lambda v: (fast(v.softmax), v.cluster != "solo")):
        yield Decision(variant=v.id, evidence="none")


def _fits_blocks(variant: Variant, problem: Problem) -> bool:
    """False where the operands come with a descale for other groups of keys than the kernel reads."""
    by_block = problem.quantised and problem.scaling == "block" and not problem.lowered
    return variant.key_block == KEY_BLOCK or not by_block


@lru_cache(maxsize=4096)
def decide(
    directory: Path, problem: Problem, kernel: str = "", form: KVForm | None = None
) -> tuple[Variant, int, Decision]:
    """Choose the kernel for a problem from the files in ``directory``; one that reads keys and values of
    ``form`` where they are packed already.

    Returns the variant, whose head_dim is that of the problem or wider, its number in an extension built from that
    manifest, and the decision behind it. What ``fp8cutlass.tune`` measured goes before the table. Raises
    UnsupportedError with the table's reason where it holds no kernel.
    """
    manifest, key = load_manifest(directory), problem
    if not kernel and stands_in(manifest, problem.arch, problem.precision):
        if form is not None:
            raise NoKernelError(no_integer_kernel(problem.arch, problem.precision))
        base, _, decision = decide(directory, replace(problem, precision="accurate", dtype="e4m3"))
        variant = stand_in(base, problem.precision)
        return variant, NO_NUMBER, replace(decision, variant=variant.id, criterion=f"the tiles of {base.id}")
    if kernel:
        decision = pinned(manifest, problem, kernel)
    elif problem.special:
        decision = _for_special(manifest, problem, form)
    elif form is None and (measured := _tuned(manifest, problem)) is not None:
        decision = measured
    else:
        table = load_table(directory)
        columns = problem.head_dim if form is None else form.head_dim
        key = replace(problem, head_dim=padded_head_dim(columns, manifest.head_dims_of(problem.arch, problem.dtype)))
        cell = table.lookup(key)
        if cell.variant is not None and not _fits_blocks(manifest.find(cell.variant), problem):
            cell = table.lookup(replace(key, precision="accurate"))  # of blocks that divide KEY_BLOCK
        decision = load_times(directory).explain(cell, manifest)
    if decision.variant is None:
        raise NoKernelError(refusal(problem.arch, manifest.profile, decision.reason))
    if form is not None and (kernel or not problem.special):  # a window's kernel was chosen by the form
        near = explained(load_table(directory).near(key), manifest)
        rest = unchosen(manifest, problem, decision.variant)
        decision = readable(decision, near, rest, manifest, form, problem.scaling, bool(kernel))
    if _logger is not None and (problem, decision) not in _logged:
        _logged.add((problem, decision))
        _logger.info("%s: %s; %s; evidence: %s", problem, decision.variant, decision.criterion, decision.evidence)
    return manifest.find(str(decision.variant)), manifest.index[str(decision.variant)], decision


def _for_special(manifest: Manifest, problem: Problem, form: KVForm | None) -> Decision:
    head_dim = problem.head_dim if form is None else form.head_dim
    padded = padded_head_dim(head_dim, manifest.head_dims_of(problem.arch, problem.dtype))
    served = special_kernels(manifest, problem.arch, padded, Asked.by(problem))
    served = [v for v in served if _fits_blocks(v, problem)]
    decision = for_special(problem, served)
    if form is not None and served:
        reading = [v for v in served if not misfits(v, form, problem.scaling)]
        if not reading:
            needs = f"{served[0].id} reads {', '.join(misfits(served[0], form, problem.scaling))}"
            remedy = f"pack key and value with key_block={served[0].key_block}"
            raise NoKernelError(f"no kernel for this call reads the packed keys: {needs}", remedy)
        decision = for_special(problem, reading)
    return decision


def _tuned(manifest: Manifest, problem: Problem) -> Decision | None:
    """What ``fp8cutlass.tune`` measured for exactly this problem, on a card of this name with this library."""
    if not problem.card or (row := tuned.find(manifest.directory, vars(problem))) is None:
        return None
    path, _ = tuned.loaded()
    try:
        pinned(manifest, problem, row.kernel)
    except UnsupportedError as error:
        warnings.warn(f"{path}: a row does not fit its problem and is ignored: {error}", UserWarning, stacklevel=2)
        return None
    kept = "the table's choice" if row.kernel == row.default else f"the table chose {row.default}"
    return Decision(
        variant=row.kernel,
        criterion=f"fastest whole call of {row.kernels} kernels; {kept}",
        evidence=f"measured on {problem.card} by fp8cutlass.tune, in {path}",
        cost_us=round(row.us, 2),
        runner_up=row.runner_up,
        runner_up_cost_us=None if row.runner_up_us is None else round(row.runner_up_us, 2),
    )


def forget() -> None:
    """Choose anew: after ``tune`` has stored something, or the file that it writes has changed."""
    decide.cache_clear()
    tuned.loaded.cache_clear()


def refusal(arch: str, profile: str, reason: str) -> str:
    """The sentence for a cell without a kernel."""
    return f"no kernel for {arch} in profile {profile!r}: {reason}"
