"""Tables and figure of `model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..plot import PlotError, _title, open_pyplot
from ..report import heading, table
from ..results import UNAVAILABLE
from .dense import BACKENDS, HOST_SDPA, OURS, WITHOUT
from .measure import ModelTime

SDPA = (*BACKENDS, HOST_SDPA)
COLOURS = {"attention": "tab:red", "the rest": "tab:gray"}


def of_problem(rows: Sequence[ModelTime]) -> dict[str, dict[str, ModelTime]]:
    """The measured rows by problem and contender."""
    found: dict[str, dict[str, ModelTime]] = {}
    for row in rows:
        if row.median_us is not None:
            found.setdefault(row.problem, {})[row.contender] = row
    return found


def best_sdpa(cell: Mapping[str, ModelTime]) -> ModelTime | None:
    """The fastest backend of torch's."""
    return min((cell[name] for name in SDPA if name in cell), key=lambda row: row.median_us or 0.0, default=None)


def speedup(row: ModelTime, base: ModelTime | None) -> float | None:
    """How many times as long the forward of ``base`` takes."""
    return base.median_us / row.median_us if base and base.median_us and row.median_us else None


def _text(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None, digits: int = 1) -> str:
    return _text(None if value is None else 100 * value, digits, "%")


def _body(cell: Mapping[str, ModelTime]) -> list[list[str]]:
    base, body = best_sdpa(cell), []
    for row in cell.values():
        attends = row.contender != WITHOUT
        errors = [_percent(row.call_error, 2), _percent(row.error, 2)]
        compared = [_percent(row.share, 0), _text(speedup(row, base)), *errors] if attends else [""] * 4
        times = [_text((row.median_us or 0.0) * 1e-3), _text(row.model_ms)]
        body.append([row.contender, row.precision, *times, *compared])
    return body


def _sizes(row: ModelTime) -> str:
    keys = "" if row.keys == row.tokens else f" against {row.keys} keys"
    return f"{row.problem}: {row.layers} of {row.of} layers timed, {row.batch} x {row.tokens} tokens{keys}"


def markdown(stamp: Mapping[str, str], rows: Sequence[ModelTime]) -> str:
    """A table for each model, under the stamp that says where it ran."""
    lines = [
        *heading("Whole forwards", stamp),
        "",
        "Random weights in bf16; layers are torch operations, in a CUDA graph on a card. `without` is the same forward",
        "without attention and without append. What a forward takes longer than that is the share of attention. All",
        "layers: the time of the timed ones, scaled. The speedup is over the fastest backend of torch's SDPA. The",
        "error is that of the result against a forward with float32 attention: of what the blocks add to their input,",
        "or of the logits. That of a call is the largest of all layers, each on what float32 attention gave so far.",
        "Random weights attend to nearly all keys alike, so that errors of a trained model differ.",
    ]
    header = ["attention", "operands", "forward, ms", "all layers, ms", "attention's share", "speedup"]
    header += ["error of a call", "error"]
    for cell in of_problem(rows).values():
        lines += ["", f"### {_sizes(next(iter(cell.values())))}", "", *table(header, _body(cell))]
    missing = dict.fromkeys(
        f"* {row.contender}: {row.reason}"
        if row.status == UNAVAILABLE
        else f"* {row.contender}, {row.problem}: {row.status}: {row.reason}"
        for row in rows
        if row.median_us is None
    )
    return "\n".join([*lines, *(["", *missing] if missing else [])]) + "\n"


def draw(stamp: Mapping[str, str], rows: Sequence[ModelTime], path: Path) -> None:
    """Bars of the time of all layers, attention and the rest, a panel for each model. PlotError without matplotlib or
    without rows."""
    found = of_problem(rows)
    if not found:
        raise PlotError("no forward was measured: nothing to plot")
    pyplot = open_pyplot()
    figure, axes = pyplot.subplots(1, len(found), figsize=(4.2 * len(found) + 1, 4.2), squeeze=False)
    handles = {}
    for ax, cell in zip(axes[0], found.values(), strict=True):
        bars = [row for row in cell.values() if row.contender != WITHOUT]
        names = [row.contender for row in bars]
        whole = [row.model_ms or 0.0 for row in bars]
        rest = [ms * (1 - (row.share or 0.0)) for row, ms in zip(bars, whole, strict=True)]
        handles["the rest"] = ax.bar(names, rest, color=COLOURS["the rest"])
        attention = [ms - less for ms, less in zip(whole, rest, strict=True)]
        handles["attention"] = ax.bar(names, attention, bottom=rest, color=COLOURS["attention"])
        for at, row in enumerate(bars):
            if (times := speedup(row, best_sdpa(cell))) and row.contender == OURS:
                ax.text(at, whole[at], f"{times:.2f}x", ha="center", va="bottom", fontsize=9)
        ax.set_title(_sizes(bars[0] if bars else next(iter(cell.values()))), fontsize=7)
        ax.set_ylabel("all layers, ms")
        ax.tick_params(axis="x", labelsize=7)
        ax.margins(y=0.1)
    _title(figure, stamp)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
