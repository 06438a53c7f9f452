"""Builds the wheel: renders a profile, compiles it with CMake, ships the library with the manifest that describes it.

Environment:
    FP8CUTLASS_ARCHS       targets, "sm89;sm90a"; default: those of the cards here, else sm89
    FP8CUTLASS_PROFILE     dev, ci or release (default: every kernel that dispatch can choose)
    FP8CUTLASS_JOBS        compilers at once; default: one a core and one for every 4 GB of memory
    FP8CUTLASS_SKIP_BUILD  1: no compilation. The package then runs on CPU tensors only

The library uses torch's stable ABI and no Python API, so the wheel is tagged py3-none-<platform>.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without build isolation pip takes the setuptools that is there
    raise SystemExit(
        f"error: setuptools >= 77 is needed, this is {setuptools.__version__}: run `pip install -U setuptools`"
    ) from None

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from scripts import build_extension, toolchain  # noqa: E402  (needs the path above)


def skip_build() -> bool:
    """FP8CUTLASS_SKIP_BUILD, which is 0 or 1."""
    text = os.environ.get("FP8CUTLASS_SKIP_BUILD", "0")
    if text not in ("0", "1"):
        raise SystemExit(f"error: FP8CUTLASS_SKIP_BUILD must be 0 or 1, got {text!r}")
    return text == "1"


def profile() -> str:
    """FP8CUTLASS_PROFILE, checked."""
    text = os.environ.get("FP8CUTLASS_PROFILE", "release")
    if text not in build_extension.PROFILES:
        raise SystemExit(
            f"error: FP8CUTLASS_PROFILE must be one of {', '.join(build_extension.PROFILES)}, got {text!r}"
        )
    return text


class BuildPy(build_py):
    """Adds the table of all kernels, which a machine without a card explains its choices from."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout reads generated/ itself
            for name in build_extension.TABLES:
                target = Path(self.build_lib) / "fp8cutlass" / "_generated" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(ROOT / "generated" / name), str(target))


class BuildExtension(build_ext):
    """Compiles `fp8cutlass/_C.so` and puts the manifest of what is in it beside it."""

    def run(self) -> None:
        package = ROOT / "python" / "fp8cutlass" if self.inplace else Path(self.build_lib) / "fp8cutlass"
        try:
            build_extension.build(
                package, profile=profile(), archs=build_extension.requested_archs(), jobs=self.parallel or None
            )
        except (build_extension.BuildError, toolchain.ToolchainError) as error:
            raise SystemExit(f"error: {error}") from error

    def get_ext_filename(self, fullname: str) -> str:
        """No interpreter's tag: the library is not a Python module."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "fp8cutlass"
        return [str(package / "_C.so"), *map(str, sorted((package / "_built").glob("*")))]


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform alone, any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


if skip_build():
    setup(cmdclass={"build_py": BuildPy})
else:
    setup(
        ext_modules=[Extension("fp8cutlass._C", sources=[])],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExtension, "bdist_wheel": PlatformWheel},
    )
