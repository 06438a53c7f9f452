"""Other builds of the same kernels: with random waits where memory changes hands, and by another optimisation level.

Regressions these catch: a barrier that only timing made unnecessary, results that depend on when a warp runs, a kernel
that is right by one schedule of the compiler's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu import ROOT, built_decodes, card_arch, fp8_variants, loop_form
from sources import write_source

from codegen.arch import TARGETS
from codegen.decode import ALL
from codegen.gates.toolbox import ToolboxError, open_toolbox
from codegen.render import environment, render_decode
from fp8cutlass.manifest import generated_dir, load_manifest
from scripts.cubins import run_nvcc
from scripts.toolchain import ToolchainError, find_nvcc

DELAYS, OTHER_LEVEL = "-DFP8CUTLASS_DELAY=1", "-Xptxas=-O2"
JOBS = 6  # compilers at once, beside other tests
WORK = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()
"""


def kinds() -> list[str]:
    """One kernel of each schedule, form of the loop and cluster of the card's own family, with and without a mask."""
    native = [v for v in fp8_variants() if v.family == card_arch()]
    return [v.id for v in {(v.schedule, loop_form(v), v.cluster, v.causal): v for v in reversed(native)}.values()]


def decodes() -> list[str]:
    """The kernels of decode of profile ci for the card: each head_dim and each number of rows."""
    return [d.id for d in built_decodes() if d.arch == card_arch() and d.profile != "release"]


def build(folder: Path, flags: str) -> Path:
    """The extension with these kernels and these further options of nvcc."""
    try:
        find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    arch = str(card_arch())
    ids = [x for name in (*kinds(), *decodes()) for x in ("--only", name)]
    steps = (
        ["-m", "codegen", "--arch", arch, *ids, "--out", folder / "generated"],
        ["scripts/build_extension.py", "--generated", folder / "generated", "--build-dir", folder / "work"]
        + ["--dest", folder / "fp8cutlass", "--jobs", str(JOBS)],
    )
    for step in steps:
        environment = os.environ | {"FP8CUTLASS_CUDA_FLAGS": flags}
        done = subprocess.run(
            [sys.executable, *map(str, step)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "fp8cutlass" / "_C.so"


def passed(library: Path, tests: str, expression: str) -> int:
    """How many tests pass on a library, in a session of its own; none may fail."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{tests}", "-k", expression],
        cwd=ROOT,
        env=environment | {"FP8CUTLASS_LIBRARY": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed[^\n]* in \d", done.stdout)  # not the line about edge cases
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("delayed"), DELAYS)


@contextmanager
def load() -> Iterator[None]:
    """Another process that keeps the card busy."""
    worker = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        yield
        assert worker.poll() is None, "the load ended before the tests did"
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.gpu
@pytest.mark.edge(44)
def test_delayed_kernels_are_right_and_repeat_a_thousand_times(delayed: Path) -> None:
    assert passed(delayed, "test_gpu_variants.py", "thousand or test_variant") > 6 * len(kinds())


@pytest.mark.gpu
@pytest.mark.edge(44)
def test_delayed_kernels_of_decode_are_right_and_repeat_a_thousand_times(delayed: Path) -> None:
    """Whoever arrives last puts the parts together: the order of arrival is another in each run."""
    assert passed(delayed, "test_gpu_decode.py", "thousand or exact or shared_by_all") > 10 * len(decodes())


@pytest.mark.gpu
@pytest.mark.edge(44)
def test_delayed_kernels_quantise_q_to_the_same_bits(delayed: Path) -> None:
    assert passed(delayed, "test_gpu_source.py", "SameBits") >= 3


@pytest.mark.gpu
@pytest.mark.edge(44)
def test_delayed_kernels_repeat_beside_another_process(delayed: Path) -> None:
    with load():
        assert passed(delayed, "test_gpu_variants.py", "thousand") >= 2


@pytest.mark.gpu
@pytest.mark.edge(60)
def test_another_optimisation_level(tmp_path: Path) -> None:
    """ptxas -O2: every kernel still passes the z-test and its other gates, and repeats."""
    library = build(tmp_path, OTHER_LEVEL)
    assert passed(library, "test_gpu_variants.py", "test_variant") >= 6 * len(kinds())
    assert passed(library, "test_gpu_decode.py", "thousand or exact") > 10 * len(decodes())


@pytest.mark.parametrize(("name", "least"), [("serial", 8), ("decode_sm90a_d64_r8", 6)])
def test_only_a_build_with_delays_has_them(name: str, least: int, tmp_path: Path) -> None:
    try:
        tools = open_toolbox()
    except ToolboxError as error:
        pytest.skip(str(error))
    if name == "serial":
        variants = load_manifest(generated_dir()).variants
        kernel = next(v for v in variants if v.family == "sm90a" and v.kind == "fwd" and v.schedule == name)
        source = write_source(kernel.id, tmp_path)
    else:
        source = tmp_path / f"{name}.cu"
        source.write_text(render_decode(next(d for d in ALL if d.id == name), environment()))
    waits = {}
    for flags in ([], [DELAYS]):
        cubin = tmp_path / "kernel.cubin"
        run_nvcc([*tools.command(TARGETS["sm90a"].gencode, source, cubin), *flags], tools.environment)
        listing = subprocess.run([str(tools.nvdisasm), "-c", str(cubin)], capture_output=True, text=True, check=True)
        waits[len(flags)] = listing.stdout.count("NANOSLEEP")
    assert waits[0] == 0 and waits[1] >= least, waits
