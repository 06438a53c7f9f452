"""DTensors in and out. Their module takes seconds to import, and is only where a program has some."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..call.distributed import whole
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(frozen=True)
class Opened:
    """The local tensors of DTensors, their group, and the way back."""

    local: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # of query
    tokens: int  # its dimension

    def closed(self, out: torch.Tensor) -> torch.Tensor:
        """The result as a DTensor that is sharded as query is."""
        return whole(out, self.mesh, self.placements, self.shape)

    def closed_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """(B, H, S), sharded along S."""
        from torch.distributed.tensor import Shard

        batch, heads = (self.shape[0], self.shape[2 if self.tokens == 1 else 1])
        shape = torch.Size((batch, heads, self.shape[self.tokens]))
        return whole(lse, self.mesh, tuple(Shard(2) for _ in self.placements), shape)


def opened(query: Any, key: Any, value: Any, layout: Any, group: Any) -> Opened | None:
    """None where no operand is a DTensor.

    Raises:
        UnsupportedError: some are, or their placements are no shards of tokens on one mesh, which is the group.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor, Shard

    operands = {"query": query, "key": key, "value": value}
    if not any(isinstance(x, DTensor) for x in operands.values()):
        return None
    tokens = 1 if layout == "bshd" else 2
    wrong = [
        f"{name} must be a DTensor as the others are, got {type(x).__name__}"
        for name, x in operands.items()
        if not isinstance(x, DTensor)
    ]
    if not wrong:
        mesh = query.device_mesh
        for name, x in operands.items():
            if x.device_mesh != mesh:
                wrong.append(f"{name} is on another mesh than query")
            if x.dim() != 4 or any(p != Shard(tokens) for p in x.placements):
                wrong.append(
                    f"{name} must be sharded along dimension {tokens} of 4, got {x.placements} of {tuple(x.shape)}"
                )
        if group is not None and group != mesh:
            wrong.append("group must be None, or the mesh of DTensors")
    if wrong:
        raise UnsupportedError(*wrong)
    local = (query.to_local(), key.to_local(), value.to_local(), mesh)
    return Opened(local, mesh, tuple(query.placements), query.shape, tokens)
