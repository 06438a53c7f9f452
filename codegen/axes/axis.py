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

    # A member is written, and hashed, as its name by what str does itself: the points take millions of these.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # its argument has another name
    __hash__ = str.__hash__
