"""Calls over several ranks, and what one process makes of the same tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fp8cutlass import attention, parallel
from fp8cutlass.parallel import agree, exchange
from fp8cutlass.parallel.attend import groups_of

GATHERED = ("gather", "ulysses")  # whose bits are those of one process
WIDE = "sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"  # blocks of 192 keys


@dataclass(frozen=True)
class Case:
    """``tokens`` a number, or the lengths of the ranks; ``keys`` the same of key, where they are others."""

    method: str
    tokens: int | tuple[int, ...]
    shards: str = "contiguous"
    causal: bool = False
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    keys: tuple[int, ...] | None = None
    batch: int = 1
    outer: int = 0  # ranks of the outer group, 0 for one group
    dtensor: bool = False
    lse: bool = True  # asked for; without it a ring merges by the LSE of the quantised P
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        length = self.tokens if isinstance(self.tokens, int) else "+".join(map(str, self.tokens))
        more = [x for x in (self.layout, str(self.dtype)[6:], *map(str, self.options)) if x not in ("bhsd", "bfloat16")]
        more += ["cross"] if self.keys else []
        more += ["mesh"] if self.outer else []
        more += ["dtensor"] if self.dtensor else []
        more += [] if self.lse else ["merge"]
        mask = "causal" if self.causal else "full"
        return "-".join([self.method, self.shards, mask, str(length), f"{self.heads}of{self.kv_heads}", *more])

    def operands(self) -> tuple[torch.Tensor, ...]:
        """(B, H, S, D) of the whole sequence; one key in eight large, so that tiles weigh differently."""
        rows = self.tokens if isinstance(self.tokens, int) else sum(self.tokens)
        keys = rows if self.keys is None else sum(self.keys)
        generator = torch.Generator().manual_seed(rows + self.heads)
        shapes = ((self.heads, rows), (self.kv_heads, keys), (self.kv_heads, keys))
        q, k, v = (torch.randn(self.batch, h, n, self.head_dim, generator=generator) for h, n in shapes)
        k[:, :, ::8] *= 2
        return tuple(x.to(self.dtype) for x in (q, k, v))

    def of_rows(self, ranks: int) -> parallel.Shards:
        """Who has which rows."""
        if not isinstance(self.tokens, int):
            return parallel.contiguous(self.tokens)
        inner = ranks // self.outer if self.outer else 1
        made = parallel.contiguous if self.shards == "contiguous" else parallel.zigzag
        return made(self.tokens, ranks // inner).split(inner)

    def of_keys(self, ranks: int) -> parallel.Shards:
        """Who has which keys."""
        return self.of_rows(ranks) if self.keys is None else parallel.contiguous(self.keys)


def run_cases(rank: int, cases: list[Case]) -> dict[str, Any]:
    """Of each case, by name: result and LSE of this rank, the kernel, bytes by two counts, dtypes that were sent."""
    return {case.name: _run(rank, case) for case in cases}


def _run(rank: int, case: Case) -> dict[str, Any]:
    ranks = dist.get_world_size()
    q, k, v = case.operands()
    rows, keys = case.of_rows(ranks), case.of_keys(ranks)
    mine = [shards.shard(x, rank) for shards, x in ((rows, q), (keys, k), (keys, v))]
    if case.layout == "bshd":
        mine = [x.transpose(1, 2).contiguous() for x in mine]
    group: Any = None
    if case.outer:
        group = dist.device_mesh.init_device_mesh("cpu", (case.outer, ranks // case.outer))
    given: dict[str, Any] = {
        "method": case.method, "shards": case.shards, "is_causal": case.causal, "enable_gqa": True,
        "layout": case.layout, "return_lse": case.lse, **case.options,
    }  # fmt: skip
    if case.keys is not None:
        given["key_shards"] = "contiguous"
    if case.dtensor:
        mine = [_distributed(x, whole) for x, whole in zip(mine, (q, k, v), strict=True)]
    agree._settled.clear()
    seen = Seen()
    with parallel.count_sent() as sent, seen:
        result = parallel.attention(*mine, group, **given)
    out, lse = result if case.lse else (result, None)
    if case.dtensor:
        assert out.placements == mine[0].placements and out.shape == q.shape and lse.shape == q.shape[:3]
        out, lse = out.to_local(), lse.to_local()
    [plan] = agree.known(groups_of(group if not case.dtensor else mine[0].device_mesh))
    out = out.transpose(1, 2) if case.layout == "bshd" else out
    return {
        "out": out,
        "lse": lse,
        "kernel": plan.kernel,
        "sent": sent.bytes,
        "seen": seen.bytes,
        "dtypes": seen.dtypes,
    }


def _distributed(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=whole.shape, stride=whole.stride())


class Seen:
    """Counts what is handed to torch's exchanges, by itself."""

    def __init__(self) -> None:
        self.bytes, self.dtypes = 0, set[str]()

    def _add(self, x: torch.Tensor, own: int = 0) -> None:
        self.bytes += x.numel() * x.element_size() - own
        self.dtypes.add(str(x.dtype))

    def __enter__(self) -> None:
        self._kept = exchange._all_gather, dist.all_to_all_single, dist.isend
        gather, to_all, send = self._kept

        def all_gather(out: Any, x: Any, **kwargs: Any) -> Any:
            for _ in range(dist.get_world_size(kwargs["group"]) - 1):
                self._add(x)
            return gather(out, x, **kwargs)

        def all_to_all(out: Any, x: Any, received: Any, sizes: Any, **kwargs: Any) -> Any:
            self._add(x, sizes[dist.get_rank(kwargs["group"])] * x.element_size())
            return to_all(out, x, received, sizes, **kwargs)

        kept = self._p2p = dist.P2POp
        exchange._all_gather, dist.all_to_all_single = all_gather, all_to_all
        dist.P2POp = lambda op, x, *args: (self._add(x) if op is send else None, kept(op, x, *args))[1]

    def __exit__(self, *_: object) -> None:
        exchange._all_gather, dist.all_to_all_single, _ = self._kept
        dist.P2POp = self._p2p


def expected(case: Case, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and LSE of one process, with the kernel that the ranks agreed on."""
    options = {name: value for name, value in case.options.items() if name not in ("head_groups", "kernel", "agree")}
    return attention(
        *case.operands(), is_causal=case.causal, enable_gqa=True, return_lse=True, kernel=kernel, **options
    )
