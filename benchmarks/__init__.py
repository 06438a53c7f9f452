"""Kernels against their peers on one card, in one run: ``python -m benchmarks --help``.

``shapes`` names the problems, ``data`` makes their tensors and the reference, ``peers`` prepares contenders, ``grid``
times them (by ``fp8cutlass.timing``); ``results`` is the CSV, ``report`` the ratios and tables, ``plot`` the figure,
``machine`` the stamp that says where numbers come from. ``regret`` judges the choice of kernels, ``candidates`` and
``tune`` improve it, ``overhead`` times the host; ``commands`` and ``options`` are their command lines.
"""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("fp8cutlass") is None:  # a checkout that nobody installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

# The table is judged as everybody has it, whatever `fp8cutlass.tune` found on this machine.
os.environ.setdefault("FP8CUTLASS_TUNED", "off")
