"""What torch.compile evaluates once and builds into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, without importing ``torch._dynamo``, which takes a second.

    It sets this attribute and nothing else; a test compares the two for the installed torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
