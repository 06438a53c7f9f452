"""What is installed here, found out without raising an error. docs/reference/command_line.md lists the keys."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .. import log
from .._version import __version__
from ..choose import tuned
from ..choose.dispatch import load_table
from ..choose.table import Table
from ..errors import UnsupportedError
from ..manifest import Manifest, generated_dir, load_manifest
from . import driver
from .driver import Unknown
from .loading import try_library

T = TypeVar("T")

VARIABLES = ("FP8CUTLASS_GENERATED", "FP8CUTLASS_LIBRARY", tuned.VARIABLE, log.VARIABLE, "CUDA_VISIBLE_DEVICES")
KERNELS = ("directory", "profile", "targets", "kernels", "manifest_sha256", "agrees")  # of a manifest and its table


@dataclass
class Findings:
    """Answers, and a line for each question that has none."""

    problems: list[dict[str, str]] = field(default_factory=list)

    def ask(self, about: str, question: Callable[[], T]) -> T | None:
        """The answer, or None and a problem about this key."""
        try:
            return question()
        except Exception as error:  # whatever a broken installation raises
            self.note(about, reason(error))
        return None

    def note(self, about: str, message: str) -> None:
        """Add a problem, once."""
        problem = {"about": about, "message": message}
        if problem not in self.problems:
            self.problems.append(problem)


def reason(error: BaseException) -> str:
    """An error in one line; those of this package need no name before their text."""
    text = " ".join(str(error).split())
    if isinstance(error, (UnsupportedError, Unknown)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def collect() -> dict[str, Any]:
    """Everything that `info` shows. Where a value is None, `problems` has an entry about its key or the key above."""
    found = Findings()
    torch = found.ask("torch", _import_torch)
    facts: dict[str, Any] = {
        "fp8cutlass": __version__,
        "python": platform.python_version(),
        "platform": found.ask("platform", platform.platform),
        "torch": found.ask("torch", lambda: str(torch.__version__)) if torch else None,
        "torch_cuda": found.ask("torch_cuda", lambda: _torch_cuda(torch)),
        "driver": found.ask("driver", driver.version),
        "driver_cuda": found.ask("driver_cuda", driver.cuda_version),
    }
    facts["table"] = _kernels(found, "table", generated_dir)
    facts["cards"] = _cards(found, torch)
    facts["library"] = _library(found, torch)
    facts["answers"] = {"cpu": facts["table"]["directory"], "cuda": facts["library"]["directory"]}
    if facts["answers"]["cuda"] is None:
        found.note("answers.cuda", "nothing is built; `explain` answers for a card from the table of `answers.cpu`")
    if facts["answers"]["cpu"] is None:
        found.note("answers.cpu", "there is no table")
    facts["emulator"] = found.ask("emulator", lambda: _emulator(bool(facts["table"]["agrees"]))) is not None
    facts["tuned"] = _tuned(found)
    facts["log"] = _log(found)
    facts["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    facts["problems"] = found.problems
    return facts


def _import_torch() -> Any:
    import torch

    return torch


def _emulator(table: bool) -> Any:
    from ..emulator import emulate as emulator

    if not table:
        raise Unknown("it works from the table, which cannot be used")
    return emulator


def _torch_cuda(torch: Any) -> str:
    if torch is None:
        raise Unknown("torch does not import")
    if torch.version.cuda is None:
        raise Unknown(f"torch {torch.__version__} is built without CUDA")
    return str(torch.version.cuda)


def _kernels(found: Findings, about: str, locate: Callable[[], Path]) -> dict[str, Any]:
    """What the manifest in a directory lists."""
    facts: dict[str, Any] = dict.fromkeys(KERNELS)
    directory = found.ask(about, locate)
    if directory is None:
        return facts
    facts["directory"] = str(directory)
    facts["manifest_sha256"] = found.ask(about, lambda: _digest(directory / "manifest.json"))
    manifest = found.ask(about, lambda: _read(directory, load_manifest))
    if manifest is not None:
        facts |= {"profile": manifest.profile, "targets": list(manifest.archs), "kernels": len(manifest.variants)}
        disagreement = found.ask(f"{about}.agrees", lambda: _disagreement(manifest, _read(directory, load_table)))
        facts["agrees"] = None if disagreement is None else not disagreement
        if disagreement:
            found.note(f"{about}.agrees", disagreement)
    return facts


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(directory: Path, read: Callable[[Path], T]) -> T:
    """What ``read`` makes of a directory; an error that does not say where it is gets the directory put before it."""
    try:
        return read(directory)
    except Exception as error:  # as in ask
        text = reason(error)
        raise Unknown(text if str(directory) in text else f"{directory}: {text}") from error


def _disagreement(manifest: Manifest, table: Table) -> str:
    """Say which kernels a table names that its manifest does not list; "" where there are none."""
    missing = sorted(table.kernels - manifest.index.keys())
    if not missing:
        return ""
    return (
        f"{manifest.directory / 'table.txt'} names {len(missing)} kernels that the manifest beside it does not "
        f"list, among them {missing[0]}"
    )


def _library(found: Findings, torch: Any) -> dict[str, Any]:
    """The compiled kernels: their path, what their manifest says, and whether they load."""

    def find() -> Path:
        if torch is None:
            raise Unknown("kernels are not looked for while torch does not import")
        from ..native import extension

        path = extension.find_library()
        return extension.built_dir().parent if path is None else path  # built_dir says what is missing

    def directory() -> Path:
        from ..native import extension

        return extension.built_dir()

    path = found.ask("library", find)
    facts: dict[str, Any] = {"path": None if path is None else str(path), **dict.fromkeys(KERNELS), "loads": None}
    if path is None:
        return facts
    facts |= _kernels(found, "library", directory)
    if facts["kernels"] is None:  # it cannot be compared with what it should hold
        found.note("library.loads", "not tried without a manifest to compare with")
        return facts
    refusal = found.ask("library.loads", lambda: try_library(path))
    facts["loads"] = None if refusal is None else not refusal
    if refusal:
        found.note("library.loads", refusal)
    return facts


def _cards(found: Findings, torch: Any) -> list[dict[str, Any]] | None:
    """The cards as torch sees them; where it sees none, as the driver's tool does, and then not ``usable``."""
    problems = len(found.problems)
    cards = found.ask("cards", lambda: driver.torch_cards(torch)) if torch else []
    if not cards:
        listed = found.ask("cards", driver.listed_cards)
        unknown = listed is None or (not listed and len(found.problems) > problems)
        cards = None if unknown else listed
    for card in cards or []:
        card["arch"] = found.ask(f"cards.{card['index']}.arch", lambda card=card: _arch(card))  # type: ignore[misc]
        for name in ("multiprocessors", "memory_bytes"):
            if card[name] is None:
                found.note(f"cards.{card['index']}.{name}", "torch does not see this card and nvidia-smi does not say")
    return cards


def _arch(card: dict[str, Any]) -> str:
    known = load_manifest(generated_dir()).capability
    for arch, (major, minor) in known.items():
        if card["capability"] == f"{major}.{minor}":
            return arch
    served = ", ".join(f"{arch} ({major}.{minor})" for arch, (major, minor) in known.items())
    raise Unknown(f"{card['name']} has compute capability {card['capability']}, the kernels are for {served}")


def _tuned(found: Findings) -> dict[str, Any]:
    path = found.ask("tuned", tuned.location)
    if path is None:
        found.note("tuned", f"{tuned.VARIABLE}={tuned.OFF} switches it off")
        return {"path": None, "rows": None}
    return {"path": str(path), "rows": found.ask("tuned.rows", lambda: len(tuned.read(path)))}


def _log(found: Findings) -> dict[str, Any]:
    known, unknown = log.words(os.environ.get(log.VARIABLE, ""))
    if unknown:
        found.note("log", log.unknown_words(unknown))
    return {"subjects": list(log.SUBJECTS), "active": known}
