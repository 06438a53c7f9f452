"""torch's ``context_parallel`` with our backend, over 2 processes.

Regressions these catch: rows in torch's order that are taken for another one, a call that torch's own ring runs, a
result that is no DTensor for torch's wrapper to unwrap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8cutlass import attention, stats

RANKS, TOKENS = 2, 256
CALLS: dict[str, dict[str, Any]] = {"causal": {"is_causal": True}, "full": {"scale": 0.2}, "gqa": {"enable_gqa": True}}


def operands(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    heads = (4, 2, 2) if name == "gqa" else (4, 4, 4)
    return [torch.randn(1, h, TOKENS, 32, generator=generator).bfloat16() for h in heads]


def work(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    from fp8cutlass.integrations.context_parallel import use_fp8_context_parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for method in ("gather", "ring", "ulysses"):
        for name, options in CALLS.items():
            buffers = operands(name)
            sharded = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2])
            with sharded, use_fp8_context_parallel(method=method), stats.collect() as seen:
                mine = F.scaled_dot_product_attention(*buffers, **options)
                [out] = context_parallel_unshard(mesh, [mine], [2])
            served = seen.result()
            found[f"{method} {name}"] = out, mine.shape[2], served.served.calls, served.fallback.calls
        with use_fp8_context_parallel(method=method):  # tensors that are no DTensors
            found[f"{method} alone"] = F.scaled_dot_product_attention(*operands("causal"), is_causal=True)
    return found


def test_the_result_of_one_process(tmp_path: Path) -> None:
    for found in ranks.run(RANKS, work, tmp_path):
        assert isinstance(found, dict), found
        for name, options in CALLS.items():
            want = attention(*operands(name), **options)
            for method in ("gather", "ring", "ulysses"):
                out, mine, served, other = found[f"{method} {name}"]
                assert (mine, served, other) == (TOKENS // RANKS, 1, 0)
                error = float((out.double() - want.double()).norm() / want.double().norm())
                assert error < (0.005 if method == "ring" else 1e-6), (method, name)
                assert torch.equal(found[f"{method} alone"], attention(*operands("causal"), is_causal=True))
