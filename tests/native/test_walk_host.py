"""Which tiles of keys a work item visits, proved on the host by tests/host/walk_test.cpp.

Regressions these catch: a tile at either end of a window that is left out, or that is not masked although it hides a
key from a row; an item that is visited twice or never; a sequence of a ragged batch that reads another one's descales.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from compilers import ROOT, nvcc


def test_items_and_tiles_are_those_of_plain_loops(tmp_path: Path) -> None:
    program = tmp_path / "walk_test"
    built = nvcc("-x", "c++", "-cudart", "none", ROOT / "tests" / "host" / "walk_test.cpp", "-o", program)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 failures" and len(lines) == 12 and all(line.startswith("ok ") for line in lines[:-1])
