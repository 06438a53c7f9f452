"""What a device runs: which manifest and table, which architecture, how many multiprocessors.

``torch.compile`` evaluates the functions that are marked as constant once and builds their result into the graph. They
depend on no size but ``head_dim``. They return reasons where a caller may want to catch an error: traced code cannot
catch an exception that they raise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from ..errors import NoKernelError, UnsupportedError
from ..manifest import INTEGER, generated_dir, load_manifest
from ..native import extension
from ..tracing import constant
from .dispatch import load_table, refusal
from .problem import CPU_ARCH, CPU_SM_COUNT
from .special import LISTED, NEW_MASKS, Asked, no_special_kernel, special_kernels
from .stand_in import no_integer_kernel, stands_in


@dataclass(frozen=True)
class Target:
    """``directory`` holds the manifest and the table that are in force; ``card`` is the name of a CUDA device."""

    directory: Path
    arch: str
    sm_count: int
    card: str = ""


def target(device: torch.device, *, shipped: bool = False) -> Target:
    """Return what ``device`` runs; UnsupportedError when its kernels are not built.

    With ``shipped`` the shipped table answers for a CUDA device as well, built or not.
    """
    # Both variables and the assumed card may change between calls, so they are part of the key.
    variables = os.environ.get("FP8CUTLASS_LIBRARY"), os.environ.get("FP8CUTLASS_GENERATED")
    return _target(device, shipped, *variables, extension.assumed())


@cache
def _target(
    device: torch.device,
    shipped: bool,
    library: str | None,
    generated: str | None,
    assumed: extension.Properties | None,
) -> Target:
    if device.type == "cpu":
        return Target(generated_dir(), CPU_ARCH, CPU_SM_COUNT)
    if device.type != "cuda":
        raise NoKernelError(f"query is on {device}; accepted are cpu and cuda tensors")
    if shipped:
        return Target(generated_dir(), extension.known_arch(device), *extension.size(device))
    return Target(extension.built_dir(), extension.device_arch(device), *extension.size(device))


def device_of(kind: str, index: int | None) -> torch.device:
    """The device of that type and number."""
    return torch.device(kind) if index is None else torch.device(kind, index)


@constant
def masked_up_to(kind: str, index: int | None) -> int:
    """The widest head_dim of a kernel for boolean masks on a device; 0 where it has none."""
    try:
        return _masked_up_to(target(device_of(kind, index)))
    except UnsupportedError:
        return 0


@constant
def integers_up_to(kind: str, index: int | None, precision: str) -> int:
    """The widest head_dim of a kernel of a precision of 8-bit integers on a device; 0 where it has none."""
    try:
        return _integers_up_to(target(device_of(kind, index)), precision)
    except UnsupportedError:
        return 0


@cache
def _masked_up_to(at: Target) -> int:
    if at.arch == CPU_ARCH:  # the emulator hides keys from any variant
        return max(load_manifest(at.directory).head_dims[at.arch])
    found = (v for v in load_manifest(at.directory).variants if v.mask == LISTED and at.arch in v.targets)
    return max((v.head_dim for v in found), default=0)


@cache
def _integers_up_to(at: Target, precision: str) -> int:
    manifest = load_manifest(at.directory)
    if stands_in(manifest, at.arch, precision):
        return max(manifest.head_dims[at.arch]) if at.arch == CPU_ARCH else 0  # the emulator borrows tiles
    return max(manifest.head_dims_of(at.arch, INTEGER[precision]))


@constant
def head_dims(
    kind: str, index: int | None, shipped: bool, dtype: str = "e4m3"
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The head dims that a device has kernels of a type of operands for, ascending; or none, and the reasons."""
    try:
        at = target(device_of(kind, index), shipped=shipped)
    except NoKernelError as error:
        return (), error.reasons
    return load_manifest(at.directory).head_dims_of(at.arch, dtype), ()


@constant
def has_f16_scores(kind: str, index: int | None, shipped: bool, kernel: str) -> bool:
    """Whether a kernel that a device can run is one of scaling mode "block" with f16 scores; False where it has none of
    that id."""
    try:
        manifest = load_manifest(target(device_of(kind, index), shipped=shipped).directory)
    except NoKernelError:
        return False
    found = manifest.known(kernel)
    return found is not None and found.score == "f16" and "block" in found.scalings


@constant
def granularities(scaling: str) -> tuple[str, str, str]:
    """What shares a descale in Q, K and V; UnsupportedError lists the scaling modes. The same for every device."""
    modes = load_manifest(generated_dir()).scaling
    if scaling not in modes:
        raise UnsupportedError(f"scaling must be one of {', '.join(modes)}, got {scaling!r}")
    return modes[scaling]["q"], modes[scaling]["k"], modes[scaling]["v"]


@constant
def unserved(
    kind: str,
    index: int | None,
    shipped: bool,
    head_dim: int,
    dtype: str,
    out: str,
    scaling: str,
    mask: str,
    precision: str,
    capped: int,
) -> tuple[str, ...]:
    """The reasons why no kernel serves such a call, whatever its lengths; none if one does."""
    at = target(device_of(kind, index), shipped=shipped)
    return _unserved(at, kind == "cuda", head_dim, Asked(mask, bool(capped), dtype, out, scaling, precision))


@lru_cache(maxsize=1024)
def _unserved(at: Target, on_card: bool, head_dim: int, asked: Asked) -> tuple[str, ...]:
    manifest = load_manifest(at.directory)
    if stands_in(manifest, at.arch, asked.precision):
        if on_card:
            return (no_integer_kernel(at.arch, asked.precision),)
        asked = asked._replace(dtype="e4m3", precision="accurate")  # whose tiles the emulator takes
    # The emulator needs no kernel of its own for these.
    if (asked.mask in ("window", *NEW_MASKS) or asked.capped) and on_card:
        served = special_kernels(manifest, at.arch, head_dim, asked)
        return () if served else (refusal(at.arch, manifest.profile, no_special_kernel(asked)),)
    dtype, out, scaling, precision = asked.dtype, asked.out, asked.scaling, asked.precision
    decisions = load_table(at.directory).over_lengths(
        arch=at.arch,
        head_dim=head_dim,
        dtype=dtype,
        out=out,
        scaling=scaling,
        causal=asked.mask == "causal",
        precision=precision,
    )
    if any(decision.variant is not None for decision in decisions):
        return ()
    return tuple(dict.fromkeys(refusal(at.arch, manifest.profile, decision.reason) for decision in decisions))
