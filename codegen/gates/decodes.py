"""The kernels of decode, as the gates look at them, and the one that cuts their work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from codegen.arch import TARGETS
from codegen.decode import Decode
from codegen.gates.subject import Kernel, write_source
from codegen.outputs import CUT, CUT_PATH
from codegen.render import environment, render_cut, render_decode
from scripts.cubins import INCLUDE

FAMILY = "decode"
_CUT_THREADS = re.compile(r"constexpr int kCutThreads = (\d+);")  # in the header that the host launches it by


def cut_threads() -> int:
    stated = _CUT_THREADS.search((INCLUDE / "fp8cutlass" / "decode" / "params.h").read_text())
    if stated is None:
        raise LookupError("decode/params.h states no kCutThreads")
    return int(stated[1])


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
                    family=FAMILY,
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
            write_source(folder / CUT_PATH, render_cut(env))
            kernels.append(
                Kernel(
                    id=CUT,
                    target=target,
                    family=CUT,
                    source=folder / CUT_PATH,
                    emulated=False,
                    head_dim=0,
                    threads=cut_threads(),
                    ctas_per_sm=1,
                    smem_bytes=0,
                    smem_limit=TARGETS[target].smem_per_block,
                    mma_in_loop=0,
                )
            )
    return sorted(kernels, key=lambda k: (k.target, k.id))
