"""Which kernels a profile builds: covers of what is emitted, computed from axes and texts. No list of conditions.

`dev` serves every call of one head_dim with default operands, by one kernel a class. `ci` contains it. There, each kind
of line of code, and each value of each axis, occurs at every head_dim at which it occurs at all. `release` is all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from codegen.axes import Operand, Out, Scaling
from codegen.cover import cover, kinds_of_lines
from codegen.kept import kept
from codegen.pack import Pack, served_by
from codegen.render import environment, render_kernel
from codegen.select import select
from codegen.variant import AXES, Variant

PROFILES = ("dev", "ci", "release")  # each contains the one before
DEV_HEAD_DIM = 64  # what the demo and the extension that `make test` builds ask for
_COMMENT = re.compile(r"//.*")
# Shapes are numbers of a kernel, whose lines are the same for all: `ci` has each, but not at every head_dim.
_SHAPE = ("tile", "stages")

Part = tuple[object, ...]


def _dev_parts(v: Variant) -> frozenset[Part]:
    """The class of problems that a kernel serves, where it is one of `dev`."""
    default = v.scaling is Scaling.BLOCK and v.dtype is Operand.E4M3 and v.out is Out.BF16 and not v.kind.diagnostic
    return frozenset(
        {(v.family, v.mask, v.softmax, v.walk, v.change, v.paired)} if default and v.head_dim == DEV_HEAD_DIM else ()
    )


def _ci_parts(v: Variant, text: str) -> frozenset[Part]:
    axes = {(v.family, axis, getattr(v, axis), None if axis in _SHAPE else v.head_dim) for axis in AXES}
    lines = map(_code, kinds_of_lines(text, v.id))
    return frozenset(axes | {(v.family, v.head_dim, line) for line in lines})


@cache
def _code(line: str) -> str:
    return _COMMENT.sub("", line).rstrip()


@cache
def _smallest() -> dict[str, str]:
    """The smallest profile of each emitted variant that is in one below release, by id."""
    return kept("profiles", _covers)


def _covers() -> dict[str, str]:
    env = environment()
    by_id = {v.id: v for v in select().emitted}
    dev = cover({i: _dev_parts(v) for i, v in by_id.items()})
    ci = cover({i: _ci_parts(v, render_kernel(v, env)) for i, v in by_id.items()}, given=dev)
    return dict.fromkeys(ci, "ci") | dict.fromkeys(dev, "dev")


def profile_of(v: Variant) -> str:
    """The smallest profile that contains a variant."""
    return _smallest().get(v.id, PROFILES[-1])


def in_profile(v: Variant, profile: str) -> bool:
    return PROFILES.index(profile_of(v)) <= PROFILES.index(profile)


def of_profile(variants: Iterable[Variant], profile: str) -> tuple[Variant, ...]:
    return tuple(v for v in variants if in_profile(v, profile))


def pack_profile(pack: Pack, variants: Iterable[Variant]) -> str:
    """The smallest profile that has one of the variants that a pack makes operands for."""
    return min((profile_of(v) for v in variants if served_by(pack, v)), key=PROFILES.index)
