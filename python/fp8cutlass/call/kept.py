"""Calls that were made before, by what tells them apart."""

from __future__ import annotations

from typing import Any, TypeVar

LIMIT = 4096  # calls that are kept; then all are forgotten, as a program with ever new shapes gains nothing
Signature = tuple[Any, ...]
Run = TypeVar("Run")


class Kept(dict[Signature, Run]):
    """What runs a further call, by signature."""

    def look_up(self, signed: Signature) -> Run | None:
        """The call with this signature; None where there was none."""
        try:
            return self.get(signed)
        except TypeError:  # an option that cannot be hashed; the long way refuses it
            return None

    def keep(self, signed: Signature, run: Run) -> None:
        """Keep a call that has succeeded."""
        if len(self) >= LIMIT:
            self.clear()
        self[signed] = run


def refused(error: RuntimeError) -> bool:
    """Whether an operator has refused a tensor, before it launched anything."""
    said = str(error)
    return "fp8cutlass: " in said and "CUDA" not in said
