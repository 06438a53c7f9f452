"""One of several processes over which diffusers spreads a sequence; test_diffusers.py starts them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import tiny_diffusers as tiny
import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from fp8cutlass import UnsupportedError, stats
from fp8cutlass.integrations import diffusers as fp8

WORLD = 2
HEADS = 4  # as many as Ulysses spreads over
MODELS = {"wan": partial(tiny.wan, HEADS), "flux": partial(tiny.flux, HEADS)}
DEGREES: dict[int, dict[str, dict[str, int]]] = {
    2: {"ring": {"ring_degree": 2}, "ulysses": {"ulysses_degree": 2}},
    4: {
        "ring": {"ring_degree": 4},
        "ulysses": {"ulysses_degree": 4},
        "both": {"ring_degree": 2, "ulysses_degree": 2},
    },
}
WAYS = {"ring": {"ring_degree": WORLD}, "ulysses": {"ulysses_degree": WORLD}}


def operands() -> tuple[torch.Tensor, ...]:
    """The whole sequence, (B, S, H, D)."""
    torch.manual_seed(0)
    return tuple(torch.randn(1, 48, 4, 32, dtype=torch.bfloat16) for _ in range(3))


def worker(rank: int, folder: str) -> None:
    """Writes to ``folder``, for each way, this rank's part of the result, what was counted, and what was refused."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    member = fp8.register()
    found: dict[str, Any] = {}
    for way, degree in WAYS.items():
        config = ContextParallelConfig(**degree)
        parallel = ParallelConfig(context_parallel_config=config)
        mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        parallel.setup(rank, WORLD, torch.device("cpu"), mesh=mesh)
        mine = [x.chunk(WORLD, 1)[rank].contiguous() for x in operands()]
        given: dict[str, Any] = {"backend": member, "parallel_config": parallel}
        with torch.no_grad(), stats.collect() as seen:
            out = dispatch.dispatch_attention_fn(*mine, scale=0.1, **given)
        served = (seen.result().served.calls, seen.result().fallback.calls)
        with stats.collect() as seen, torch.no_grad():
            try:
                dispatch.dispatch_attention_fn(*(x.float() for x in mine), **given)
                wide = "ran"
            except ValueError as error:
                wide = str(error)
        try:
            dispatch.dispatch_attention_fn(*mine, attention_kwargs={"unknown": 1}, **given)
            unknown = "ran"
        except UnsupportedError as error:
            unknown = str(error)
        reasons = sorted({key.what for key in seen.result().counts})
        found[way] = {"out": out, "served": served, "wide": wide, "reasons": reasons, "unknown": unknown}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def models(rank: int, ranks: int, folder: str) -> None:
    """Writes to ``folder`` what small models give over so many processes, and the calls that were counted."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.accelerator.device_count = lambda: 1  # it names a device by it, also on the CPU
    logging.Logger.warning_once = logging.Logger.warning  # diffusers 0.42 calls it of a logger that has none
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        for way, degrees in DEGREES[ranks].items():
            model, given = tiny.built(make)
            fp8.enable(model)
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
            with stats.collect() as seen:
                out = tiny.run(model, given).clone()  # waits for the last exchange
            counted = seen.result()
            found[f"{name} {way}"] = out, counted.served.calls, counted.fallback.calls
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
