"""Calls on DTensors: each rank attends to its own batches, heads or rows of query, and results are sharded as query is.

torch's ``register_sharding`` would say the same of an operator, but not of one that returns a list. Sequences whose
keys are sharded are ``fp8cutlass.parallel``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .call import Call, Outputs, Tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

PLAIN = (torch.Tensor, torch.nn.Parameter)
BATCH, HEADS, ROWS = range(3)  # dimensions of query, and of all that has so many
BY_ROW = ("q", "q_descale", "seen", "bias")  # what may have a dimension of rows
ONE_DIMENSION = ("sinks",)  # (H,): of heads alone


def given(t: Tensors) -> bool:
    """Whether the call has a DTensor. Their module takes seconds to import, and is only where a program has some."""
    if all(x is None or type(x) in PLAIN for x in t) or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(x, DTensor) for x in t)


def attend(call: Call, t: Tensors, run: Callable[[Call, Tensors], Outputs]) -> Outputs:
    """``run`` on what this rank has. The kernel is chosen for that, so another number of ranks can be another kernel.

    Raises:
        UnsupportedError: the same on each rank, as it is the shapes and placements of the whole that do not fit.
    """
    placed = _placements(call, t)
    q: DTensor = t.q  # type: ignore[assignment]
    outputs = run(call, Tensors(*(_local(x, where) for x, where in zip(t, placed, strict=True))))
    mesh, shape = q.device_mesh, q.shape
    lse = None if outputs.lse is None else whole(outputs.lse, mesh, q.placements, shape[:3])
    amax = None if outputs.amax is None else whole(outputs.amax, mesh, _largest(q), torch.Size((1,)))
    return Outputs(whole(outputs.out, mesh, q.placements, shape), lse, amax)


def _placements(call: Call, t: Tensors) -> list[tuple[Placement, ...] | None]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    q, wrong = t.q, []
    named = {name: x for name, x in zip(Tensors._fields, t, strict=True) if x is not None}
    if not isinstance(q, DTensor):
        raise UnsupportedError(f"query must be a DTensor as another operand is, got {type(q).__name__}")
    for name, x in named.items():
        if isinstance(x, DTensor):
            if x.device_mesh != q.device_mesh:
                wrong.append(f"{name} is on another mesh than query")
        elif x.numel() != 1:
            wrong.append(f"{name} must be a DTensor as query is, got {type(x).__name__} of shape {tuple(x.shape)}")
    for i, placement in enumerate(q.placements):
        if placement not in (Replicate(), *map(Shard, (BATCH, HEADS, ROWS))):
            wrong.append(
                f"query must be sharded by batch, heads or rows, or replicated, got {placement} in dimension {i}"
            )
    ways = [q.device_mesh.size(i) for i, placement in enumerate(q.placements) if placement == Shard(HEADS)]
    count = torch.Size(ways).numel()
    for name, heads in (("query", q.shape[1]), ("key", t.k.shape[1])):
        if heads % count:
            wrong.append(f"{name} has {heads} heads, which the {count} ranks that share them must divide")
    if Shard(ROWS) in q.placements and (call.left is not None or call.right is not None):
        wrong.append("rows of query are sharded, and what a row sees depends on its number: use parallel.attention")
    if wrong:
        raise UnsupportedError(*wrong)
    return [
        None
        if not isinstance(x, DTensor)
        else tuple(Shard(at) if (at := _dimension(name, x, p, q)) is not None else Replicate() for p in q.placements)
        for name, x in zip(Tensors._fields, t, strict=True)
    ]


def _dimension(name: str, x: torch.Tensor, placement: Any, q: torch.Tensor) -> int | None:
    """Along which dimension a tensor is sharded where query is sharded so; None where each rank needs all of it."""
    at = getattr(placement, "dim", None)
    if name in ONE_DIMENSION:
        return 0 if at == HEADS else None
    if at is None or at >= x.dim() or x.shape[at] == 1 < q.shape[at]:  # a dimension that broadcasts
        return None
    return at if at != ROWS or name in BY_ROW else None


def _local(x: Any, placements: tuple[Placement, ...] | None) -> Any:
    return x if placements is None else x.redistribute(placements=placements).to_local().contiguous()


def _largest(q: DTensor) -> tuple[Placement, ...]:
    """Of amax: that of all ranks is the largest of theirs."""
    from torch.distributed.tensor import Partial, Replicate

    return tuple(p if p == Replicate() else Partial("max") for p in q.placements)


def whole(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """What a rank has as a DTensor of ``shape``, contiguous; nothing is exchanged."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
