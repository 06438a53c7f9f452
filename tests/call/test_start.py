"""What a program pays before its first result: the import beside torch's own, and the first call's tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from fp8cutlass.tracing import constant

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, cache: Path) -> list[str]:
    """The words that a fresh interpreter prints. Compiled modules are kept in ``cache``, as those of an installation
    are; no collection of garbage, which visits every object of torch, falls into what is timed."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT / "python"), "PYTHONPYCACHEPREFIX": str(cache), "OMP_NUM_THREADS": "1"}
    code = "import gc, sys\nfrom time import process_time\ngc.disable()\n" + code
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


IMPORT = """
import torch
begun = process_time()
import fp8cutlass
print(process_time() - begun, *(name for name in sys.modules if name.startswith("torch._dynamo")))
"""

CALL = """
import torch, fp8cutlass
x = torch.randn(1, 1, 64, 64).bfloat16()
begun = process_time()
fp8cutlass.attention(x, x, x)
first = process_time()
fp8cutlass.attention(x, x, x)
print((first - begun) - (process_time() - first))
"""


def test_the_import_loads_no_tracer_and_is_short(tmp_path: Path) -> None:
    """Seconds of the processor, not of the clock, which other programs stretch; one of three."""
    run(IMPORT, tmp_path)

    def is_short() -> bool:
        seconds, *modules = run(IMPORT, tmp_path)
        assert modules == []
        return float(seconds) < 0.2

    assert any(is_short() for _ in range(3))


def test_the_first_call_reads_its_tables_quickly(tmp_path: Path) -> None:
    """Beyond what every call takes."""
    assert any(float(*run(CALL, tmp_path)) < 0.1 for _ in range(3))


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    """All that ``assume_constant_result`` does is to set attributes; these are the ones."""

    def ours() -> None: ...

    def theirs() -> None: ...

    assert constant(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_a_constant_is_evaluated_once_a_graph() -> None:
    seen: list[int] = []

    @constant
    def answer() -> int:
        seen.append(1)
        return 3

    compiled = torch.compile(lambda x: x * answer(), fullgraph=True, backend="eager")
    assert [float(compiled(torch.tensor(value))) for value in (2.0, 4.0)] == [6.0, 12.0]
    assert len(seen) < 3, "at run time, too"
