"""The command ``fp8cutlass``: what is installed, whether it works, which kernel a problem gets, and how long it takes.

``group`` holds the list of commands and imports a command's module when it is run; ``facts`` finds out what is
installed, for ``info`` to show and ``doctor`` to judge; ``sources`` finds the repository, where there is one.
"""

from .group import main

__all__ = ["main"]
