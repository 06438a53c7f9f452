"""The accuracy table of two devices side by side, as the Markdown page that is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .report import CSV_TITLES, NAMES

Record = Mapping[str, str]
FIGURES = {"relative_l2": ("rel L2", ".4f"), "rmse": ("RMSE", ".2e"), "own_error": ("own error", ".2e")}


def _device(stamp: Record) -> str:
    """A device and its state, as far as the stamp has them."""
    others = [f"{name} {value}" for name, value in stamp.items() if name != "device"]
    return stamp.get("device", "an unnamed device") + (f" ({', '.join(others)})" if others else "")


def page(here: tuple[Record, Sequence[Record]], there: tuple[Record, Sequence[Record]], links: tuple[str, str]) -> str:
    """Relative L2 and RMSE against float64 on the original inputs, and the kernel's own largest error: a line for each
    row that either table has. ``here`` and ``there`` are stamps and records as of ``report.read_csv``, ``links`` what
    the page calls their files."""
    names = CSV_TITLES[:NAMES]
    tables = [{tuple(row[name] for name in names): row for row in records} for _, records in (here, there)]
    lines = [
        "# The accuracy table of two devices",
        "",
        f'* "here": {_device(here[0])}, {links[0]}',
        f'* "there": {_device(there[0])}, {links[1]}',
        "",
        "The two choose kernels of other tiles. Both are held to the gates of [accuracy.md](accuracy.md); a row that",
        "missed one says FAIL, and what was not measured is empty. Written by",
        "",
        "    python -m fp8cutlass.accuracy --from HERE.csv --beside THERE.csv PAGE.md",
        "",
    ]
    titles = [*names, "gate", *(title for text, _ in FIGURES.values() for title in (text, "there"))]
    lines += ["| " + " | ".join(titles) + " |", "|" + " --- |" * NAMES + " ---: |" * (len(titles) - NAMES)]
    for key in dict.fromkeys([*tables[0], *tables[1]]):
        found = [table.get(key, {}) for table in tables]
        gate = next(row["gate"] for row in found if row)
        cells = [*key, f"{float(gate):.4f}"]
        for name, (_, form) in FIGURES.items():
            for row in found:
                text = f"{float(row[name]):{form}}" if row.get(name) else ""
                failed = name == "relative_l2" and row.get("status") == "FAIL"
                cells.append(f"{text} FAIL" if failed else text)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
