"""The PEP 517 backend: setuptools', which asks for compilers only when there is something to compile.

Without isolation (`pip install --no-build-isolation .`, or `make build`) these are taken from the environment instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F403  (the hooks that are left as they are)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import requirements, toolchain  # noqa: E402  (needs the path above)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """setuptools' requirements, and what compiles the extension unless FP8CUTLASS_SKIP_BUILD=1.

    nvcc is asked for only where no usable one is installed: the five packages weigh 105 MB.
    """
    needed: list[str] = list(_setuptools.get_requires_for_build_wheel(config_settings))
    if os.environ.get("FP8CUTLASS_SKIP_BUILD") == "1":
        return needed
    needed += [requirements.CMAKE, requirements.NINJA, requirements.CUTLASS, "torch>=2.10"]
    try:
        toolchain.find_nvcc()
    except toolchain.ToolchainError:
        needed += requirements.NVCC
    return needed


get_requires_for_build_editable = get_requires_for_build_wheel
