"""Loading the compiled kernels in a process of their own: a damaged library can end the process that loads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ..manifest import PACKAGE_DIR

TIMEOUT_S = 300  # importing torch from a slow disk included

_CODE = """
import sys
from fp8cutlass.native import extension
try:
    extension.load()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(3)
"""


def try_library(library: Path) -> str:
    """Load the library and compare it with the manifest beside it; "" when that works, else what went wrong."""
    paths = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "FP8CUTLASS_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    result = subprocess.run(
        [sys.executable, "-c", _CODE],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if result.returncode == 0:
        return ""
    if result.returncode < 0:
        return f"{library} ends the process that loads it, by {signal.Signals(-result.returncode).name}"
    if result.returncode == 3:
        return f"{library} does not load: {' '.join(result.stdout.split())}"
    return f"{library} could not be tried: {' '.join(result.stderr.split()[-40:])}"
