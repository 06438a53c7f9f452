"""Rows of a run and their CSV: a stamp in comment lines, then one row for each contender of each shape."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar, get_args, get_type_hints

from .shapes import Shape

Record = TypeVar("Record", bound=Any)  # a flat dataclass with a status
OK, WRONG, FAILED, UNAVAILABLE = STATUSES = ("ok", "wrong", "failed", "unavailable")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a run finds of a contender, microseconds of one launch among it; None where nothing was measured.

    ``spread`` is (max - min) / median over the replays, ``error`` the relative L2 error of what was timed. Clock and
    power are those of the run in which contenders took turns.
    """

    launches: int | None = None
    replays: int | None = None
    median_us: float | None = None
    min_us: float | None = None
    spread: float | None = None
    error: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None


def columns(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields in the order of its CSV: what a subclass of ``Timed`` adds comes first."""
    return tuple(field.name for field in sorted(fields(kind), key=lambda field: bool(field.kw_only)))


@dataclass(frozen=True)
class Row:
    """What was found about one contender on one shape; numbers are None where nothing was measured.

    Times are microseconds of one launch. ``spread`` is (max - min) / median over the replays. ``quantise_us`` makes
    ready operands from bf16. ``error`` is the relative L2 error of the timed launches' output against float32.
    ``clock_mhz`` and ``power_w`` are those of the shape's run, shared by its contenders.
    """

    shape: Shape
    contender: str
    precision: str  # "fp8", "bf16" or "int8"
    status: str
    reason: str = ""
    kernel: str = ""
    chosen: bool = True
    launches: int | None = None
    replays: int | None = None
    median_us: float | None = None
    min_us: float | None = None
    spread: float | None = None
    quantise_us: float | None = None
    error: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def tflops(self) -> float | None:
        return None if self.median_us is None else self.shape.tflops(self.median_us)

    @property
    def with_quantisation_us(self) -> float | None:
        if self.median_us is None or self.quantise_us is None:
            return None
        return self.median_us + self.quantise_us


_SHAPE = tuple(field.name for field in fields(Shape))
_REST = tuple(field.name for field in fields(Row) if field.name != "shape")
COLUMNS = (*_SHAPE, *_REST, "tflops")
_TEXT = ("contender", "precision", "status", "reason", "kernel")
_FLAGS = ("causal", "chosen")
_COUNTS = ("launches", "replays", *(name for name in _SHAPE if name not in _FLAGS))


def first_line(error: BaseException) -> str:
    """What a row says of an error."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parse(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if name in _FLAGS:
        return bool(int(text))
    if text == "":
        return None
    return int(text) if name in _COUNTS else float(text)


def write_stamp(file: TextIO, stamp: Mapping[str, str]) -> None:
    """The comment lines at the head of a CSV."""
    for name, value in stamp.items():
        file.write(f"# {name}: {' '.join(value.split())}\n")


def write_records(file: TextIO, stamp: Mapping[str, str], kind: type, records: Iterable[Any]) -> None:
    """The stamp, and a row for each of some flat dataclass objects of one ``kind``, whose fields are the columns."""
    write_stamp(file, stamp)
    writer, names = csv.writer(file, lineterminator="\n"), columns(kind)
    writer.writerow(names)
    writer.writerows([_format(getattr(record, name)) for name in names] for record in records)


class Writer:
    """Writes the stamp and then rows as they come, so that a run that is cut off leaves what it had."""

    def __init__(self, file: TextIO, stamp: Mapping[str, str]) -> None:
        self._file = file
        write_stamp(file, stamp)
        self._csv = csv.writer(file, lineterminator="\n")
        self._csv.writerow(COLUMNS)
        file.flush()

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            values = [getattr(row.shape, name) for name in _SHAPE]
            values += [getattr(row, name) for name in (*_REST, "tflops")]
            self._csv.writerow([_format(value) for value in values])
        self._file.flush()


def _split(path: Path, columns: Iterable[str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The stamp and the lines of a CSV; ValueError where its columns are not these, in whatever order."""
    stamp: dict[str, str] = {}
    with path.open(encoding="utf-8", newline="") as file:
        lines = file.readlines()
    body = [line for line in lines if not line.startswith("#")]
    for line in lines[: len(lines) - len(body)]:
        name, _, value = line[1:].partition(":")
        stamp[name.strip()] = value.strip()
    reader = csv.DictReader(body)
    if sorted(reader.fieldnames or ()) != sorted(columns):
        raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(columns)}")
    return stamp, list(reader)


def _check_status(path: Path, status: str) -> None:
    if status not in STATUSES:
        raise ValueError(f"{path}: status {status!r}, expected one of {', '.join(STATUSES)}")


def read_records(path: Path, kind: type[Record]) -> tuple[dict[str, str], list[Record]]:
    """What ``write_records`` wrote of a ``kind`` with a status, whose fields are str, int or float, or one of these and
    None; ValueError where it did not."""
    hints = get_type_hints(kind)
    kinds = {name: hints[name] for name in columns(kind)}
    stamp, lines = _split(path, kinds)

    def parse(name: str, text: str) -> str | int | float | None:
        of = [x for x in get_args(kinds[name]) or (kinds[name],) if x is not type(None)]
        return None if text == "" and of != [str] else of[0](text)

    records = [kind(**{name: parse(name, line[name]) for name in kinds}) for line in lines]
    for record in records:
        _check_status(path, record.status)
    return stamp, records


def read(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Return the stamp and the rows of a CSV; ValueError where its columns are not these."""
    stamp, lines = _split(path, COLUMNS)
    rows = []
    for record in lines:
        parsed = {name: _parse(name, record[name]) for name in COLUMNS}
        shape = Shape(**{name: parsed[name] for name in _SHAPE})
        row = Row(shape=shape, **{name: parsed[name] for name in _REST})
        _check_status(path, row.status)
        rows.append(row)
    return stamp, rows
