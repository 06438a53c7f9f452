"""The one module that touches the disk: writes what changed and removes what nothing emits, or only compares."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

DIFF_FILES = 8  # changed files whose difference is shown
DIFF_LINES = 40  # of each changed file; the whole diff is one command away

# Only these are ours to remove in an output directory.
OWNED = ("*.cu", "*/*.cu", "manifest.json", "table.txt", "times.txt", "registry.cpp", "ledger.txt")


@dataclass(frozen=True, kw_only=True)
class Written:
    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """`missing` should exist, `orphans` should not, `changed` differ; `diff` is for people."""

    missing: tuple[str, ...]
    orphans: tuple[str, ...]
    changed: tuple[str, ...]
    diff: str

    @property
    def clean(self) -> bool:
        return not (self.missing or self.orphans or self.changed)


def _present(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for pattern in OWNED for p in root.glob(pattern)}


def is_ours(root: Path) -> bool:
    """Whether a folder is absent or empty, or holds a manifest of the generator."""
    if not root.is_dir() or not any(root.iterdir()):
        return True
    try:
        manifest = json.loads((root / "manifest.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format", "profile", "archs", "variants"} <= manifest.keys()


def _replace(path: Path, data: bytes) -> None:
    """A file is there with all its bytes, or as it was. What a link names is left alone."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _drop_empty(folder: Path, root: Path) -> None:
    """Removes a folder below the root that holds nothing any more."""
    if folder != root and not any(folder.iterdir()):
        folder.rmdir()


def write(root: Path, files: dict[str, str]) -> Written:
    """Bytes on disk become exactly `files`. Raises OSError; files that were not yet reached are then as they were.

    A file whose bytes are right keeps its time stamp, so that builds stay incremental.
    """
    written, unchanged = [], []
    for name, text in sorted(files.items()):
        path = root / name
        if path.is_file() and path.read_bytes() == text.encode():
            unchanged.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text.encode())
        written.append(name)
    removed = sorted(_present(root) - set(files))
    for name in removed:
        (root / name).unlink()
        _drop_empty((root / name).parent, root)
    return Written(written=tuple(written), unchanged=tuple(unchanged), removed=tuple(removed))


def compare(root: Path, files: dict[str, str]) -> Difference:
    present = _present(root)
    changed, diffs = [], []
    # Kernels first: they show what an edit did, where the manifest only shows digests on long lines.
    for name, text in sorted(files.items(), key=lambda item: (not item[0].endswith(".cu"), item[0])):
        if name not in present:
            continue
        have = (root / name).read_bytes().decode(errors="replace")
        if have != text:
            changed.append(name)
            if len(changed) > DIFF_FILES:
                continue
            lines = list(
                difflib.unified_diff(
                    have.splitlines(), text.splitlines(), f"on disk/{name}", f"generated/{name}", lineterm="", n=2
                )
            )
            lines = lines or [f"{name}: the same lines with other line ends, or another end of the file"]
            more = len(lines) - DIFF_LINES
            diffs += lines[:DIFF_LINES] + ([f"... {more} more lines"] if more > 0 else [])
    if len(changed) > DIFF_FILES:
        diffs.append(f"... {len(changed) - DIFF_FILES} more changed files")
    return Difference(
        missing=tuple(sorted(set(files) - present)),
        orphans=tuple(sorted(present - set(files))),
        changed=tuple(changed),
        diff="\n".join(diffs),
    )
