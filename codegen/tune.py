"""`python -m codegen tune`: a door to the benchmarks, which know torch and the card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(arguments: tuple[str, ...]) -> None:
    """Build and time candidates on a card and write their rows of tuning/: runs `python -m benchmarks tune`."""
    command = [sys.executable, "-m", "benchmarks", "tune", *arguments]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
