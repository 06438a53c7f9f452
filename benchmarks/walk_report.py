"""Tables and figure of `varlen` and `windows`, with their targets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .plot import COLOURS, PlotError, _title, open_pyplot
from .report import OWN, geometric_mean, heading, not_timed, table
from .walk import EQUAL, Mix, WalkTime
from .walk import cells as cells_of

CALLER, CALL, DENSE = f"{OWN}_e4m3", f"{OWN}_call", f"{OWN}_dense"
FA3_FP8, FA3_BF16 = "fa3_fp8", "fa3_bf16"
TARGET_FP8, TARGET_DENSE, TARGET_WINDOW = 1.5, 1.03, 1.15
LINES = (OWN, CALLER, DENSE, FA3_FP8, FA3_BF16, CALL)  # the order of bars

Cell = dict[str, WalkTime]
Key = tuple[int, str, str]  # head_dim, mask, mix


def cells(rows: Sequence[WalkTime]) -> dict[Key, Cell]:
    """The measured rows of each batch by contender."""
    found: dict[Key, Cell] = {}
    for row in rows:
        if row.median_us is not None:
            found.setdefault((row.head_dim, row.mask, row.mix), {})[row.contender] = row
    return found


def times(cell: Cell, one: str, other: str) -> float | None:
    """How many times as long as ``one`` the ``other`` takes."""
    first, second = (cell[x].median_us if x in cell else None for x in (one, other))
    return second / first if first and second else None


def _text(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _tflops(cell: Cell, name: str) -> str:
    return _text(cell[name].tflops if name in cell else None, 0)


def _us(cell: Cell, name: str) -> str:
    return _text(cell[name].median_us if name in cell else None, 1)


def _not_timed(rows: Sequence[WalkTime]) -> list[str]:
    return not_timed(rows, lambda row: f"{row.mix}, head_dim {row.head_dim}, {row.mask}")


def varlen_markdown(stamp: Mapping[str, str], rows: Sequence[WalkTime]) -> str:
    """Useful TFLOPS and ratios of each batch, under the stamp that says where they are from."""
    by_key = cells(rows)
    lines = [*heading("Ragged batches", stamp), ""]
    lines += [
        f"`{OWN}`: kernel and plan on operands as a call makes them; `{CALLER}`: a whole call on a caller's e4m3",
        "operands, with a descale for each sequence and KV head, as FlashAttention-3 has them;",
        f"`{CALL}`: `attention_varlen` from bf16.",
        "Ratios are times of the other over ours: above 1, ours is faster.",
    ]
    header = ["batch", OWN, CALLER, FA3_FP8, FA3_BF16, "ours / FA3 FP8", "e4m3 / FA3 FP8", "times dense"]
    header += ["call, us", "call / FA3 bf16"]
    for head_dim, mask in dict.fromkeys((d, m) for d, m, _ in by_key):
        body = []
        for (d, m, mix), cell in by_key.items():
            if (d, m) == (head_dim, mask):
                ratios = [times(cell, OWN, FA3_FP8), times(cell, CALLER, FA3_FP8), times(cell, DENSE, OWN)]
                body.append([
                    mix, *(_tflops(cell, name) for name in (OWN, CALLER, FA3_FP8, FA3_BF16)), *map(_text, ratios[:2]),
                    _text(ratios[2], 3), _us(cell, CALL), _text(times(cell, CALL, FA3_BF16)),
                ])  # fmt: skip
        first = next(cell for (d, m, _), cell in by_key.items() if (d, m) == (head_dim, mask))
        heads = next(iter(first.values()))
        lines += ["", f"### head_dim {head_dim}, {mask}, useful TFLOPS", ""]
        lines += [f"{heads.heads} heads on {heads.kv_heads} in the first batch.", ""]
        lines += table(header, body)
    lines += ["", *_verdict(by_key)]
    return "\n".join([*lines, *_not_timed(rows)]) + "\n"


def _verdict(by_key: Mapping[Key, Cell]) -> list[str]:
    against = [x for cell in by_key.values() if (x := times(cell, OWN, FA3_FP8)) is not None]
    beside = [x for cell in by_key.values() if (x := times(cell, DENSE, OWN)) is not None]
    lines = []
    if against:
        text = f"{geometric_mean(against):.2f}, from {min(against):.2f} to {max(against):.2f}"
        lines.append(f"Ours / FlashAttention-3 FP8, geometric mean of {len(against)}: {text} (target {TARGET_FP8}).")
    if beside:
        worst = max(beside)
        lines.append(f"{EQUAL} against dense: at most {worst:.3f} of its time (target {TARGET_DENSE}).")
    return lines


def share(window: WalkTime, causal: WalkTime) -> float | None:
    """How many times its share of the causal kernel's time a window takes: by the tiles that each visits."""
    if not (window.cells and causal.cells and window.median_us and causal.median_us):
        return None
    return window.median_us / causal.median_us * causal.cells / window.cells


def share_of_causal_tiles(window: WalkTime, causal: WalkTime) -> float | None:
    """The same by the tiles that a window would visit if its items had as many rows as those of the causal kernel."""
    tile = re.search(r"_m(\d+)n(\d+)", causal.kernel)
    size = re.fullmatch(r"window (\d+)", window.mask)
    if not (tile and size):
        return None
    mix = Mix("", (window.tokens,), window.heads, window.kv_heads, window.head_dim, True, int(size[1]) - 1)
    return share(replace(window, cells=cells_of(mix, int(tile[1]), int(tile[2]))), causal)


def windows_markdown(stamp: Mapping[str, str], rows: Sequence[WalkTime]) -> str:
    """Times of windows, and the ratio to their share of the causal time."""
    lines = [*heading("Windows", stamp), ""]
    lines += ["One sequence with a causal mask. The share is that of the pairs of rows and keys in the tiles visited."]
    lines += [
        f"`ratio` is the time over share times causal time (target {TARGET_WINDOW} at 1,024 keys). Items of a",
        "window may have fewer rows, which visit fewer tiles. The next column counts those of the causal kernel.",
        "",
    ]
    header = ["head_dim, mask", "walk", "us", "causal us", "share", "ratio", "by causal tiles", "useful TFLOPS"]
    body = []
    timed = [row for row in rows if row.median_us is not None]
    for row in timed:
        of = [x for x in timed if (x.head_dim, x.contender, x.mask) == (row.head_dim, row.contender, "causal")]
        causal = of[0] if of else None
        walk = "dense" if row.contender == DENSE else "ragged, with its plan"
        cell = [
            f"{row.head_dim}, {row.mask}",
            walk,
            _text(row.median_us, 1),
            _text(causal.median_us if causal else None, 1),
        ]
        part = row.cells / causal.cells if causal and row.cells and causal.cells else None
        beside = causal if row is not causal else None
        ratios = [f(row, beside) if beside else None for f in (share, share_of_causal_tiles)]
        body.append([*cell, _text(part, 4), *(_text(ratio, 3) for ratio in ratios), _text(row.tflops, 0)])
    return "\n".join([*lines, *table(header, body), *_not_timed(rows)]) + "\n"


def prefill_markdown(stamp: Mapping[str, str], rows: Sequence[WalkTime]) -> str:
    """Calls over pages beside the fastest dense kernel: target 1.03 times its time."""
    body = []
    for (head_dim, _, mix), cell in cells(rows).items():
        dense = min(
            (row.median_us for name, row in cell.items() if name.startswith(DENSE) and row.median_us), default=0
        )
        for name, row in cell.items():
            if row.median_us and not name.startswith(DENSE):
                share = _text(row.median_us / dense, 3) if dense else ""
                body.append([str(head_dim), mix, name, _us(cell, name), _tflops(cell, name), _text(dense, 1), share])
    head = ["head_dim", "tokens", "contender", "us", "TFLOPS", "dense kernel, us", f"times it (target {TARGET_DENSE})"]
    lines = [*heading("Causal prompts over pages", stamp), "", *table(head, body), *_not_timed(rows)]
    return "\n".join(lines) + "\n"


def draw_varlen(stamp: Mapping[str, str], rows: Sequence[WalkTime], path: Path) -> None:
    """Bars of useful TFLOPS for each batch; the suffix of ``path`` is the format. PlotError as that of ``draw``."""
    by_key = cells(rows)
    if not by_key:
        raise PlotError("no batch was measured: nothing to plot")
    pyplot = open_pyplot()
    head_dims, masks = (list(dict.fromkeys(key[i] for key in by_key)) for i in range(2))
    size = (5.5 * len(head_dims), 3.6 * len(masks) + 1)
    figure, axes = pyplot.subplots(len(masks), len(head_dims), figsize=size, squeeze=False, sharey="row")
    present = [name for name in LINES if any(name in cell for cell in by_key.values())]
    width, handles = 0.8 / len(present), {}
    for line, mask in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            ax = axes[line][column]
            panel = {mix: cell for (d, m, mix), cell in by_key.items() if (d, m) == (head_dim, mask)}
            for i, name in enumerate(present):
                bars = [(at + width * i, c[name].tflops) for at, c in enumerate(panel.values()) if name in c]
                if bars:
                    handles[name] = ax.bar(*zip(*bars, strict=True), width, color=COLOURS.get(name, f"C{i + 4}"))
            middle = 0.4 - width / 2
            ax.set_xticks([at + middle for at in range(len(panel))], [mix.replace(" ", "\n", 1) for mix in panel])
            ax.tick_params(axis="x", labelsize=7)
            ax.set_title(f"head_dim {head_dim}, {mask}")
            ax.grid(axis="y", alpha=0.3)
            if column == 0:
                ax.set_ylabel("useful TFLOPS")
    _title(figure, stamp)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
