"""The texts of the dispatch table, as the package reads them, against the generator's decisions.

Regressions these catch: a cell that the text or its reader moves to another kernel, a criterion, runner-up, time or
evidence that no longer is the generator's, a text that needs a file nobody ships, a form that grows again.
"""

from __future__ import annotations

import os
from operator import itemgetter
from pathlib import Path

import pytest

from codegen.arch import TARGETS
from codegen.keys import SEQLEN_BOUNDS
from codegen.profiles import PROFILES, of_profile
from codegen.select import Timing, select
from codegen.table import CLASS, NAMES, Table, cells_of, whole
from codegen.table_text import table_text, time_text, times_text
from fp8cutlass.choose import table as reader
from fp8cutlass.choose.why import load_times
from fp8cutlass.manifest import TABLES, generated_dir, load_manifest
from scripts import build_extension

ARCHS = tuple(TARGETS)
TEXTS = ("dtype", "out", "scaling")


@pytest.mark.parametrize("profile", PROFILES)
def test_the_package_reads_what_the_generator_decided(profile: str, tmp_path: Path) -> None:
    """Every cell, field by field: the kernel or the reason, and why."""
    made: Table = whole(of_profile(select().emitted, profile))
    (tmp_path / "table.txt").write_text(table_text(made))
    (tmp_path / "times.txt").write_text(times_text(made))
    table, times, manifest = reader.Table(tmp_path), load_times(tmp_path), load_manifest(generated_dir())
    alike = set()  # cells that are read alike have one decision
    sizes = (*SEQLEN_BOUNDS, SEQLEN_BOUNDS[-1] + 1)
    of_class, (seqlen, load) = itemgetter(*map(NAMES.index, CLASS)), map(NAMES.index, ("seqlen", "load"))
    asked: dict[tuple[object, ...], dict[str, object]] = {}  # a class as the reader has it
    for values, at in zip(cells_of(ARCHS), made.cells, strict=True):
        key = of_class(values)
        if (words := asked.get(key)) is None:
            words = asked[key] = {n: str(x) if n in TEXTS else x for n, x in zip(CLASS, key, strict=True)}
        cell = table.cell(seqlen=sizes[values[seqlen]], load=values[load], **words)
        if (cell, at) in alike:
            continue
        alike.add((cell, at))
        found, wanted = times.explain(cell, manifest), made.decisions[at]
        if wanted.variant is None:
            assert (found.variant, found.reason) == (None, wanted.reason), key
            continue
        assert vars(found) == vars(wanted) | {
            "runner_up_cost_us": wanted.runner_up_cost_us if wanted.runner_up else None
        }, key
    assert table.kernels == {d.variant for d in made.decisions} - {None}


@pytest.mark.parametrize(
    ("us", "text"),
    [(4.0, "4"), (4.1, "4.1"), (1234.5678, "1234.568"), (0.0499, "0.05"), (5.1549999, "5.1549999"), (1.0, "1")],
)
def test_a_time_keeps_the_digits_that_matter(us: float, text: str) -> None:
    """Kernels are ordered by three decimals, and two are shown: rounding twice must not change them."""
    assert time_text(Timing(us=us)) == text
    assert (round(float(text), 2), round(float(text), 3)) == (round(us, 2), round(us, 3))


def test_what_is_shipped_is_what_is_read() -> None:
    assert build_extension.TABLES == TABLES


def test_the_texts_stay_small() -> None:
    """The choice as text can be read in a diff; as JSON it had 4.6 MB."""
    size = {name: os.path.getsize(generated_dir() / name) for name in TABLES[1:]}
    assert size["table.txt"] < 100_000 and size["times.txt"] < 250_000
