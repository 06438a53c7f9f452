"""Runs clang-format over the C++ that people write (include/, csrc/, tests/, benchmarks/), in place or with `--check`.

What the generator writes is not touched: its form belongs to the templates.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "csrc", "tests", "benchmarks")
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}


def main() -> int:
    """The command line; returns the exit status."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(f"usage: {sys.argv[0]} [--check]", file=sys.stderr)
        return 2
    own = Path(sysconfig.get_path("scripts")) / "clang-format"
    tool = str(own) if own.is_file() else shutil.which("clang-format")
    if tool is None:
        print("error: no clang-format: run `python scripts/bootstrap.py lint`", file=sys.stderr)
        return 1
    files = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES)
    options = ["--dry-run", "--Werror"] if sys.argv[1:] else ["-i"]
    status = subprocess.run([tool, *options, *map(str, files)], cwd=ROOT).returncode
    if status == 0:
        print(f"clang-format: {len(files)} files {'are formatted' if sys.argv[1:] else 'formatted'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
