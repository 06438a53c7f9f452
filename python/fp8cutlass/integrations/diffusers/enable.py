"""Switches the attention of a model or a pipeline to FP8, module by module, and says which modules that reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from .backend import BACKENDS, DOOR, NAME, register
from .reach import BACKEND, DISPATCHED, WATCHED, unwatch, watch, way_of


@dataclass(frozen=True)
class Reached:
    """What ``enable`` found, as names of modules. ``print`` shows it in a few lines."""

    dispatched: tuple[str, ...] = ()  # take the backend
    watched: tuple[str, ...] = ()  # call torch's attention, and are watched
    left: dict[str, str] = field(default_factory=dict)  # are not reached, and why

    def __str__(self) -> str:
        lines = [f"{len(self.dispatched)} modules by the backend, {len(self.watched)} by torch's attention"]
        reasons: dict[str, list[str]] = {}
        for name, why in self.left.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  not reached: {', '.join(names[:3])}{more}: {why}")
        return "\n".join(lines)


def enable(target: Any, *, name: str = NAME, exclude: tuple[str, ...] = (), **accuracy: Any) -> Reached:
    """Let the attention of a model, or of all models of a pipeline, run in FP8 where it can.

    Only the modules of ``target`` change; the default of diffusers' dispatcher does not. Calls that cannot be served
    run as before and are counted with the reason under ``diffusers`` in ``fp8cutlass.served()``.

    Args:
        target: a ``torch.nn.Module``, or a pipeline with ``components``.
        name: the name of the backend. Backends with other accuracy have other names.
        exclude: patterns of module names to leave alone, for example ``("transformer_blocks.0.*",)``.
        accuracy: ``scaling``, ``precision``, ``smooth_k``, ``hadamard`` of :func:`fp8cutlass.attention`.

    Returns:
        Which modules are reached and which are not. In a pipeline names begin with that of the component.

    Raises:
        TypeError: an unknown argument, or a target of another kind.
        ValueError: ``name`` is known with another accuracy.
    """
    member = register(name, **accuracy)
    dispatched, watched, left = [], [], {}
    for prefix, model in _models(target):
        if type(model).__module__.startswith("transformers."):
            left[prefix] = "a model of transformers: see fp8cutlass.integrations.transformers"
            continue
        for path, module in model.named_modules():
            full = ".".join(part for part in (prefix, path) if part)
            way = way_of(module)
            if way is None:
                continue
            if any(fnmatchcase(full, pattern) for pattern in exclude):
                left[full] = "excluded"
            elif way == DISPATCHED:
                setattr(module.processor, BACKEND, member)
                dispatched.append(full)
            elif way == WATCHED:
                watch(module, DOOR, BACKENDS[name])
                watched.append(full)
            else:
                left[full] = way
    return Reached(tuple(dispatched), tuple(watched), left)


def disable(target: Any) -> None:
    """Undo ``enable``: diffusers' default backend, and no module watched."""
    for _, model in _models(target):
        for module in model.modules():
            unwatch(module)
            processor = getattr(module, "processor", None)
            if getattr(getattr(processor, BACKEND, None), "value", None) in BACKENDS:
                setattr(processor, BACKEND, None)


def _models(target: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(target, torch.nn.Module):
        yield "", target
    elif isinstance(components := getattr(target, "components", None), dict):
        yield from ((name, part) for name, part in components.items() if isinstance(part, torch.nn.Module))
    else:
        raise TypeError(f"expected a module or a pipeline, got {type(target).__name__}")
