"""What a source distribution is made of."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_line_of_the_manifest_template_finds_a_file() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line.strip()]
    assert {line[0] for line in lines} <= {"include", "recursive-include"}
    missing = [name for line in lines if line[0] == "include" for name in line[1:] if not (ROOT / name).is_file()]
    for folder, *patterns in (line[1:] for line in lines if line[0] == "recursive-include"):
        missing += [f"{folder} {p}" for p in patterns if not any(x.is_file() for x in (ROOT / folder).rglob(p))]
    assert missing == []
