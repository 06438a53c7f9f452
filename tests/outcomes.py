"""What really ran, for the lines at the end of a session: outcomes of tests by a property that they carry.

Properties travel with the reports, also from the workers of pytest-xdist, so nothing is known here of a test that did
not run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

WORST = ("skipped", "passed", "failed")  # of the phases of one test, the last counts


@dataclass
class Outcome:
    """One test: passed, failed (an error in set-up or teardown too) or skipped, with the reason."""

    test: str
    status: str
    reason: str = ""
    properties: dict[str, Any] = field(default_factory=dict)


def outcomes(stats: dict[str, list[Any]], name: str) -> dict[Hashable, list[Outcome]]:
    """From the statistics of pytest's terminal reporter, by the value of property ``name``; lists count as tuples."""
    found: dict[Hashable, dict[str, Outcome]] = {}
    for category in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in stats.get(category, []):
            properties = [
                (key, tuple(x) if isinstance(x, list) else x) for key, x in getattr(report, "user_properties", [])
            ]
            status = {"error": "failed", "xfailed": "failed", "xpassed": "failed"}.get(category, category)
            reason = report.longrepr[2] if category == "skipped" and isinstance(report.longrepr, tuple) else ""
            for value in {x for key, x in properties if key == name}:
                before = found.setdefault(value, {}).get(report.nodeid)
                if before is None or WORST.index(status) > WORST.index(before.status):
                    found[value][report.nodeid] = Outcome(report.nodeid, status, reason, dict(properties))
    return {value: list(tests.values()) for value, tests in found.items()}


def mutants_line(stats: dict[str, list[Any]]) -> str | None:
    """How many broken kernels died in every case that they have; None when none was tried."""
    ran = outcomes(stats, "mutant")  # by (name, cases of a mutant, number of mutants)
    if not ran:
        return None
    total = max(mutant[2] for mutant in ran)  # type: ignore[index]
    alive = sorted(name for (name, *_), tests in ran.items() if any(x.status == "failed" for x in tests))  # type: ignore[misc]
    killed = sum(
        len(tests) == cases and all(x.status == "passed" for x in tests)
        for (_, cases, _), tests in ran.items()  # type: ignore[misc]
    )
    line = f"mutants killed: {killed} of {total}"
    if alive:
        line += f"; not killed: {', '.join(alive)}"
    unknown = total - killed - len(alive)
    return line + (f"; not run in full: {unknown}" if unknown else "")
