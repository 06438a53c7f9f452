"""Precisions for which a target has no kernel, but the emulator: a variant of the manifest lends it its tiles."""

from __future__ import annotations

from dataclasses import replace

from ..manifest import INTEGER, Manifest, Variant
from .special import PRECISE_ENOUGH

NO_NUMBER = -1  # in an extension


def stands_in(manifest: Manifest, arch: str, precision: str) -> bool:
    """Whether a variant has to stand in for kernels of a precision."""
    name = INTEGER.get(precision)
    return name is not None and not any(v.dtype == name and arch in v.targets for v in manifest.variants)


def stand_in(base: Variant, precision: str) -> Variant:
    """The variant that the emulator runs, with the tiles of ``base``."""
    name, softmax = INTEGER[precision], PRECISE_ENOUGH[precision][0]
    id_ = base.id.replace(f"_{base.dtype}_", f"_{name}_").replace(f"_{base.softmax}", f"_{softmax}")
    return replace(base, id=id_, dtype=name, softmax=softmax, score="s32", targets=())


def no_integer_kernel(arch: str, precision: str) -> str:
    """The reason on a card."""
    return f"precision={precision!r} has no kernel for {arch}: it is emulated for CPU tensors"
