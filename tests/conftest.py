"""Import paths, threads, the manifest, the skip of tests that need a card, and what is said at the end of a session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CARD_TESTS = ROOT / "tests" / "gpu"
SUBJECTS = sorted(path for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
for folder in (*SUBJECTS, ROOT / "tests", ROOT / "python", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from edges import EdgeCases  # noqa: E402
from outcomes import mutants_line  # noqa: E402
from processes import one_of_many  # noqa: E402

from fp8cutlass.call import fallback, memo  # noqa: E402
from fp8cutlass.manifest import Manifest, generated_dir, load_manifest  # noqa: E402
from fp8cutlass.native import extension  # noqa: E402

os.environ["FP8CUTLASS_TUNED"] = "off"  # what was tuned on this machine must not decide what is tested

# `make test` compiles into build/: where there is a card, and no library beside the package, its tests run on that one.
CI_LIBRARY = ROOT / "build" / "test" / "fp8cutlass" / "_C.so"
if torch.cuda.is_available() and extension.find_library() is None and CI_LIBRARY.is_file():
    os.environ["FP8CUTLASS_LIBRARY"] = str(CI_LIBRARY)

if "PYTEST_XDIST_WORKER" in os.environ:
    one_of_many()
gc.disable()  # until tests are collected: of what is made meanwhile nothing goes


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--edge-table``."""
    parser.addoption("--edge-table", metavar="FILE", help="write what became of each edge case (tests/edge_cases.py)")


def pytest_configure(config: pytest.Config) -> None:
    """The plugin that follows the edge cases."""
    config.pluginmanager.register(EdgeCases(config, left_out(config)), "edge-cases")


def left_out(config: pytest.Config) -> list[Path]:
    """The files of which no test could run: those of tests/gpu without a card, unless that folder, or something in it,
    is asked for by name. `tests/project/test_collection.py` collects them all the same, once."""
    asked = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    inside = any(path == CARD_TESTS or CARD_TESTS in path.parents for path in asked)
    around = any(path in CARD_TESTS.parents for path in asked)
    return sorted(CARD_TESTS.glob("test_*.py")) if around and not inside and not torch.cuda.is_available() else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Thousands of tests would be collected in each process, and reported one by one, to say that there is no card."""
    return True if collection_path == CARD_TESTS and left_out(config) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no card or nothing built for it, and say which."""
    reason = None
    if not torch.cuda.is_available():
        reason = "needs an NVIDIA card"
    elif extension.find_library() is None:
        reason = "needs the built extension"
    for item in items:
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Garbage is collected again."""
    gc.enable()


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times at its end: of what the last module left, not of all that the process has."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line for what was left out, and one for the mutants that ran; `-q` shows them too."""
    if files := left_out(config):
        terminalreporter.write_line(f"left out: {len(files)} files in tests/gpu, which need an NVIDIA card")
    line = mutants_line(terminalreporter.stats)
    if line is not None:
        terminalreporter.write_line(line)


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_collected() -> Iterator[None]:
    """What is there when a module begins, the collected tests above all, is left out of later collections of garbage:
    the benchmarks ask for one before each measurement, which then took 0.3 s."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def _nothing_was_called() -> None:
    """A fallback is warned about once in a process, and known calls are kept, so what a test sees would depend on
    their order."""
    fallback._warned.clear()
    memo.forget()


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    """The manifest that dispatch and the emulator use."""
    return load_manifest(generated_dir())
