"""The kernels that keep K and V in shared memory, as the gates look at them: those of each source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from codegen.arch import TARGETS
from codegen.gates.subject import Kernel, mangled, write_source
from codegen.render import environment, render_resident
from codegen.resident import FORMS, Resident

FAMILY = "resident"


def render(chosen: Mapping[str, tuple[Resident, ...]], folder: Path) -> list[Kernel]:
    """A Kernel for each target, source chosen for it and form. Writes the sources that `folder` does not have so."""
    env = environment()
    for r in {r for residents in chosen.values() for r in residents}:
        write_source(folder / r.path, render_resident(r, env))
    kernels = [
        Kernel(
            id=f"{r.id}.{form.name}",
            target=target,
            family=FAMILY,
            source=folder / r.path,
            emulated=False,
            head_dim=r.head_dim,
            threads=r.threads,
            ctas_per_sm=r.ctas_per_sm,
            smem_bytes=r.smem_bytes,
            smem_limit=TARGETS[target].smem_per_block,
            mma_in_loop=r.products,
            entry=mangled(f"{r.id}_{form.name}") + "E",
            storage="sizeof(Kernel::Storage)",
        )
        for target, residents in chosen.items()
        for r in residents
        for form in FORMS
    ]
    return sorted(kernels, key=lambda k: (k.target, k.id))
