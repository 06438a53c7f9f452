"""The kernels of decode, as the gates look at them, the one that cuts their work, the one that appends, and the one
that leaves long chunks to the kernels of ragged batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from codegen.arch import TARGETS
from codegen.decode import Decode
from codegen.gates.subject import Kernel, ahead, write_source
from codegen.outputs import APPEND, APPEND_PATH, CUT, CUT_PATH, ROUTE, ROUTE_PATH
from codegen.render import environment, render_decode, render_single

FAMILY = "decode"
WIDE = "wide decode"  # by warpgroups
ROUTED = "sm90a"  # the target that has kernels of ragged batches
APPEND_CTAS = 4  # of an SM, by the launch bounds of the source


def render(chosen: Mapping[str, tuple[Decode, ...]], folder: Path) -> list[Kernel]:
    """A Kernel for each target and decode kernel chosen for it. Writes the sources that `folder` does not have so."""
    env = environment()
    kernels = []
    for target, decodes in chosen.items():
        for d in decodes:
            write_source(folder / d.path, render_decode(d, env))
            kernels.append(
                Kernel(
                    id=d.id,
                    target=target,
                    family=WIDE if d.wide else FAMILY,
                    source=folder / d.path,
                    emulated=False,
                    head_dim=d.head_dim,
                    threads=d.threads,
                    ctas_per_sm=d.ctas_per_sm,
                    smem_bytes=d.smem_bytes,
                    smem_limit=TARGETS[target].smem_per_block,
                    mma_in_loop=d.products,
                )
            )
        if decodes:
            write_source(folder / CUT_PATH, render_single(CUT_PATH, env))
            kernels.append(ahead(CUT, target, folder / CUT_PATH, "decode/params.h", "kCutThreads"))
            write_source(folder / APPEND_PATH, render_single(APPEND_PATH, env))
            appends = ahead(APPEND, target, folder / APPEND_PATH, "append/params.h", "kAppendThreads")
            kernels.append(replace(appends, ctas_per_sm=APPEND_CTAS))
        if decodes and target == ROUTED:
            write_source(folder / ROUTE_PATH, render_single(ROUTE_PATH, env))
            kernels.append(ahead(ROUTE, target, folder / ROUTE_PATH, "prefill/params.h", "kRouteThreads"))
    return sorted(kernels, key=lambda k: (k.target, k.id))
