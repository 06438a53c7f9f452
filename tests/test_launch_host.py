"""What a launch asks of the driver, proved on the host by tests/host/launch_test.cpp with a stand-in for the driver.

Regressions these catch: a tensor map of an earlier launch that is used for other sizes, strides, addresses or another
context; a kernel that is not opted in to its shared memory in a second context or thread; a map that is encoded, or an
attribute that is set, at every launch again.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from compilers import ROOT, nvcc


def test_maps_and_attributes_are_kept_where_nothing_has_changed(tmp_path: Path) -> None:
    program = tmp_path / "launch_test"
    source = ROOT / "tests" / "host" / "launch_test.cpp"
    built = nvcc("-x", "c++", "-cudart", "none", "-Xcompiler", "-pthread", source, "-o", program)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 failures" and len(lines) == 10 and all(line.startswith("ok ") for line in lines[:-1])
