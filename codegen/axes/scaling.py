"""Scaling modes: how many numbers of Q, K and V share a descale."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.axes.axis import Axis


@dataclass(frozen=True, kw_only=True)
class Granularity:
    q: str
    k: str
    v: str


class Scaling(Axis):
    """grain: what shares a descale. coarse: kernels of `block` compute it, too, as they read descales by steps.

    Q per token costs a kernel nothing, as a thread owns whole rows. V per token cannot be factored out of P V; V per
    channel can.
    """

    grain: Granularity
    coarse: bool

    TENSOR = "tensor", {"grain": Granularity(q="tensor", k="tensor", v="tensor"), "coarse": True}
    HEAD = "head", {"grain": Granularity(q="head", k="head", v="head"), "coarse": True}
    BLOCK = "block", {"grain": Granularity(q="token", k="block", v="block"), "coarse": False}
    TOKEN = "token", {"grain": Granularity(q="token", k="token", v="channel"), "coarse": False}

    @property
    def per_key(self) -> bool:
        """Whether each key has a descale of its own, which scores are multiplied with one by one."""
        return self.grain.k == "token"
