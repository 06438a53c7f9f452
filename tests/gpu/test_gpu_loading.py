"""Kernels are loaded from the file beside the library when they are first needed.

Regressions these catch: a kernel whose name in its cubin is not what the library asks for, a first launch that a
capture refuses, threads that load one kernel at a time, a file that is missing or of another build and taken all the
same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import ROOT, built_manifest, card_arch

from fp8cutlass.native import extension
from scripts import kernel_file

pytestmark = pytest.mark.gpu

# All of torch's own code is loaded by a call with another head_dim, so that what is new in the capture is ours.
CAPTURE = """
import sys, torch, fp8cutlass
operands, mode = sys.argv[1:]

def call(head_dim):
    torch.manual_seed(0)
    made = [torch.randn(2, 4, 333, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    options = {"is_causal": True}
    if operands == "fp8":
        options |= {f"{name}_descale": torch.full((1,), 0.5, device="cuda") for name in "qkv"}
        made = [(2 * x).to(torch.float8_e4m3fn) for x in made]
        options |= {"scaling": "tensor", "precision": "high"}
    return lambda: fp8cutlass.attention(*made, **options)

call(64)()
first = call(128)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=mode):
    captured = first()
graph.replay()
torch.cuda.synchronize()
assert torch.equal(captured, first()), "the replay gave other bits"
print("same")
"""

THREADS = """
import threading, torch, fp8cutlass
q, k, v = (torch.randn(2, 4, 333, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
results, begin = [], threading.Barrier(8)
def work():
    begin.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        results.append(fp8cutlass.attention(q, k, v))
        torch.cuda.current_stream().synchronize()
torch.cuda.synchronize()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8 and all(torch.equal(x, results[0]) for x in results)
print("same")
"""

CALL = """
import torch, fp8cutlass
x = torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
try:
    fp8cutlass.attention(x, x, x)
except RuntimeError as error:
    print(error)
"""


def run(script: str, *arguments: str, library: Path | None = None) -> str:
    """What a script prints in a process of its own, in which nothing is loaded."""
    place = {} if library is None else {"FP8CUTLASS_LIBRARY": str(library)}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")} | place
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_of_the_build_loads() -> None:
    arch = card_arch()
    for number, variant in enumerate(built_manifest().variants):
        if arch in variant.targets:
            for source in (None, *extension.SOURCES):
                extension.load_kernels(number, torch.cuda.current_device(), source)


def test_a_variant_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="is not in the registry"):
        extension.load_kernels(len(built_manifest().variants), 0)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("operands", ["half", "fp8"])
def test_a_first_launch_may_be_captured(operands: str, mode: str) -> None:
    assert run(CAPTURE, operands, mode) == "same\n"


def test_first_launches_of_several_threads() -> None:
    assert run(THREADS) == "same\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the library with what belongs to it."""
    found = extension.find_library()
    assert found is not None
    shutil.copytree(found.parent / "_built", tmp_path / "_built")
    return Path(shutil.copy(found, tmp_path / "_C.so"))


def test_a_file_of_kernels_that_is_missing_is_named(library: Path) -> None:
    path = library.parent / "_built" / kernel_file.name_of(str(card_arch()))
    path.unlink()
    said = run(CALL, library=library)
    assert f"cannot be read: {path}" in said and "build or install the package again" in said


def test_a_file_of_kernels_of_another_build_is_refused(library: Path) -> None:
    path = library.parent / "_built" / kernel_file.name_of(str(card_arch()))
    held = kernel_file.read(path)
    path.write_bytes(kernel_file.pack(held.target, "0" * 64, held.cubins))
    said = run(CALL, library=library)
    assert f"{path} is of another build than the library beside it" in said


def test_a_cubin_that_is_damaged_is_refused_by_name(library: Path) -> None:
    path = library.parent / "_built" / kernel_file.name_of(str(card_arch()))
    held = kernel_file.read(path)
    path.write_bytes(kernel_file.pack(held.target, held.build, {name: b"no cubin" for name in held.cubins}))
    said = run(CALL, library=library)
    assert str(path) in said and "cannot be loaded on CUDA device 0" in said
