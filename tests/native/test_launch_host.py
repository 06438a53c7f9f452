"""What a launch asks of the driver, with what shape it launches, and how kernels are loaded, proved on the host by
tests/host/launch_test.cpp with a stand-in for the driver and the runtime.

Regressions these catch: a tensor map of an earlier launch that is used for other sizes, strides, addresses or another
context; a kernel that is not opted in to its shared memory in a second context or thread; a map that is encoded, or an
attribute that is set, at every launch again; a grid, a box or a form that is not what the registry's row says; a kernel
that is loaded twice, or in a capture that refuses it; a file of kernels of another build that is taken; a bias that
does not come to the kernel that adds it, or comes to another.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from compilers import ROOT, nvcc

from scripts import kernel_file

CSRC = ROOT / "csrc"
SOURCES = ("device", "kernel_file", "kernels", "launch", "launch_pack", "launch_resident", "tensor_map", "warpgroup")
VARIANTS = ("plain", "other", "wide", "unrolled", "walks", "window", "window_walks", "biased")
WARP_VARIANTS = ("warp", "warp_large", "warp_late", "warp_biased")
KERNELS = (*VARIANTS, *WARP_VARIANTS, "pack", "halved", "narrow", "copies", "plan", "keeps")
BUILD = "0123456789abcdef"


def put_kernels(folder: Path) -> None:
    """A file of kernels whose cubins are their own names, and some that are not what they should be."""
    folder.mkdir()
    whole = kernel_file.pack("sm90a", BUILD, {name: f"{name}\0".encode() for name in KERNELS})
    (folder / "kernels-sm90a.bin").write_bytes(whole)
    (folder / "kernels-other.bin").write_bytes(whole)
    (folder / "kernels-stale.bin").write_bytes(kernel_file.pack("stale", BUILD[::-1], {"plain": b"plain\0"}))
    short = kernel_file.pack("short", BUILD, {"other": b"other\0", "plain": b"plain\0"})
    (folder / "kernels-short.bin").write_bytes(short[: -kernel_file.ALIGNMENT])


def test_launches(tmp_path: Path) -> None:
    program = tmp_path / "launch_test"
    source = ROOT / "tests" / "host" / "launch_test.cpp"
    built = nvcc(
        *("-x", "c++", "-cudart", "none", "-Xcompiler", "-pthread,-Wall,-Wextra", "-I", CSRC, "-I", source.parent),
        f'-DFP8CUTLASS_BUILD="{BUILD}"',
        *(source, *(CSRC / f"{name}.cpp" for name in SOURCES), "-o", program),
    )
    assert built.returncode == 0, built.stderr
    put_kernels(tmp_path / "_built")
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 failures" and len(lines) == 82 and all(line.startswith("ok ") for line in lines[:-1])
