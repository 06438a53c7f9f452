"""Scaling modes: the granularity of the descales of Q, K and V. Kernels, package and docs read this list."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.spec import Scaling

KEY_BLOCK = 128  # keys of a `block` descale; packed V is padded to a multiple of it


@dataclass(frozen=True, kw_only=True)
class Granularity:
    q: str
    k: str
    v: str


# Q per token costs the kernel nothing, as a thread owns whole rows; V per token cannot be factored out of P V, V per
# channel can.
GRANULARITY = {
    Scaling.TENSOR: Granularity(q="tensor", k="tensor", v="tensor"),
    Scaling.HEAD: Granularity(q="head", k="head", v="head"),
    Scaling.BLOCK: Granularity(q="token", k="block", v="block"),
    Scaling.TOKEN: Granularity(q="token", k="token", v="channel"),
}
