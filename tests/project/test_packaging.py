"""What a source distribution is made of."""

from __future__ import annotations

import subprocess
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]


def test_every_line_of_the_manifest_template_finds_a_file() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line.strip()]
    assert {line[0] for line in lines} <= {"include", "recursive-include"}
    missing = [name for line in lines if line[0] == "include" for name in line[1:] if not (ROOT / name).is_file()]
    for folder, *patterns in (line[1:] for line in lines if line[0] == "recursive-include"):
        missing += [f"{folder} {p}" for p in patterns if not any(x.is_file() for x in (ROOT / folder).rglob(p))]
    assert missing == []


NOT_SHIPPED = (".ci/", ".github/", ".gitignore")  # what concerns the repository alone


def test_every_file_of_the_repository_is_in_the_source_distribution() -> None:
    """Headers with an ending of their own were left out in silence, and what pip unpacks did not compile."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line.strip()]
    named = {name for line in lines if line[0] == "include" for name in line[1:]}
    named |= {"pyproject.toml", "setup.py", "MANIFEST.in"}  # setuptools' own
    folders = [(line[1], line[2:]) for line in lines if line[0] == "recursive-include"]

    def taken(file: str) -> bool:
        inside = ((patterns, Path(file).name) for folder, patterns in folders if file.startswith(f"{folder}/"))
        return file in named or any(fnmatch(name, p) for patterns, name in inside for p in patterns)

    # setuptools takes the package by itself
    left = [f for f in files if not taken(f) and not f.startswith((*NOT_SHIPPED, "python/fp8cutlass/"))]
    assert files and left == []


def test_every_module_is_in_a_package_that_the_wheel_takes() -> None:
    """A folder without `__init__.py` would be left out in silence."""
    folder = ROOT / "python"
    taken = set(find_packages(str(folder)))
    names = {".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("*.py")}
    assert "fp8cutlass.cli" in taken and names == taken


def test_the_command_is_declared_with_what_it_imports() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("dependencies = "))
    assert '"click>=8"' in line
    (line,) = text.partition("[project.scripts]\n")[2].partition("\n\n")[0].splitlines()
    module, _, attribute = line.split('"')[1].partition(":")
    assert callable(getattr(import_module(module), attribute))


def test_the_entry_points_of_engines_are_functions() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        value = lines[lines.index(f'[project.entry-points."{group}"]') + 1].split('"')[1]
        assert value == f"fp8cutlass.integrations.{name}:plugin"
        module, _, attribute = value.partition(":")
        assert callable(getattr(import_module(module), attribute))


def test_the_folder_of_the_backend_has_nothing_else_in_it() -> None:
    """It comes first on the path while a distribution is built: `scripts/wheel.py` there would stand for `wheel`, which
    setuptools imports."""
    (line,) = (line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("backend-path"))
    folder = ROOT / line.split('"')[1]
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["build_backend.py"]
