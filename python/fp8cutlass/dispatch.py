"""From a problem to a kernel: the lookup in ``dispatch.json``, of which the extension holds a compiled copy."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from .errors import NoKernelError, UnsupportedError
from .manifest import Manifest, Variant, load_manifest, load_table_data

CPU_ARCH = "sm89"  # what the emulator stands for
CPU_SM_COUNT = 58  # of an L4, the card that the sm89 table is made for
LOAD_TILE = 128  # query rows of a tile in the light/heavy rule, whatever tile the chosen kernel has
AXES = ("arch", "head_dim", "seqlen", "dtype", "out", "scaling", "causal", "precision", "load")


@dataclass(frozen=True)
class Problem:
    """What the choice of a kernel depends on. ``heads`` counts query heads; lengths are in tokens."""

    arch: str
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    dtype: str
    out: str
    scaling: str
    causal: bool
    precision: str
    sm_count: int = CPU_SM_COUNT

    @property
    def load(self) -> str:
        """``light`` when 128-row tiles cannot fill the card twice."""
        tiles = self.batch * self.heads * -(-self.seqlen_q // LOAD_TILE)
        return "light" if tiles < 2 * self.sm_count else "heavy"


@dataclass(frozen=True)
class Decision:
    """One cell of the table. Costs are microseconds of the model named by ``evidence``; without a kernel
    ``variant`` is None and ``reason`` holds the rule that refuses."""

    variant: str | None
    reason: str = ""
    criterion: str = ""
    evidence: str = ""
    cost_us: float | None = None
    runner_up: str | None = None
    runner_up_cost_us: float | None = None


class Table:
    """A total function from problems to decisions, by mixed-radix index."""

    def __init__(self, directory: Path) -> None:
        data = load_table_data(directory)
        self.axes: dict[str, list[object]] = {name: values for name, values in data["axes"]}
        if tuple(self.axes) != AXES:
            raise ValueError(f"{directory}/dispatch.json has axes {tuple(self.axes)}, expected {AXES}")
        self.cells: list[int] = data["cells"]
        if len(self.cells) != math.prod(len(values) for values in self.axes.values()):
            raise ValueError(f"{directory}/dispatch.json has {len(self.cells)} cells, which its axes do not make")
        self.decisions = [Decision(**row) for row in data["decisions"]]
        # The last bucket is unbounded and has no number.
        self._seqlen_bounds = [int(str(bound)) for bound in self.axes["seqlen"] if bound is not None]
        self._positions = {name: {value: i for i, value in enumerate(values)} for name, values in self.axes.items()}

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple(sorted(int(str(value)) for value in self.axes["head_dim"]))

    def _position(self, axis: str, value: object) -> int:
        if axis == "seqlen" and isinstance(value, int):
            return bisect_left(self._seqlen_bounds, value)
        if value not in self._positions[axis]:
            accepted = ", ".join(map(str, self.axes[axis]))
            raise UnsupportedError(f"{axis}={value!r} is not in the dispatch table; it has {accepted}")
        return self._positions[axis][value]

    def cell(self, **values: object) -> Decision:
        """Return the decision at one value per axis; ``seqlen`` is a KV length, not a bucket."""
        number = 0
        for axis in AXES:
            number = number * len(self.axes[axis]) + self._position(axis, values[axis])
        return self.decisions[self.cells[number]]

    def lookup(self, problem: Problem) -> Decision:
        """Return the decision for a problem; UnsupportedError when a value lies outside the table's axes."""
        return self.cell(
            arch=problem.arch,
            head_dim=problem.head_dim,
            seqlen=problem.seqlen_k,
            dtype=problem.dtype,
            out=problem.out,
            scaling=problem.scaling,
            causal=problem.causal,
            precision=problem.precision,
            load=problem.load,
        )

    def over_lengths(
        self, *, arch: str, head_dim: int, dtype: str, out: str, scaling: str, causal: bool, precision: str
    ) -> list[Decision]:
        """Every decision that some length and load can reach, the rest of the problem being fixed."""
        unbounded = max(self._seqlen_bounds, default=0) + 1
        return [
            self.cell(
                arch=arch,
                head_dim=head_dim,
                seqlen=seqlen,
                dtype=dtype,
                out=out,
                scaling=scaling,
                causal=causal,
                precision=precision,
                load=load,
            )
            for seqlen in (*self._seqlen_bounds, unbounded)
            for load in self.axes["load"]
        ]


@cache
def load_table(directory: Path) -> Table:
    """Read ``directory/dispatch.json`` once."""
    return Table(directory)


def pinned(manifest: Manifest, problem: Problem, kernel: str) -> Decision:
    """The decision of a caller who names the kernel; UnsupportedError lists every field that does not fit."""
    variant = manifest.find(kernel)
    wanted = {
        "kind": "fwd",
        "head_dim": problem.head_dim,
        "dtype": problem.dtype,
        "out": problem.out,
        "scaling": problem.scaling,
        "causal": problem.causal,
    }
    wrong = [
        f"kernel={kernel!r} has {name}={getattr(variant, name)!r}, the call needs {name}={value!r}"
        for name, value in wanted.items()
        if getattr(variant, name) != value
    ]
    if wrong:
        raise UnsupportedError(*wrong)
    return Decision(variant=kernel, criterion="pinned by the caller", evidence="none")


@lru_cache(maxsize=4096)
def decide(directory: Path, problem: Problem, kernel: str = "") -> tuple[Variant, int, Decision]:
    """Choose the kernel for a problem from the pair of files in ``directory``.

    Returns the variant, its number in an extension built from that manifest, and the decision behind it.
    Raises UnsupportedError with the table's reason where it holds no kernel.
    """
    manifest = load_manifest(directory)
    decision = pinned(manifest, problem, kernel) if kernel else load_table(directory).lookup(problem)
    if decision.variant is None:
        raise NoKernelError(refusal(problem.arch, manifest.profile, decision.reason))
    return manifest.find(decision.variant), manifest.index[decision.variant], decision


def refusal(arch: str, profile: str, reason: str) -> str:
    """The sentence for a cell without a kernel."""
    return f"no kernel for {arch} in profile {profile!r}: {reason}"
