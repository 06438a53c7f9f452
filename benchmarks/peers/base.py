"""What a contender is, and what a peer has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..data import Data


class Refused(RuntimeError):
    """A peer does not serve a shape; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem, operands ready.

    ``launch`` works on the current stream without synchronising and returns its output, ``layout`` "bhsd" or "bshd",
    to be multiplied by ``out_descale``. ``quantise`` makes the operands once more from bf16 (None for 16-bit
    contenders). ``chosen`` is False for kernels that run beside the one that a caller would get.
    """

    name: str
    precision: str  # "fp8", "bf16" or "int8"
    launch: Callable[[], torch.Tensor]
    quantise: Callable[[], object] | None = None
    layout: str = "bhsd"
    out_descale: float = 1.0
    kernel: str = ""
    chosen: bool = True

    def as_bhsd(self, out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2) if self.layout == "bshd" else out


class Peer(Protocol):
    """A source of contenders. Importing its module needs nothing but torch."""

    name: str
    precision: str

    def available(self) -> str | None:
        """The reason why it cannot run here, or None."""

    def version(self) -> str:
        """What stands in the stamp."""

    def prepare(self, data: Data) -> list[Contender]:
        """Make operands and return what is to be timed; Refused where the shape is not served."""
