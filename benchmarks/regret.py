"""How far the chosen kernel is from the best of those that were timed on the same shape in the same run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from codegen.evidence import Problem, evidence

from .report import OWN, geometric_mean, heading, table
from .results import OK, Row
from .shapes import Shape, held_out

CLOSE = 1.03  # the chosen kernel may take this much of the best one's time
SHARE = 0.95  # of the shapes


@dataclass(frozen=True)
class Choice:
    """One shape: the kernel that dispatch chose and the fastest one, of ``rivals`` that were tried.

    ``chosen_us`` is infinite where the chosen kernel failed or was wrong: that is no choice at all.
    """

    shape: Shape
    chosen: str
    chosen_us: float
    best: str
    best_us: float
    rivals: int

    @property
    def loss(self) -> float:
        """Time over the best one's."""
        return self.chosen_us / self.best_us

    @property
    def close(self) -> bool:
        return self.loss <= CLOSE


def judge(rows: Iterable[Row]) -> list[Choice]:
    """A choice for each shape on which a kernel of ours was timed."""
    mine: dict[Shape, list[Row]] = defaultdict(list)
    for row in rows:
        if row.contender == OWN:
            mine[row.shape].append(row)
    found = []
    for shape, of in mine.items():
        times = {row.kernel: row.median_us for row in of if row.status == OK and row.median_us is not None}
        if not times:
            continue
        chosen = next((row.kernel for row in of if row.chosen), "")
        best = min(times, key=lambda kernel: times[kernel])
        found.append(Choice(shape, chosen, times.get(chosen, math.inf), best, times[best], len(of)))
    return found


def tuned(shape: Shape) -> bool:
    """Whether the generator's measurements have rows of this shape."""
    problem = Problem(**{field.name: getattr(shape, field.name) for field in fields(Problem)})
    return any(problem in on for of, on in evidence().items() if of[:2] == (shape.head_dim, shape.causal))


def groups(choices: Sequence[Choice]) -> dict[str, list[Choice]]:
    """Those with something to choose from, and parts of them by what the choice could have known."""
    choices = [choice for choice in choices if choice.rivals > 1]
    on = {choice.shape for choice in choices if tuned(choice.shape)}
    return {
        "all shapes": choices,
        "tuned on": [c for c in choices if c.shape in on],
        "not tuned on": [c for c in choices if c.shape not in on],
        "held out by their hash": [c for c in choices if held_out(c.shape)],
    }


def share(choices: Sequence[Choice]) -> float:
    """Which part of the choices is close; 1 of none."""
    return sum(choice.close for choice in choices) / len(choices) if choices else 1.0


def met(choices: Sequence[Choice]) -> bool:
    """Whether enough are close, in every group that has any; where nothing was to be chosen, that is not enough."""
    found = groups(choices)
    return bool(found["all shapes"]) and all(share(group) >= SHARE for group in found.values())


def markdown(stamp: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Shares by group, and every shape whose kernel was not close, under the stamp of the run."""
    choices = judge(rows)
    lines = heading("The chosen kernel against every built one,", stamp)
    header = [
        "",
        "shapes",
        f"within {100 * (CLOSE - 1):.0f}%",
        "share",
        "mean loss",
        "largest loss",
        "kernels a shape",
    ]
    body = []
    for name, group in groups(choices).items():
        losses = [choice.loss for choice in group if choice.loss < math.inf]
        body.append(
            [
                name,
                str(len(group)),
                str(sum(choice.close for choice in group)),
                f"{100 * share(group):.1f}%" if group else "",
                f"{geometric_mean(losses):.3f}" if losses else "",
                f"{max(choice.loss for choice in group):.3f}" if group else "",
                f"{sum(choice.rivals for choice in group) / len(group):.1f}" if group else "",
            ]
        )
    lines += ["", *table(header, body)]
    lines += ["", f"asked for: {100 * SHARE:.0f}% in every group: {'met' if met(choices) else 'missed'}"]
    if alone := sum(choice.rivals == 1 for choice in choices):
        lines += ["", f"{alone} shapes have one kernel and do not count"]
    losers = sorted((choice for choice in choices if not choice.close), key=lambda choice: -choice.loss)
    if losers:
        lines += ["", "### not close", ""]
        lines += table(
            ["shape", "loss", "us", "best us", "", "chosen, and the best"],
            [
                [
                    choice.shape.label,
                    f"{choice.loss:.3f}",
                    f"{choice.chosen_us:.2f}",
                    f"{choice.best_us:.2f}",
                    "tuned on" if tuned(choice.shape) else "held out" if held_out(choice.shape) else "",
                    f"{choice.chosen or 'none'}<br>{choice.best}",
                ]
                for choice in losers
            ],
        )
    wrong = [row for row in rows if row.contender == OWN and row.status != OK]
    lines += [f"\n{row.kernel or OWN}: {row.status} on {row.shape.label}: {row.reason}" for row in wrong]
    return "\n".join(lines) + "\n"
