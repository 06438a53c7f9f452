"""What the generator keeps between processes.

Regressions these catch: a value that is kept although a source or a measurement it follows from has changed; a file
that was cut off and is read all the same; a folder that cannot be written and stops the generator; files without end.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from codegen import evidence, kept, select
from codegen.matrix import MATRICES


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A generator of one file and one template, and measurements of one line."""
    for name, text in {"codegen/a.py": "A = 1\n", "templates/a.j2": "{{ a }}\n", "h200.csv": "us\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "build" / "kept")
    monkeypatch.setattr(evidence, "PATH", tmp_path / "h200.csv")
    kept._of_sources.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    kept._of_sources.cache_clear()


def made(name: str, value: object) -> object:
    """As another process has it."""
    kept._of_sources.cache_clear()
    return kept.kept(name, lambda: value)


def test_a_value_is_made_once(sources: Path) -> None:
    assert made("a", 1) == 1 and made("a", 2) == 1 and made("b", 2) == 2


@pytest.mark.parametrize("file", ["codegen/a.py", "templates/a.j2", "h200.csv"])
def test_an_edit_makes_it_again(sources: Path, file: str) -> None:
    assert made("a", 1) == 1
    (sources / file).write_text("edited\n")
    assert made("a", 2) == 2


def test_a_new_source_makes_it_again(sources: Path) -> None:
    assert made("a", 1) == 1
    (sources / "codegen" / "b.py").write_text("")
    assert made("a", 2) == 2


def test_measurements_that_are_not_there(sources: Path) -> None:
    (sources / "h200.csv").unlink()
    assert made("a", 1) == 1 and made("a", 2) == 1


def test_a_file_that_was_cut_off_is_made_again(sources: Path) -> None:
    made("a", "x" * 1000)
    (file,) = kept.FOLDER.iterdir()
    file.write_bytes(file.read_bytes()[:500])
    assert made("a", 2) == 2 and made("a", 3) == 2


def test_a_folder_that_cannot_be_written(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", Path("/dev/null") / "kept")
    assert made("a", 1) == 1 and made("a", 2) == 2


def test_the_oldest_go(sources: Path) -> None:
    for n in range(kept.MOST + 3):
        made(f"n{n}", n)
        (file,) = kept.FOLDER.glob(f"n{n}-*")
        os.utime(file, (n, n))
    assert sorted(int(file.name.split("-")[0][1:]) for file in kept.FOLDER.iterdir()) == list(range(3, kept.MOST + 3))


def test_what_is_kept_is_what_would_be_made() -> None:
    matrices = tuple(m for m in MATRICES if m.family == "sm89" and "capped" in m.name)
    points = {v.id for m in matrices for v in m.points}
    fresh, read = select._select(matrices), select.select()
    assert {v.id for v in fresh.emitted} == {v.id for v in read.emitted if v.id in points} != set()
    rejected = {v.id: dataclasses.astuple(r) for v, r in read.rejected if v.id in points}
    assert {v.id: dataclasses.astuple(r) for v, r in fresh.rejected} == rejected
