"""Tables of `families`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report import heading, table
from .measure import OURS, SDPA, SERVED, FamilyTime, total

MOST = 1.02  # times SDPA's time: no family may take longer


def of_families(rows: Sequence[FamilyTime]) -> dict[str, list[FamilyTime]]:
    found: dict[str, list[FamilyTime]] = {}
    for row in rows:
        found.setdefault(row.family, []).append(row)
    return found


def ratio(rows: Sequence[FamilyTime]) -> float | None:
    """A family's time by the adapter's choice over that of SDPA; None where a time is missing."""
    times = total(rows)
    return None if times is None else times[1] / times[0]


def slower(rows: Sequence[FamilyTime]) -> list[str]:
    """Families that take more than ``MOST`` times SDPA's time, and those without a time."""
    found = {family: ratio(of) for family, of in of_families(rows).items()}
    return [family for family, times in found.items() if times is None or times > MOST]


def _text(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _calls(rows: Sequence[FamilyTime]) -> list[list[str]]:
    by_call: dict[tuple[str, str], dict[str, FamilyTime]] = {}
    for row in rows:
        by_call.setdefault((row.family, row.part), {})[row.contender] = row
    body = []
    for (family, part), cell in by_call.items():
        row = next(iter(cell.values()))
        base, ours = (cell[name].median_us if name in cell else None for name in (SDPA, OURS))
        heads = f"{row.heads}" if row.heads == row.kv_heads else f"{row.heads}/{row.kv_heads}"
        shape = f"{row.batch}, {heads}, {row.rows} x {row.keys}, {row.head_dim}"
        choice = row.choice if row.choice == SERVED else f"left: {row.why}"
        error = cell[OURS].error if OURS in cell else None
        body.append([
            family, part, row.source, str(row.count), shape, row.mask, _text(base, 1), _text(ours, 1),
            _text(base / ours if base and ours else None), choice, _text(None if error is None else 100 * error, 1),
        ])  # fmt: skip
    return body


def markdown(stamp: Mapping[str, str], rows: Sequence[FamilyTime]) -> str:
    """A line for each family, then one for each of its calls, under the stamp that says where they ran."""
    lines = [
        *heading("Model families", stamp),
        "",
        "The attention calls of one forward of each family, whole calls from bf16, quantisation included. SDPA is",
        "torch's own choice of backend, with the mask that the library gives it. An adapter leaves some calls to it.",
        f"Ratios are times by the adapter's choice over SDPA's: {MOST:g} is the most that a family may take.",
        "",
    ]
    body = []
    for family, of in of_families(rows).items():
        times, calls = total(of), [row for row in of if row.contender == SDPA]
        served = sum(row.count for row in calls if row.choice == SERVED)
        both = ["", ""] if times is None else [_text(us * 1e-3) for us in times]
        body.append([family, f"{served} of {sum(row.count for row in calls)}", *both, _text(ratio(of), 3)])
    lines += table(["family", "calls served", "SDPA, ms", "adapter's choice, ms", "ratio"], body)
    header = [
        "family", "call", "source", "times", "batch, heads, rows x keys, head_dim", "mask", "SDPA, us", "ours, us",
        "speedup", "adapter", "error, %",
    ]  # fmt: skip
    lines += ["", "### Calls", "", *table(header, _calls(rows))]
    bad = [f"* {row.family}, {row.part}: {row.contender} {row.status}: {row.reason}" for row in rows if row.reason]
    return "\n".join([*lines, *(["", *bad] if bad else [])]) + "\n"
