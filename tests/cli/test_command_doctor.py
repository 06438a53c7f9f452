"""`fp8cutlass doctor`: every check can fail, and then says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fp8cutlass.cli import checks, doctor, main, selftest, sources
from fp8cutlass.cli.checks import FAILED, OK, WARNING, Check

ROOT = Path(__file__).resolve().parents[2]
TABLE = {"directory": "/t", "profile": "release", "targets": ["sm89", "sm90a"], "kernels": 556, "agrees": True}
CARD = {"index": 0, "name": "NVIDIA L4", "capability": "8.9", "arch": "sm89", "usable": True}
# A machine with a card on which everything works.
HEALTHY: dict[str, Any] = {
    "torch": "2.11.0+cu130",
    "torch_cuda": "13.0",
    "driver": "580.65.06",
    "driver_cuda": "13.0",
    "table": TABLE,
    "cards": [CARD],
    "library": TABLE | {"path": "/l/_C.so", "directory": "/l/_built", "targets": ["sm89"], "loads": True},
    "environment": {},
    "problems": [],
}
LAPTOP: dict[str, Any] = {"torch": "2.13.0+cpu", "torch_cuda": None, "driver": None, "driver_cuda": None, "cards": []}
LAPTOP["library"] = dict.fromkeys(HEALTHY["library"])


def machine(*, problems: dict[str, str] | None = None, library: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The healthy machine with changes."""
    facts = copy.deepcopy(HEALTHY) | changes
    facts["library"] = facts["library"] | (library or {})
    facts["problems"] = [{"about": about, "message": text} for about, text in (problems or {}).items()]
    return facts


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | Exception]:
    """What attention makes of the small problem, by device, and of the one over pages."""
    found: dict[str, float | Exception] = dict.fromkeys(("cpu", "cuda:0", "pages of cpu", "pages of cuda:0"), 0.05)

    def error_on(device: str) -> float:
        error = found[device]
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(selftest, "error_on", error_on)
    monkeypatch.setattr(selftest, "paged_error_on", lambda device: error_on(f"pages of {device}"))
    return found


def run(facts: Any, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def by_name(facts: Any) -> dict[str, Check]:
    found = {check.name: check for check in checks.checks(facts)}
    for check in found.values():
        assert check.seen and bool(check.remedy) == (check.status != OK), check
    return found


def test_a_machine_on_which_everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_name(machine())
    assert {check.status for name, check in found.items() if name not in ("nvcc", "CUTLASS")} == {OK}
    result = run(machine(), monkeypatch)
    assert result.exit_code == 0 and "attention runs on NVIDIA L4, the CPU (emulator)" in result.output


def test_a_laptop_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not built there is not missed."""
    facts = machine(problems={"driver": "no NVIDIA driver answers"}, **LAPTOP)
    found = by_name(facts)
    assert (found["driver"].status, found["cards"].status, found["library"].status) == (WARNING, WARNING, OK)
    assert "kernels 0" not in found
    result = run(facts, monkeypatch)
    assert result.exit_code == 0 and result.output.endswith("attention runs on the CPU (emulator)\n")


UNUSABLE = [CARD | {"usable": False}]
NOT_BUILT = dict.fromkeys(HEALTHY["library"])


@pytest.mark.parametrize(
    ("facts", "name", "status", "seen", "remedy"),
    [
        (
            machine(torch=None, torch_cuda=None, problems={"torch": "ModuleNotFoundError: No module named 'torch'"}),
            "torch",
            FAILED,
            "No module named",
            "pip install 'torch>=2.10'",
        ),
        (
            machine(torch=None, torch_cuda=None, problems={"torch": "OSError: libcudart"}),
            "torch",
            FAILED,
            "libcudart",
            "pip install --force-reinstall 'torch>=2.10'",
        ),
        (machine(torch="2.9.1"), "torch", FAILED, "2.9.1, CUDA 13.0, 2.10 is needed", "pip install -U 'torch>=2.10'"),
        (machine(torch="main"), "torch", WARNING, "no version that can be read", "2.10"),
        (machine(torch_cuda=None, cards=UNUSABLE), "torch", FAILED, "without CUDA, and there is a card", "whl/cu130"),
        (
            machine(torch_cuda=None, cards=UNUSABLE, driver_cuda="12.4"),
            "card 0",
            FAILED,
            "not usable from torch",
            "whl/cu126",
        ),
        (
            machine(driver="550.90", driver_cuda="12.8", cards=UNUSABLE),
            "driver",
            FAILED,
            "driver 550.90, serves CUDA 12.8, torch needs CUDA 13.0",
            "update the driver to 580 or newer, or take a torch for this driver: pip install --force-reinstall torch "
            "--index-url https://download.pytorch.org/whl/cu128",
        ),
        (machine(driver_cuda="13.2"), "driver", OK, "13.2", ""),
        (machine(torch_cuda="13.2"), "driver", OK, "serves CUDA 13.0", ""),
        (machine(driver_cuda=None, problems={"driver_cuda": "gone"}), "driver", WARNING, "unknown", "libcuda.so.1"),
        (machine(cards=None, problems={"cards": "NVML"}), "cards", FAILED, "NVML", "nvidia-smi"),
        (
            machine(cards=UNUSABLE, environment={"CUDA_VISIBLE_DEVICES": ""}),
            "card 0",
            FAILED,
            "not usable",
            "CUDA_VISIBLE_DEVICES=''",
        ),
        (
            machine(cards=[CARD | {"arch": None}], problems={"cards.0.arch": "A100 has compute capability 8.0"}),
            "card 0",
            WARNING,
            "A100 has compute capability 8.0",
            "fallback='sdpa'",
        ),
        (
            machine(table=TABLE | {"agrees": False}, problems={"table.agrees": "names 3 kernels"}),
            "table",
            FAILED,
            "names 3 kernels",
            "python -m codegen",
        ),
        (
            machine(
                table=TABLE | {"agrees": None},
                problems={"table": "cut off"},
                environment={"FP8CUTLASS_GENERATED": "/x"},
            ),
            "table",
            FAILED,
            "cut off",
            "unset FP8CUTLASS_GENERATED",
        ),
        (
            machine(library=NOT_BUILT, problems={"library": "the CUDA kernels are not built"}),
            "library",
            FAILED,
            "not built",
            "FP8CUTLASS_ARCHS='sm89' pip install",
        ),
        (
            machine(
                library=NOT_BUILT,
                cards=[],
                environment={"FP8CUTLASS_LIBRARY": "/x.so"},
                problems={"library": "/x.so is no file"},
            ),
            "library",
            FAILED,
            "is no file",
            "unset FP8CUTLASS_LIBRARY",
        ),
        (
            machine(library={"targets": ["sm90a"]}),
            "library",
            FAILED,
            "kernels for sm90a, profile release, /l/_C.so; a card here needs sm89",
            "FP8CUTLASS_ARCHS='sm89'",
        ),
        (
            machine(library={"loads": False}, problems={"library.loads": "they are of different builds"}),
            "library",
            FAILED,
            "different builds",
            "build it again: FP8CUTLASS_ARCHS='sm89'",
        ),
        (
            machine(library={"agrees": False}, problems={"library.agrees": "names kernels"}, cards=[]),
            "library",
            FAILED,
            "names kernels",
            "FP8CUTLASS_ARCHS='sm89'",
        ),
        (machine(library={"loads": False}, problems={"library.loads": "x"}), "kernels 0", WARNING, "not tried", "see"),
    ],
)
def test_what_can_be_wrong(
    facts: Any, name: str, status: str, seen: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = by_name(facts)[name]
    assert check.status == status and seen in check.seen and remedy in check.remedy, check
    result = run(facts, monkeypatch)
    assert check.seen in result.output and (not remedy or f"-> {check.remedy}" in result.output)
    failed = [other.name for other in by_name(facts).values() if other.status == FAILED]
    assert result.exit_code == (1 if failed else 0)
    if failed:
        assert f"failed: {', '.join(failed)}" in result.output


@pytest.mark.parametrize("error", [0.5, float("inf"), RuntimeError("no kernel image is available")])
@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "emulator"), ("cuda:0", "kernels 0"), ("pages of cpu", "pages"), ("pages of cuda:0", "pages 0")],
)
def test_attention_that_is_wrong(
    device: str, name: str, error: float | Exception, errors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors[device] = error
    check = by_name(machine())[name]
    assert check.status == FAILED and ("no kernel image" in check.seen or "limit 0.08" in check.seen)
    assert run(machine(), monkeypatch).exit_code == 1


def test_compilers_matter_for_building_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = sources.toolchain(ROOT)
    monkeypatch.setattr(sources, "toolchain", lambda root: tools)
    monkeypatch.setattr(tools, "_cuda_homes", lambda: iter(()))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    found = {check.name: check for check in checks.compilers(machine())}
    assert [check.status for check in found.values()] == [WARNING, WARNING]
    assert "no nvcc >= 12.8" in found["nvcc"].seen and "only building needs it" in found["nvcc"].seen
    assert "python scripts/bootstrap.py build" in found["nvcc"].remedy
    assert "no CUTLASS headers" in found["CUTLASS"].seen and "nvidia-cutlass" in found["CUTLASS"].remedy
    assert run(machine(), monkeypatch).exit_code == 0


def test_a_compiler_that_is_newer_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of CUDA 13 need a driver of CUDA 13, whatever torch is built for."""
    tools = sources.toolchain(ROOT)
    monkeypatch.setattr(sources, "toolchain", lambda root: tools)
    monkeypatch.setattr(tools, "find_nvcc", lambda: tools.Nvcc(path=Path("nvcc"), version=(13, 0), library_dir=None))
    for served, status in (("12.8", WARNING), ("13.0", OK), (None, OK)):
        check = next(c for c in checks.compilers(machine(driver_cuda=served)) if c.name == "nvcc")
        assert check.status == status and "nvcc, 13.0" in check.seen
        assert ("driver to 580, or name a toolkit of CUDA 12, 12.8 or newer" in check.remedy) == (status == WARNING)


def test_no_checkout_and_a_broken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "repository", lambda: None)
    (check,) = checks.compilers(machine())
    assert check.status == OK and "no checkout" in check.seen
    monkeypatch.setattr(sources, "repository", lambda: tmp_path)
    (check,) = checks.compilers(machine())
    assert check.status == WARNING and "FileNotFoundError" in check.seen


def test_where_a_checkout_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package's own; for an installed package one on Python's path, but no folder that only looks alike."""
    assert sources.repository() == ROOT
    monkeypatch.setattr(sources, "PACKAGE_DIR", tmp_path / "site-packages" / "fp8cutlass")
    (tmp_path / "other" / "benchmarks").mkdir(parents=True)
    (tmp_path / "other" / "benchmarks" / "__main__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path / "other"), str(tmp_path)])
    assert sources.repository() is None
    monkeypatch.setattr("sys.path", [str(tmp_path / "other"), ""])
    monkeypatch.chdir(ROOT)
    assert sources.repository() == ROOT


def test_the_small_problem_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, on the emulator: right within half the limit and more, and far outside with a wrong mask."""
    monkeypatch.undo()
    error = selftest.error_on("cpu")
    assert 0.02 < error < 0.06 < selftest.LIMIT
    import fp8cutlass

    honest = fp8cutlass.attention
    monkeypatch.setattr(fp8cutlass, "attention", lambda *args, is_causal: honest(*args))
    assert selftest.error_on("cpu") > 5 * selftest.LIMIT
    monkeypatch.setattr(fp8cutlass, "attention", lambda *args, is_causal: honest(*args) * float("nan"))
    assert selftest.error_on("cpu") == float("inf")


def test_the_small_problem_of_pages_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages in another order, a length too short, and NaN."""
    monkeypatch.undo()
    assert 0.02 < selftest.paged_error_on("cpu") < 0.05 < selftest.LIMIT
    import fp8cutlass

    honest = fp8cutlass.attention_with_kvcache
    faults: list[Callable[[Any, Any], dict[str, Any]]] = [
        lambda table, lengths: {"page_table": table.roll(1, 1), "cache_seqlens": lengths},
        lambda table, lengths: {"page_table": table, "cache_seqlens": lengths - 20},
    ]
    for fault in faults:

        def broken(q: Any, cache: Any, *, page_table: Any, cache_seqlens: Any, fault: Any = fault) -> Any:
            return honest(q, cache, **fault(page_table, cache_seqlens))

        monkeypatch.setattr(fp8cutlass, "attention_with_kvcache", broken)
        assert selftest.paged_error_on("cpu") > 2 * selftest.LIMIT
    monkeypatch.setattr(fp8cutlass, "attention_with_kvcache", lambda *a, **b: honest(*a, **b) * float("nan"))
    assert selftest.paged_error_on("cpu") == float("inf")
