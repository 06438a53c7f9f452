"""The base of all axes: an enum whose members are records."""

from __future__ import annotations

from enum import Enum
from inspect import get_annotations
from typing import Any


class Axis(str, Enum):
    """A member is its name, as ids spell it, with facts: `LINEAR = "linear", {"score": "f16", ...}`.

    The annotations of a class say which facts its members have. Each member states all of them.
    """

    def __new__(cls, name: str, facts: dict[str, Any] | None = None) -> Axis:
        stated, declared = set(facts or {}), set(get_annotations(cls))
        if stated != declared:
            raise TypeError(f"{cls.__name__} {name!r} states {sorted(stated)}, its class declares {sorted(declared)}")
        member = str.__new__(cls, name)
        member._value_ = name
        for fact, value in (facts or {}).items():
            setattr(member, fact, value)
        return member

    def __str__(self) -> str:
        return str(self._value_)  # `value` is a descriptor, and the ids of all points take millions of these

    def __format__(self, spec: str) -> str:
        return format(str(self._value_), spec)
