"""``attention`` on DTensors over two processes: the bits of plain tensors, sharded as query is, with nothing exchanged.

Regressions these catch: heads of key that are not those of query, a mask or a descale of other heads, a shape that is
the local one, a causal mask whose rows are numbered anew on each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from fp8cutlass import attention, quantize

pytestmark = pytest.mark.xdist_group("ranks")

BATCH, HEADS, ROWS = range(3)
CASES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "batch": (BATCH, {"is_causal": True, "return_lse": True}),
    "heads": (HEADS, {"is_causal": True, "return_lse": True}),
    "rows": (ROWS, {"return_lse": True}),
    "replicated": (None, {"return_lse": True}),
    "heads, amax": (HEADS, {"return_amax": True}),
    "heads, mask": (HEADS, {"attn_mask": HEADS}),
    "rows, mask": (ROWS, {"attn_mask": ROWS}),
    "batch, mask of keys": (BATCH, {"attn_mask": None}),
    "heads, sinks": (HEADS, {"sinks": True}),
    "heads, fp8": (HEADS, {"fp8": True}),
}
REFUSED = {
    "rows, causal": "use parallel.attention",
    "three heads of key": "key has 3 heads, which the 2 ranks that share them must divide",
    "head_dim": "query must be sharded by batch, heads or rows, or replicated",
    "plain key": "k must be a DTensor as query is, got Tensor",
    "plain query": "query must be a DTensor as another operand is, got Tensor",
}


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, h, n, 32, generator=generator).bfloat16() for h, n in ((4, 75), (2, 90), (2, 90))]


def arguments(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors, and what is none."""
    options: dict[str, Any] = {"enable_gqa": True, **CASES[name][1]}
    tensors = dict(zip(("query", "key", "value"), operands(), strict=True))
    if "attn_mask" in options:
        shape = {HEADS: (1, 4, 75, 90), ROWS: (3, 1, 75, 90), None: (3, 1, 1, 90)}[options.pop("attn_mask")]
        tensors["attn_mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.6
    if options.pop("sinks", False):
        tensors["sinks"] = torch.tensor([-3.0, 0.5, 4.0, 9.0])
    if options.pop("fp8", False):
        for which in ("query", "key", "value"):
            tensors[which], tensors[f"{which[0]}_descale"] = quantize(tensors[which], granularity="head")
        options["scaling"] = "head"
    return tensors, options


def found(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def work(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def spread(x: torch.Tensor, at: int | None) -> Any:
        if at is not None and (x.dim() <= at or x.shape[at] == 1):
            at = 0 if x.dim() == 1 and at == HEADS else None
        local = x if at is None else x.tensor_split(2, at)[rank].contiguous()  # gloo moves neither FP8 nor booleans
        placement = Replicate() if at is None else Shard(at)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())

    made: dict[str, Any] = {}
    for name, (at, _) in CASES.items():
        tensors, options = arguments(name)
        given = {n: spread(x, None if at == ROWS and n in ("key", "value") else at) for n, x in tensors.items()}
        with CommDebugMode() as exchanges:
            results = found(attention(**given, **options))
        shares = [x.to_local().shape for x in results]
        made[name] = (
            [x.full_tensor() for x in results],
            shares,
            str(results[0].placements),
            exchanges.get_total_counts(),
        )
    q, k, v = operands()
    whole = spread(q, ROWS), spread(k, None), spread(v, None)
    made["rows, causal"] = ranks.error_of(lambda: attention(*whole, is_causal=True, enable_gqa=True))
    three = [spread(x.expand(3, n, -1, -1), HEADS) for n, x in ((6, q[:, :1]), (3, k[:, :1]), (3, v[:, :1]))]
    made["three heads of key"] = ranks.error_of(lambda: attention(*three, enable_gqa=True))
    made["head_dim"] = ranks.error_of(lambda: attention(*(spread(x, 3) for x in (q, k, v)), enable_gqa=True))
    made["plain key"] = ranks.error_of(lambda: attention(spread(q, None), k, v, enable_gqa=True))
    whole = spread(k, None), spread(v, None)
    made["plain query"] = ranks.error_of(lambda: attention(q, *whole, enable_gqa=True))
    return made


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(2, work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_plain_tensors(outcomes: Any, name: str) -> None:
    assert all(isinstance(x, dict) for x in outcomes), outcomes
    at = CASES[name][0]
    tensors, options = arguments(name)
    wanted = found(attention(**tensors, **options))
    for rank, of_rank in enumerate(outcomes):
        got, shares, placements, sent = of_rank[name]
        assert sent == 0
        assert len(got) == len(wanted)
        for x, y in zip(got, wanted, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        whole = list(wanted[0].shape)
        if at is not None:
            whole[at] = whole[at] // 2 + (1 - rank) * (whole[at] % 2)  # the first rank has one more
        assert list(shares[0]) == whole
        assert placements == ("(Replicate(),)" if at is None else f"(Shard(dim={at}),)")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_all_ranks(outcomes: Any, name: str) -> None:
    for of_rank in outcomes:
        kind, text = of_rank[name]
        assert kind == "UnsupportedError" and REFUSED[name] in text, (kind, text)
