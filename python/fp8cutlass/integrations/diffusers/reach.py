"""Which way the attention of a module of diffusers takes, read from the names in its code; and a watch over modules."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from ..dense import Accuracy
from ..sdpa import AttentionMode
from .masks import visible_mask

DISPATCHED, WATCHED = "dispatched", "watched"
BACKEND = "_attention_backend"  # of a processor: what it asks the dispatcher for
DISPATCHER, TORCH = "dispatch_attention_fn", "scaled_dot_product_attention"
DEEPEST = 3  # functions that call one another, as far as they are followed


def way_of(module: torch.nn.Module) -> str | None:
    """DISPATCHED: its processor asks the dispatcher for the backend that is set on it. WATCHED: it calls torch's
    attention, or the dispatcher for its default. None: it has no attention. Else the reason why it is not reached."""
    processor = getattr(module, "processor", None)
    caller = module if processor is None else processor
    owner: Any = type(caller)
    code = owner.__call__
    if code in (torch.nn.Module.__call__, Watched.__call__):
        code = owner.forward
    found = _called(code, owner, DEEPEST)
    if processor is None:
        return WATCHED if found else None
    if DISPATCHER in found and hasattr(processor, BACKEND):
        return DISPATCHED
    return WATCHED if found else f"{type(processor).__name__} computes attention itself"


@cache
def _called(function: Any, owner: Any, depth: int) -> frozenset[str]:
    """Which of DISPATCHER and TORCH the code of a function names, or that of methods and functions that it names."""
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType):
        return frozenset()
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    found = names & {DISPATCHER, TORCH}
    if depth:
        for name in names - found:
            other = getattr(owner, name, None) or function.__globals__.get(name)
            if isinstance(other, FunctionType) and other.__module__.startswith("diffusers.") and other is not function:
                found |= _called(other, owner, depth - 1)
    return frozenset(found)


class _Mode(AttentionMode):
    """Without the masks that hide nothing."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return super().attend(query, key, value, visible_mask(attn_mask), *args, **kwargs)


class Watched:
    """Stands before the class of a module that ``watch`` was called for: its calls run in a mode that serves attention.

    Not its ``forward`` alone: libraries that offload weights put another one on the module.
    """

    _fp8cutlass: tuple[str, str, Accuracy]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        with _Mode(*self._fp8cutlass):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class has no name of its own by which a pickle could find it."""
        return _made, (type(self).__mro__[2],), self.__dict__


def _made(kind: Any) -> Any:
    made = _watched(kind)
    return object.__new__(made)


@cache
def _watched(kind: Any) -> type:
    """``kind`` with ``Watched`` before it, under the same name, which diffusers compares."""
    return type(kind.__name__, (Watched, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def watch(module: torch.nn.Module, door: str, accuracy: Accuracy) -> None:
    """Serve the calls of torch's attention inside ``module`` from now on."""
    if not isinstance(module, Watched):
        kind: Any = type(module)
        module.__class__ = _watched(kind)
    processor = getattr(module, "processor", None)
    module._fp8cutlass = (door, type(module if processor is None else processor).__name__, accuracy)  # type: ignore


def unwatch(module: torch.nn.Module) -> None:
    """The module's own class again."""
    if isinstance(module, Watched):
        module.__class__ = type(module).__mro__[2]
        del module._fp8cutlass
