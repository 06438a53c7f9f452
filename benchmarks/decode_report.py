"""Tables and figure of `decode`, from its rows or from its CSV."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .decode import DecodeTime
from .plot import PlotError, _title, open_pyplot
from .report import heading, table
from .results import UNAVAILABLE
from .steps import SKEWED

OURS, CUT, CALL, STEP = "ours", "ours_cut", "ours_call", "ours_step"
LAYOUTS = {"ours_p16": "pages of 16", "ours_hnd": "HND", "ours_native": "native"}
PARTS = ("append_nhd", "append_native", "quantise_q")  # of a step, without attention
PEERS = {
    "fp8": ("xqa_fp8", "fa3_fp8", "fa3_fp8_call", "flashinfer_fp8", "flashinfer_fa3_fp8"),
    "bf16": ("xqa_bf16", "fa3_bf16", "fa3_bf16_call", "flashinfer_bf16", "flashinfer_fa3_bf16"),
}
LINKS = {"csv": ".csv", "tables": ".md", "figure": ".png"}
COLOURS = {"ours": "tab:red", "best FP8 peer": "tab:blue", "best bf16 peer": "tab:gray"}

Key = tuple[str, int, int, str]  # step, queries, head_dim, L2
Cell = Mapping[str, DecodeTime]


def cells(rows: Iterable[DecodeTime]) -> dict[Key, dict[str, DecodeTime]]:
    """The measured rows of each step and state of the L2 cache, by contender."""
    found: dict[Key, dict[str, DecodeTime]] = {}
    for row in rows:
        if row.median_us is not None:
            found.setdefault((row.step, row.queries, row.head_dim, row.l2), {})[row.contender] = row
    return found


def best(cell: Cell, names: Sequence[str]) -> DecodeTime | None:
    """The fastest of these that ran."""
    return min((cell[n] for n in names if n in cell), key=lambda row: row.median_us or math.inf, default=None)


def times(one: DecodeTime | None, other: DecodeTime | None) -> float | None:
    """How many times as long as ``one`` the ``other`` takes."""
    if one is None or other is None or not one.median_us or not other.median_us:
        return None
    return other.median_us / one.median_us


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _us(row: DecodeTime | None) -> str:
    return _number(row.median_us if row else None, 1)


def _tb_s(row: DecodeTime | None) -> str:
    return _number(row.tb_s if row else None)


def _named(row: DecodeTime | None) -> str:
    return "" if row is None else f"{row.contender} {_us(row)}"


def _first(key: Key) -> list[str]:
    step, queries, head_dim, l2 = key
    return [step, str(queries), str(head_dim), l2]


FIRST = ["step", "queries", "head_dim", "L2"]


def _main(by_key: Mapping[Key, Cell]) -> list[str]:
    header = [
        *FIRST, "ours, us", "TB/s", "with the cut, us", "call, us", "with append, us", "best FP8 peer, us", "TB/s",
        "best bf16 peer, us", "TB/s", "FP8 / ours", "bf16 / ours",
    ]  # fmt: skip
    body = []
    for key, cell in by_key.items():
        own, fp8, bf16 = cell.get(OURS), best(cell, PEERS["fp8"]), best(cell, PEERS["bf16"])
        body.append([
            *_first(key), _us(own), _tb_s(own), *(_us(cell.get(name)) for name in (CUT, CALL, STEP)), _named(fp8),
            _tb_s(fp8), _named(bf16), _tb_s(bf16), _number(times(own, fp8)), _number(times(own, bf16)),
        ])  # fmt: skip
    return ["### Ours and the fastest peers", "", *table(header, body)]


def _layouts(by_key: Mapping[Key, Cell]) -> list[str]:
    body = []
    for key, cell in by_key.items():
        native = cell.get("ours_native")
        if native is not None or any(name in cell for name in LAYOUTS):
            others = (times(cell.get(name), native) for name in (OURS, *list(LAYOUTS)[:-1]))
            body.append([
                *_first(key), _us(cell.get(OURS)), *(_us(cell.get(name)) for name in LAYOUTS), *map(_number, others),
                _us(cell.get(CALL)), _us(cell.get("ours_native_call")),
            ])  # fmt: skip
    speeds = [f"speed of {name}" for name in ("NHD", *list(LAYOUTS.values())[:-1])]
    header = [*FIRST, "NHD, us", *(f"{name}, us" for name in LAYOUTS.values()), *speeds, "call, us", "native call, us"]
    lines = ["", "### Layouts of pages, our kernel", "", "Speeds are relative to native pages.", ""]
    return [*lines, *table(header, body)] if body else []


def _compared(by_key: Mapping[Key, Cell]) -> list[str]:
    """Skewed batches against even ones with as many keys; several queries against one."""
    names = [OURS, *PEERS["fp8"]]
    names = [name for name in names if any(name in cell for cell in by_key.values())]
    body = []
    for (step, queries, head_dim, l2), cell in by_key.items():
        than = SKEWED.get(step, step)
        base = by_key.get((than, 1, head_dim, l2))
        if base is None or (queries == 1 and than == step):
            continue
        what = f"{step}, {queries} queries" if queries > 1 else step
        body.append([what, than, l2, *(_number(times(base.get(n), cell.get(n))) for n in names)])
    lines = ["", "### Times of a step over those of an even one, or of one query", ""]
    return [*lines, *table(["step", "over", "L2", *names], body)] if body else []


def _all(rows: Sequence[DecodeTime], by_key: Mapping[Key, Cell]) -> list[str]:
    names = list(dict.fromkeys(row.contender for row in rows if row.median_us is not None))

    def texts(text: Callable[[DecodeTime | None], str]) -> list[list[str]]:
        return [[*_first(key), *(text(cell.get(name)) for name in names)] for key, cell in by_key.items()]

    return ["", "### All, microseconds", "", *table([*FIRST, *names], texts(_us))]


def _not_timed(rows: Sequence[DecodeTime]) -> list[str]:
    """Each reason once for contenders that are not there, and a line for each that failed or was wrong."""
    lines = dict.fromkeys(
        f"* {row.contender}: {row.reason}"
        if row.status == UNAVAILABLE
        else f"* {row.contender} on {', '.join(_first((row.step, row.queries, row.head_dim, row.l2)))}: {row.status}: "
        f"{row.reason}"
        for row in rows
        if row.median_us is None
    )
    return ["", *lines] if lines else []


def markdown(stamp: Mapping[str, str], rows: Sequence[DecodeTime]) -> str:
    """All tables of a run, under the stamp that says where it ran."""
    by_key = cells(rows)
    lines = [
        *heading("Decode", stamp),
        "",
        "Microseconds of a launch, and bytes of K and V over time in TB/s. `cold`: not in the L2 cache. Ratios are",
        "times of the other over ours: above 1, ours is faster. What plans a kernel is done before, but in calls.",
        "",
        *_main(by_key),
        *_layouts(by_key),
        *_compared(by_key),
        *_all(rows, by_key),
        *_not_timed(rows),
    ]
    return "\n".join(lines) + "\n"


def page(stamp: Mapping[str, str], rows: Sequence[DecodeTime], csv: Path, at: Path) -> str:
    """The page of the documentation at ``at``: the figure and the tables of cold steps."""
    links = {name: os.path.relpath(csv.with_suffix(suffix), at.parent) for name, suffix in LINKS.items()}
    by_key = {key: cell for key, cell in cells(rows).items() if key[3] == "cold"}
    said = ", ".join(stamp[name] for name in ("card", "torch") if name in stamp)
    lines = [
        "# Decode against its peers",
        "",
        f"{said}, commit {stamp.get('commit', '')}; [all rows]({links['csv']}), [all tables]({links['tables']}).",
        "Written by",
        "",
        "    python -m benchmarks decode --from CSV --page PAGE.md",
        "",
        f"![TB/s of K and V of ours and the fastest peers]({links['figure']})",
        "",
        "Microseconds of a launch, and bytes of K and V over time in TB/s. Ratios are times of the other over ours:",
        "above 1, ours is faster. K and V are not in the L2 cache. `benchmarks/README.md` has what a name stands for.",
        "",
        *_main(by_key),
        *_layouts(by_key),
        *_compared(by_key),
        *_not_timed(rows),
    ]
    return "\n".join(lines) + "\n"


def draw(stamp: Mapping[str, str], rows: Sequence[DecodeTime], path: Path) -> None:
    """Bars of TB/s for each step, a panel for each state of the L2 cache: ours, and the fastest peers in FP8 and bf16,
    named; the suffix of ``path`` is the format. PlotError without matplotlib or without rows."""
    drawn = (OURS, *PEERS["fp8"], *PEERS["bf16"])
    by_key = {key: cell for key, cell in cells(rows).items() if best(cell, drawn)}
    if not by_key:
        raise PlotError("no step was measured: nothing to plot")
    pyplot = open_pyplot()
    states = list(dict.fromkeys(key[3] for key in by_key))
    widest = max(sum(key[3] == l2 for key in by_key) for l2 in states)
    size = (max(6.0, 1.1 * widest + 1), 4.2 * len(states))
    figure, axes = pyplot.subplots(len(states), 1, figsize=size, squeeze=False)
    handles = {}
    for ax, l2 in zip(axes[:, 0], states, strict=True):
        panel = {key: cell for key, cell in by_key.items() if key[3] == l2}
        series = {
            "ours": [cell.get(OURS) for cell in panel.values()],
            "best FP8 peer": [best(cell, PEERS["fp8"]) for cell in panel.values()],
            "best bf16 peer": [best(cell, PEERS["bf16"]) for cell in panel.values()],
        }
        for i, (label, found) in enumerate(series.items()):
            bars = [(at + 0.27 * i, row.tb_s, row.contender) for at, row in enumerate(found) if row and row.tb_s]
            for at, height, name in bars:
                handles[label] = ax.bar(at, height, 0.27, color=COLOURS[label])
                if label != "ours":
                    text = name.removesuffix("_call").removesuffix("_fp8").removesuffix("_bf16")
                    ax.text(at, 0.05, text, rotation=90, ha="center", va="bottom", fontsize=6, color="white")
        ax.set_xticks([at + 0.27 for at in range(len(panel))], [_tick(key) for key in panel], fontsize=7)
        ax.set_title(f"{l2} L2 cache")
        ax.set_ylabel("TB/s of K and V")
        ax.grid(axis="y", alpha=0.3)
        ax.margins(x=0.01)
    _title(figure, stamp)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.12 / len(states), 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _tick(key: Key) -> str:
    step, queries, head_dim, _ = key
    more = [f"{queries} queries"] if queries > 1 else []
    more += [f"head_dim {head_dim}"] if head_dim != 128 else []
    return "\n".join([*step.split(" + "), *more])
