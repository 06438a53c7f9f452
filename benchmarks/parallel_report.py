"""Tables and figure of `parallel`, from its rows or from its CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .parallel_rows import ParallelTime
from .plot import PlotError, _title, open_pyplot
from .report import heading, table

Key = tuple[int, int, int, int, int, str]


def problems(rows: Iterable[ParallelTime]) -> dict[Key, list[ParallelTime]]:
    """Rows by problem: ranks, tokens, heads, kv_heads, head_dim and mask."""
    found: dict[Key, list[ParallelTime]] = {}
    for row in rows:
        key = (row.ranks, row.tokens, row.heads, row.kv_heads, row.head_dim, row.mask)
        found.setdefault(key, []).append(row)
    return found


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def markdown(stamp: Mapping[str, str], rows: Sequence[ParallelTime]) -> str:
    """One table: what was measured, and beside it what the model expected."""
    header = [
        "cards", "tokens", "heads", "head_dim", "mask", "contender", "us", "model, us", "efficiency, %", "hidden, %",
        "MB sent", "torch's best / this", "distance from one card, %", "status",
    ]  # fmt: skip
    body = []
    for (ranks, tokens, heads, kv_heads, head_dim, mask), found in problems(rows).items():
        peers = [row.us for row in found if row.contender.startswith("torch") and row.us]
        for row in found:
            faster = min(peers) / row.us if peers and row.us else None
            of = f"{heads}/{kv_heads}" if heads != kv_heads else str(heads)
            body.append([
                str(ranks), str(tokens), of, str(head_dim), mask, row.contender, _number(row.us), _number(row.model_us),
                _number(None if row.efficiency is None else 100 * row.efficiency),
                _number(None if row.hidden is None else 100 * row.hidden),
                _number(None if row.sent_bytes is None else row.sent_bytes / 1e6, 1), _number(faster, 2),
                _number(None if row.error is None else 100 * row.error, 3), f"{row.status} {row.reason}".strip(),
            ])  # fmt: skip
    return "\n".join([*heading("Attention over several cards", stamp), "", *table(header, body)]) + "\n"


def draw(stamp: Mapping[str, str], rows: Sequence[ParallelTime], path: Path) -> None:
    """Times of each contender over the problems, and crosses where the model has them. PlotError without any."""
    found = {key: [row for row in of if row.us] for key, of in problems(rows).items()}
    found = {key: of for key, of in found.items() if of}
    if not found:
        raise PlotError("nothing was measured: nothing to plot")
    pyplot = open_pyplot()
    names = list(dict.fromkeys(row.contender for of in found.values() for row in of))
    figure, axes = pyplot.subplots(figsize=(2.5 + 1.4 * len(found), 5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [(x + i * width, row) for x, of in enumerate(found.values()) for row in of if row.contender == name]
        axes.bar([x for x, _ in at], [(row.us or 0) / 1e3 for _, row in at], width, label=name)
        expected = [(x, row.model_us / 1e3) for x, row in at if row.model_us]
        axes.scatter([x for x, _ in expected], [us for _, us in expected], marker="x", color="black", zorder=3)
    axes.set_xticks([x + 0.4 for x in range(len(found))], [_label(key) for key in found], fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("ms; crosses: the model")
    axes.legend(fontsize=7)
    _title(figure, stamp)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _label(key: Key) -> str:
    ranks, tokens, heads, kv_heads, head_dim, mask = key
    return f"{ranks} cards\n{tokens // 1024}k {mask}\n{heads}/{kv_heads} x {head_dim}"
