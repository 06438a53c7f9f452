"""The list of commands: it needs no torch, and holds what is there.

Regressions these catch: a `--help` that takes the seconds of importing torch, or fails with it; a command in the list
that cannot be imported; a library import that became lazy for everybody.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import fp8cutlass
from fp8cutlass.cli import group, main
from fp8cutlass.cli.group import COMMANDS, Entry

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in another process, with a torch that does not import."""
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "python")])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def test_help_needs_no_torch(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = command("-m", "fp8cutlass", "--help")
    assert result.returncode == 0, result.stderr
    for name in ("info", "doctor", "explain", "tune", "bench"):
        assert f"\n  {name} " in result.stdout
        assert command("-m", "fp8cutlass", name, "--help").returncode == 0
    assert "version 0" in command("-m", "fp8cutlass", "--version").stdout


def test_the_script_needs_no_torch_either(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """What pip makes of the entry point is a file of that name."""
    script = tmp_path / "fp8cutlass"
    script.write_text("import sys\nfrom fp8cutlass.cli import main\nsys.exit(main())\n")
    result = command(str(script), "--help")
    assert result.returncode == 0 and "explain" in result.stdout, result.stderr


def test_a_command_that_needs_torch_says_so(command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    for arguments in (("explain", "--shape", "1,8,512,64"), ("bench",)):
        result = command("-m", "fp8cutlass", *arguments)
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert "OSError: libtorch_cpu.so" in result.stderr and "fp8cutlass doctor" in result.stderr


def test_anything_but_the_command_imports_the_library(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """`import fp8cutlass` registers the operators, which a loaded torch.export program relies on."""
    result = command("-c", "import fp8cutlass")
    assert result.returncode != 0 and "libtorch_cpu.so" in result.stderr
    code = "import fp8cutlass, torch; print(torch.ops.fp8cutlass.attend, callable(fp8cutlass.quantize))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "attend True" in result.stdout, result.stderr


def test_the_command_gets_the_same_names_when_it_asks(tmp_path: Path) -> None:
    """A submodule that was imported before does not stand for the function of its name."""
    script = tmp_path / "fp8cutlass"
    script.write_text(
        "import fp8cutlass, sys\n"
        "print('torch' in sys.modules)\n"
        "try:\n    fp8cutlass.nonsense\nexcept AttributeError as error:\n    print(error)\n"
        "from fp8cutlass import quantize, attention\n"
        "import fp8cutlass.quant.quantize\n"
        "print(all(callable(getattr(fp8cutlass, name)) for name in fp8cutlass.__all__ if name != '__version__'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert lines == ["False", "module 'fp8cutlass' has no attribute 'nonsense'", "True"], result.stderr


@pytest.mark.parametrize("name", [name for name, entry in COMMANDS.items() if not entry.imports_torch])
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = COMMANDS[name].load()
    assert command.name == name
    assert (command.help or "").partition("\n")[0] == COMMANDS[name].help


def test_a_command_that_is_not_there_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "later", Entry("cli.later:later", "Comes later."))
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0 and "later" not in result.output
    result = CliRunner().invoke(main, ["later"])
    assert result.exit_code == 2 and "No such command 'later'" in result.output


def test_a_module_with_torch_in_it_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`accuracy` is listed as soon as its module is there, and imported when it is run."""
    assert COMMANDS["accuracy"].place == "accuracy.command:accuracy"
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "command.py").write_text("raise ImportError('was imported')\n")
    monkeypatch.setattr(group, "PACKAGE_DIR", tmp_path)
    assert COMMANDS["accuracy"].exists and not COMMANDS["info"].exists
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0 and COMMANDS["accuracy"].help in result.output


def test_what_is_no_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "wrong", Entry("cli.group:need_library", "A function."))
    with pytest.raises(TypeError, match="fp8cutlass.cli.group:need_library must be a click command"):
        COMMANDS["wrong"].load()
    monkeypatch.setattr(fp8cutlass, "attention", click.Command("x"))
    group.need_library()
