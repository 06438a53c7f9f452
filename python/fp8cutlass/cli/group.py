"""The list of commands. A command's module is imported when the command is run, not to list it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import click

from .._version import __version__
from ..manifest import PACKAGE_DIR


@dataclass(frozen=True)
class Entry:
    """Where a command is, as ``module:attribute`` inside this package, and its line in the list.

    ``imports_torch``: the module itself needs torch, not only the running of the command.
    """

    place: str
    help: str
    imports_torch: bool = False

    @property
    def exists(self) -> bool:
        """Whether the module is part of this installation; nothing is imported."""
        path = PACKAGE_DIR.joinpath(*self.place.partition(":")[0].split("."))
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()

    def load(self) -> click.Command:
        """Import the command."""
        if self.imports_torch:
            need_library()
        module, _, attribute = self.place.partition(":")
        command = getattr(import_module(f"fp8cutlass.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"fp8cutlass.{self.place} must be a click command, it is {type(command).__name__}")
        return command


# A command whose module is not there is not listed.
COMMANDS = {
    "info": Entry("cli.info:info", "Show versions, cards, what is built and which tables answer."),
    "doctor": Entry("cli.doctor:doctor", "Check that attention runs here, and say what to do where it does not."),
    "explain": Entry("cli.explain:explain", "Say which kernel a problem gets, and why."),
    "tune": Entry("cli.tune:tune", "Find the fastest kernel for a problem on this card."),
    "bench": Entry("cli.bench:bench", "Time the kernels on a card, or the emulator on this CPU."),
    "accuracy": Entry("accuracy.command:accuracy", "Measure errors against float64.", imports_torch=True),
}


def need_library() -> None:
    """Import the library itself; where that fails, end the command with the reason instead of a traceback."""
    import fp8cutlass

    try:
        _ = fp8cutlass.attention
    except Exception as error:  # whatever a torch that is missing, too old or broken raises
        raise click.ClickException(
            f"torch is needed and cannot be used: {type(error).__name__}: {error}. `fp8cutlass doctor` says more"
        ) from error


class LazyGroup(click.Group):
    """A group that answers `--help` from its list."""

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order of the list."""
        return [name for name, entry in COMMANDS.items() if entry.exists]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command of that name; None where there is none."""
        return COMMANDS[name].load() if name in self.list_commands(context) else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(context)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="fp8cutlass")
def main() -> None:
    """FP8 attention for PyTorch on Ada and Hopper.

    FP8CUTLASS_LOG=dispatch in the environment logs which kernel each new problem gets, FP8CUTLASS_LOG=fallback which
    attention calls of a model are not served.
    """
