"""`fp8cutlass info`: the same keys on every machine, whatever is missing or broken there."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from test_extension import describe, stub

from fp8cutlass.cli import driver, facts, loading, main
from fp8cutlass.manifest import TABLES, Manifest, generated_dir
from fp8cutlass.native import extension

ROOT = Path(__file__).resolve().parents[2]
TABLE = {"directory", "profile", "targets", "kernels", "manifest_sha256", "agrees"}
KEYS = {
    "": {
        "fp8cutlass",
        "python",
        "platform",
        "torch",
        "torch_cuda",
        "driver",
        "driver_cuda",
        "table",
        "cards",
        "library",
        "answers",
        "emulator",
        "tuned",
        "log",
        "environment",
        "problems",
    },
    "table": TABLE,
    "library": TABLE | {"path", "loads"},
    "answers": {"cpu", "cuda"},
    "tuned": {"path", "rows"},
    "log": {"subjects", "active"},
}
CARD = {"index", "name", "capability", "arch", "multiprocessors", "memory_bytes", "usable"}


def nulls(value: Any, path: str = "") -> list[str]:
    """The dotted keys whose value is null."""
    if value is None:
        return [path]
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [found for key, item in items for found in nulls(item, f"{path}.{key}".strip("."))]


def info() -> dict[str, Any]:
    """What `info --json` prints: the frozen keys, each null with its reason; `info` runs as well."""
    text = CliRunner().invoke(main, ["info"])
    assert text.exception is None and text.exit_code == 0, repr(text.exception)
    result = CliRunner().invoke(main, ["info", "--json"])
    assert result.exception is None and result.exit_code == 0, repr(result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    for key, keys in KEYS.items():
        assert set(found[key] if key else found) == keys
    assert all(set(card) == CARD for card in found["cards"] or [])
    assert all(set(problem) == {"about", "message"} and problem["message"] for problem in found["problems"])
    about = {problem["about"] for problem in found["problems"]}
    for path in nulls(found):
        parts = path.split(".")
        assert any(".".join(parts[:n]) in about for n in range(1, len(parts) + 1)), f"{path} is null without a reason"
    for problem in found["problems"]:
        assert problem["message"] in text.output
    return found


def said(found: dict[str, Any], about: str) -> str:
    return "; ".join(problem["message"] for problem in found["problems"] if problem["about"] == about)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No card, no driver, no library, no variables, whatever machine this is."""
    for name in facts.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(extension, "PACKAGE_DIR", tmp_path / "package")
    monkeypatch.setattr(driver, "LIBRARY", "libnone.so.1")
    monkeypatch.setattr(driver, "PROC", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_the_keys_are_documented() -> None:
    text = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    for keys in (*KEYS.values(), CARD):
        assert all(f"`{key}`" in text for key in keys)


def test_a_machine_without_anything(manifest: Manifest) -> None:
    found = info()
    assert (found["driver"], found["driver_cuda"], found["cards"]) == (None, None, [])
    assert found["table"]["kernels"] == len(manifest.variants) and found["table"]["agrees"] is True
    assert found["answers"] == {"cpu": str(generated_dir()), "cuda": None}
    assert found["emulator"] is True and found["environment"] == {}
    assert found["library"]["path"] is None and "not built" in said(found, "library")


def test_what_was_tuned_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("FP8CUTLASS_TUNED", str(path))
    assert info()["tuned"] == {"path": str(path), "rows": 0}
    path.write_text("{")
    found = info()
    assert found["tuned"]["rows"] is None and str(path) in said(found, "tuned.rows")
    assert found["environment"] == {"FP8CUTLASS_TUNED": str(path)}
    monkeypatch.setenv("FP8CUTLASS_TUNED", "off")
    found = info()
    assert found["tuned"] == {"path": None, "rows": None} and "switches it off" in said(found, "tuned")


def test_torch_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA driver initialization failed\nsomewhere")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    found = info()
    assert found["cards"] is None
    assert said(found, "cards") == "RuntimeError: CUDA driver initialization failed somewhere"


def test_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(facts, "_import_torch", fails)
    found = info()
    assert (found["torch"], found["torch_cuda"], found["library"]["path"]) == (None, None, None)
    assert "libcudart.so.13" in said(found, "torch")


def card(index: int, capability: tuple[int, int], name: str) -> SimpleNamespace:
    major, minor = capability
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=58 + index, total_memory=24 << 30)


def test_cards_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [card(0, (8, 9), "NVIDIA L4"), card(1, (8, 0), "NVIDIA A100")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    found = info()
    first = {"index": 0, "name": "NVIDIA L4", "capability": "8.9", "arch": "sm89", "multiprocessors": 58}
    assert found["cards"][0] == first | {"memory_bytes": 24 << 30, "usable": True}
    assert found["cards"][1]["arch"] is None
    assert "A100 has compute capability 8.0, the kernels are for sm89 (8.9)" in said(found, "cards.1.arch")


def smi(folder: Path, answers: dict[str, str], status: int = 0) -> None:
    """An nvidia-smi that answers queries."""
    folder.mkdir()
    cases = "".join(f"  *{fields}*) echo '{answer}';;\n" for fields, answer in answers.items())
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexit {status}\n')
    (folder / "nvidia-smi").chmod(0o755)


def test_cards_that_only_the_driver_sees(tmp_path: Path) -> None:
    smi(tmp_path / "bin", {"driver_version": "550.90.07", "compute_cap": "0, NVIDIA H200, 9.0, [N/A]"})
    found = info()
    assert found["driver"] == "550.90.07"
    (one,) = found["cards"]
    assert (one["arch"], one["usable"], one["multiprocessors"], one["memory_bytes"]) == ("sm90a", False, None, None)


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    smi(tmp_path / "bin", {"": "Failed to initialize NVML: Driver/library version mismatch"}, status=18)
    found = info()
    assert found["cards"] is None and found["driver"] is None
    assert "ended with 18: Failed to initialize NVML" in said(found, "cards")


def test_the_driver_is_asked_in_other_ways(compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file in /proc where there is no nvidia-smi, and its library for the CUDA that it serves."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    monkeypatch.setattr(driver, "PROC", tmp_path / "version")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    for status, wanted in ((0, "13.2"), (3, None)):
        source.write_text(f"int cuDriverGetVersion(int* number) {{ *number = 13020; return {status}; }}\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", f"{library}{status}"], check=True)
        monkeypatch.setattr(driver, "LIBRARY", f"{library}{status}")
        found = info()
        assert (found["driver"], found["driver_cuda"]) == ("580.65.06", wanted)
        assert ("error 3" in said(found, "driver_cuda")) == (wanted is None)


@pytest.mark.parametrize("name", ["manifest.json", "table.txt"])
@pytest.mark.parametrize(
    "content", ["", "nothing", "[]", "{}", '{"format": 1}', '{"format": 9}', "format 2\n", "format 9\n", None]
)
def test_tables_that_cannot_be_read(
    name: str, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None stands for a file that was cut off."""
    directory = tmp_path / "tables"
    shutil.copytree(generated_dir(), directory, ignore=lambda _, names: set(names) - set(TABLES))
    whole = (directory / name).read_bytes()
    (directory / name).write_bytes(whole[: len(whole) // 2] if content is None else content.encode())
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(directory))
    found = info()
    assert found["table"]["directory"] == str(directory) and found["table"]["manifest_sha256"]
    assert found["table"]["agrees"] is None and found["emulator"] is False
    assert (found["table"]["kernels"] is None) == (name == "manifest.json")
    assert str(directory) in said(found, "table" if name == "manifest.json" else "table.agrees")


def test_a_directory_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CUTLASS_GENERATED", str(tmp_path))
    found = info()
    assert found["answers"]["cpu"] is None and "holds no manifest.json" in said(found, "table")
    assert found["environment"] == {"FP8CUTLASS_GENERATED": str(tmp_path)}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that makes libraries, on PATH."""
    found = shutil.which("cc", path="/usr/bin:/usr/local/bin:/bin")
    if found is None:
        pytest.fail("no C compiler: the extension could not be built either")
    monkeypatch.setenv("PATH", str(Path(found).parent))
    monkeypatch.setattr(driver, "_query", lambda fields: [])
    monkeypatch.setattr(driver, "listed_cards", lambda: [])


def test_a_library_of_all_kernels(
    compiler: None, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [variant.id for variant in manifest.variants]
    library = stub(tmp_path / "all", ids)
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    held = info()["library"]
    assert (held["path"], held["kernels"], held["agrees"], held["loads"]) == (str(library), len(ids), True, True)
    assert held["targets"] == list(manifest.archs)


def test_a_library_that_is_not_that_of_its_tables(
    compiler: None, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of kernels, and a table that names some that are not there."""
    ids = [variant.id for variant in manifest.variants[:3]]
    library = stub(tmp_path / "three", list(reversed(ids)))
    describe(library, ids)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    found = info()
    assert (found["library"]["kernels"], found["library"]["agrees"], found["library"]["loads"]) == (3, False, False)
    assert f"holds '{ids[2]}' as variant 0" in said(found, "library.loads")
    assert "kernels that the manifest beside it does not list" in said(found, "library.agrees")


def damaged(folder: Path) -> Path:
    """A file that is no library, with good tables beside it."""
    folder.mkdir()
    (folder / "_built").mkdir()
    for name in TABLES:
        shutil.copy(generated_dir() / name, folder / "_built")
    (folder / "_C.so").write_bytes(b"\x7fELF and no more")
    return folder / "_C.so"


def test_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = damaged(tmp_path / "damaged")
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    found = info()
    assert found["library"]["loads"] is False and "does not load: OSError" in said(found, "library.loads")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", f"by {signal.SIGBUS.name}"),
        ("raise SystemExit('no interpreter')", "could not be tried: no interpreter"),
    ],
)
def test_a_library_that_ends_its_process(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was cut off does, when the linker touches pages past its end."""
    library = damaged(tmp_path / "damaged")
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    monkeypatch.setattr(loading, "_CODE", code)
    found = info()
    assert found["library"]["loads"] is False and message in said(found, "library.loads")


def test_a_library_without_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = damaged(tmp_path / "damaged")
    (library.parent / "_built" / "manifest.json").write_text('{"format": 1, "profile": "ci"')
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(library))
    held = info()["library"]
    assert (held["path"], held["kernels"], held["loads"]) == (str(library), None, None)
    monkeypatch.setenv("FP8CUTLASS_LIBRARY", str(tmp_path / "nowhere.so"))
    assert "is no file" in said(info(), "library")


def test_the_variable_for_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CUTLASS_LOG", "dispatch,launches")
    found = info()
    assert found["log"] == {"subjects": ["dispatch", "fallback"], "active": ["dispatch"]}
    assert "'launches'" in said(found, "log")
