"""What :func:`fp8cutlass.tune` has measured on this machine: a file of the user, which dispatch reads before its table.

The file is ``tuned.json`` in ``$XDG_DATA_HOME/fp8cutlass`` (``~/.local/share/fp8cutlass``). ``FP8CUTLASS_TUNED`` names
another one, or is ``off``. It is read once, at the first choice of a kernel for a card. A row holds for
exactly its problem, with all fields equal, on cards of its name, with the library that it was measured with.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "FP8CUTLASS_TUNED"
OFF = "off"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One problem (the fields of ``dispatch.Problem``) and the kernel to run for it.

    Times are microseconds of a whole call: of ``kernel``, of ``default``, which the table chose, and of ``runner_up``,
    the next of ``kernels`` that were right. ``build`` is :func:`build_id` of the library's directory.
    """

    build: str
    problem: Mapping[str, Any]
    kernel: str
    us: float
    spread: float
    default: str
    default_us: float
    runner_up: str | None
    runner_up_us: float | None
    kernels: int
    versions: str
    date: str

    @property
    def key(self) -> tuple[object, ...]:
        return _key(self.build, self.problem)


Rows = Mapping[tuple[object, ...], Row]


def _key(build: str, problem: Mapping[str, Any]) -> tuple[object, ...]:
    return (build, *sorted(problem.items()))


def location() -> Path | None:
    """Where the file is, whether or not it exists; None where it is switched off."""
    text = os.environ.get(VARIABLE, "")
    if text == OFF:
        return None
    if text:
        return Path(text).expanduser().absolute()
    # What platformdirs says for Linux, the only system that these kernels are built for.
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "fp8cutlass" / "tuned.json"


def read(path: Path) -> dict[tuple[object, ...], Row]:
    """The rows of a file by key, none where there is no file. Raises ValueError for anything that is no such file."""
    if not path.is_file():
        return {}
    names = {field.name for field in fields(Row)}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, this package reads format {FORMAT}")
        rows = [Row(**{name: row[name] for name in names}) for row in data["rows"]]
        return {row.key: row for row in rows}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


@cache
def loaded() -> tuple[Path | None, Rows]:
    """The file and its rows, read once. One that cannot be read is warned about and has none."""
    path = location()
    if path is None:
        return None, {}
    try:
        return path, read(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; it is ignored. {VARIABLE}={OFF} switches it off", UserWarning, stacklevel=2)
        return path, {}


@cache
def build_id(directory: Path) -> str:
    """What identifies the kernels of a library: the digest of the manifest beside it, which has one for each."""
    return hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()[:16]


def find(directory: Path, problem: Mapping[str, Any]) -> Row | None:
    """The row of a problem for the library whose manifest is in ``directory``; None where nothing was measured."""
    rows = loaded()[1]
    return rows.get(_key(build_id(directory), problem)) if rows else None


def store(path: Path, new: Iterable[Row]) -> None:
    """Add rows to a file, in place of those for the same problems. It is replaced in one step, so that readers see all
    or nothing; of two processes that store at once the later one's rows stay. Raises ValueError for a file of another
    kind, OSError."""
    rows = read(path) | {row.key: row for row in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    body = ",\n".join("  " + json.dumps(asdict(row)) for row in rows.values())
    partial.write_text(f'{{"format": {FORMAT}, "rows": [\n{body}\n]}}\n', encoding="utf-8")
    partial.replace(path)
