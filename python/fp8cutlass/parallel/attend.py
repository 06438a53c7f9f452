"""``fp8cutlass.parallel.attention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..autocast import under_autocast
from ..call.options import flag, one_of
from ..call.reasons import wrong_tensors
from ..errors import UnsupportedError
from ..memory import concatenated
from . import sharding
from .agree import Groups, settled
from .gather import gather
from .heads import from_heads, to_heads
from .plan import Asked, Plan, plan_of
from .ring import ring
from .shards import Shards
from .ulysses import ulysses

WAYS = {"gather": gather, "ulysses": ulysses, "ring": ring}
Ranks = dist.ProcessGroup | DeviceMesh | Sequence[dist.ProcessGroup] | None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Ranks = None,
    *,
    method: str = "gather",
    shards: str | Shards = "contiguous",
    key_shards: str | Shards | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    scaling: str = "block",
    precision: str = "fast",
    smooth_k: bool = False,
    hadamard: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    head_groups: int | None = None,
    agree: str = "once",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``fp8cutlass.attention`` of a sequence whose tokens are spread over the ranks of a process group. Every rank
    calls it with its own tokens and gets the result of its own rows. Keys and values travel in e4m3, as they are
    packed.

    Args:
        query, key, value: (B, H, S, D) of this rank's tokens, or (B, S, H, D) with ``layout="bshd"``: bf16 or fp16, of
            as many heads as the whole. Ranks may have different numbers of tokens, or none. DTensors that are sharded
            along their tokens give a DTensor; their mesh is the group.
        group: a process group, or a DeviceMesh of one dimension; None is the default group. Two of them, or a mesh of
            two dimensions, (outer, inner): the inner one exchanges heads as Ulysses does, the outer one runs ``method``
            over what the inner groups have. Rank ``outer * size of inner + inner`` has the tokens of that number.
        method: ``gather``: all keys on each rank, some heads at a time. ``ulysses``: all tokens of some heads on each
            rank, whose number divides the heads of query and key. ``ring``: one shard of keys after the other, merged
            in float32. The first two give the bits of one process that runs the same kernel.
        shards: which tokens each rank has: ``contiguous`` (of any lengths), ``zigzag`` (what ``zigzag`` gives, for
            causal masks), or ``Shards``.
        key_shards: the same of key and value, where they are not those of query; not with ``is_causal``.
        is_causal: a token sees those before it in the whole sequence and itself.
        scale, enable_gqa, layout, precision, hadamard, out_dtype: as in ``fp8cutlass.attention``.
        scaling, smooth_k: the same; ``gather`` and ``ulysses`` take ``scaling="block"`` and no ``smooth_k``. In
            ``ring`` each shard has a mean and descales of its own.
        return_lse: also return the natural-log sum of exponentials, (B, H, S of this rank) float32.
        kernel: the id of a variant that keys are packed for, and with ``gather`` and ``ulysses`` attended to by.
        head_groups: of ``gather``: into how many even parts the heads of key are cut, of which two are here at a time.
            None: as many as the bytes call for, the first one smaller.
        agree: whether ranks compare their calls ``once`` for each signature and group, or ``always``. With ``once`` a
            rank that alone changes its shapes later is not found out before it breaks an exchange.

    Returns:
        The result of this rank's rows in the shape and memory order of query, then the LSE if asked for.

    Raises:
        UnsupportedError: the same on each rank, where the calls of ranks do not fit one another or one of them is
            refused. It is found out when a call of these shapes and options first runs on the group, by two exchanges
            of small objects.
        RuntimeError: torch's, where a rank does not answer within the timeout of its group.
    """
    opened = sharding.opened(query, key, value, layout, group)
    if opened is not None:
        query, key, value, group = opened.local
    query, key, value = under_autocast((query, key, value))
    groups = groups_of(group)
    asked = Asked(
        method,
        shards,
        key_shards,
        is_causal,
        scale,
        return_lse,
        kernel,
        out_dtype,
        head_groups,
        scaling,
        precision,
        smooth_k,
        hadamard,
    )
    wrong = _wrong(query, key, value, asked, enable_gqa, layout, agree)
    q, k, v = (x.transpose(1, 2) if layout == "bshd" and x.dim() == 4 else x for x in (query, key, value))
    signature = (asked, tuple(wrong), *_metadata(q, k, v))
    plan = settled(groups, signature, lambda: plan_of(groups, asked, q, k, v, wrong), anew=agree == "always")
    found = _over_both(plan, q, k, v) if groups.outer is not None else WAYS[method](plan, groups.inner, q, k, v)
    out, *lse = found
    out = out.transpose(1, 2) if layout == "bshd" else out
    if opened is not None:
        out, lse = opened.closed(out), [opened.closed_lse(x) for x in lse]
    return (out, *lse) if lse else out


def groups_of(group: Ranks) -> Groups:
    """Process groups of what a caller gives."""
    if group is None:
        if dist.group.WORLD is None:
            raise UnsupportedError("group is None and there is no default process group: init_process_group makes one")
        return Groups(dist.group.WORLD)
    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            raise UnsupportedError(f"a mesh must have one or two dimensions, (outer, inner), got {group.ndim}")
        found = [group.get_group(i) for i in range(group.ndim)]
    else:
        found = [group] if isinstance(group, dist.ProcessGroup) else list(group)
    if len(found) not in (1, 2) or not all(isinstance(x, dist.ProcessGroup) for x in found):
        raise UnsupportedError(f"group must be a process group, a DeviceMesh or (outer, inner), got {group!r}")
    return Groups(found[-1], found[0] if len(found) == 2 else None)


def _wrong(q: Any, k: Any, v: Any, asked: Asked, enable_gqa: Any, layout: Any, agree: Any) -> list[str]:
    named = [("query", q), ("key", k), ("value", v)]
    wrong = wrong_tensors(named, ("batch", "heads", "tokens", "head_dim"))
    for reason in (
        one_of("layout", layout, ("bhsd", "bshd")),
        one_of("agree", agree, ("once", "always")),
        flag("is_causal", asked.causal),
        flag("enable_gqa", enable_gqa),
        flag("return_lse", asked.return_lse),
    ):
        if reason is not None:
            wrong.append(reason)
    parts = asked.head_groups
    if parts is not None and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 1):
        wrong.append(f"head_groups must be None or an integer from 1 up, got {parts!r}")
    at = 2 if layout == "bshd" else 1
    if not wrong and not enable_gqa and q.shape[at] != k.shape[at]:
        wrong.append(f"query has {q.shape[at]} heads and key has {k.shape[at]}: pass enable_gqa=True to share them")
    return wrong


def _metadata(*tensors: torch.Tensor) -> tuple[object, ...]:
    """What checks depend on. A gradient that is wanted later is another signature, which is refused on all ranks."""
    grad = torch.is_grad_enabled()
    return tuple(
        (x.shape, x.dtype, x.device, grad and x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
        for x in tensors
    )


def _over_both(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Ulysses in the inner group, in the dtype of query, around what the outer one runs."""
    inner, outer = plan.groups.inner, plan.groups.outer
    if outer is None:
        raise ValueError("there is one group alone")
    first = outer.rank() * inner.size()
    rows, keys = (every.lengths[first : first + inner.size()] for every in (plan.every_row, plan.every_key))
    arrived = to_heads([q, k, v], [rows, keys, keys], inner).wait()
    found = WAYS[plan.asked.method](plan, outer, *(concatenated(parts, 2) for parts in arrived))
    out, *lse = from_heads([_by_rank(x if x.dim() == 4 else x.unsqueeze(-1), rows) for x in found], inner)
    return [out, *(x.squeeze(-1) for x in lse)]


def _by_rank(x: torch.Tensor, rows: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[mine] for mine in x.split(list(rows), 2)]
