"""The files of a generation: kernels, registry, dispatch table, manifest, ledger. Pure: a dict of path to text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from jinja2 import Environment

from codegen.arch import TARGETS
from codegen.axes import Scaling
from codegen.families import derive
from codegen.families.view import symbol
from codegen.ledger import render as render_ledger
from codegen.legal import served
from codegen.matrix import head_dims
from codegen.pack import Pack, pack_targets, packs_of
from codegen.profiles import pack_profile, profile_of
from codegen.render import environment, render_kernel, render_pack
from codegen.scaling import KEY_BLOCK, key_block
from codegen.select import Selection
from codegen.table import build, targets_of
from codegen.table_text import table_text, times_text
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate: which targets, which emitted variants, and how the set is called in the manifest."""

    archs: tuple[str, ...]
    profile: str
    variants: tuple[Variant, ...]


def kernel_path(v: Variant) -> str:
    return f"{v.family}/{v.id}.cu"


def files(request: Request, selection: Selection) -> dict[str, str]:
    env = environment()
    packs = packs_of(request.variants)
    kernels = {kernel_path(v): render_kernel(v, env) for v in request.variants}
    kernels |= {p.path: render_pack(p, env) for p in packs}
    # The shipped table answers for every target, so that a laptop can ask about any card.
    table = build(request.variants, tuple(TARGETS))
    out = dict(kernels)
    out["manifest.json"] = _manifest(request, packs, kernels)
    out["table.txt"] = table_text(table)
    out["times.txt"] = times_text(table)
    out["registry.cpp"] = _registry(request.variants, packs, env)
    out["ledger.txt"] = render_ledger(selection)
    return out


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(request: Request, packs: tuple[Pack, ...], kernels: dict[str, str]) -> str:
    entries = []
    for v in request.variants:
        d = derive(v)
        path = kernel_path(v)
        entries.append(
            {
                "id": v.id,
                "family": v.family,
                "kind": v.serves,
                "head_dim": v.head_dim,
                "tile_m": v.tile_m,
                "tile_n": v.tile_n,
                "warps": v.warps,
                "stages": v.stages,
                "scaling": str(v.scaling),
                "scalings": [str(s) for s in served(v)],
                "key_block": key_block(v),
                "mask": str(v.mask),
                "causal": v.causal,
                "dtype": str(v.dtype),
                "out": str(v.out),
                "softmax": str(v.softmax),
                "score": v.score,
                "schedule": str(v.schedule),
                "cluster": str(v.cluster),
                "walk": str(v.walk),
                "profile": profile_of(v),
                "threads": d.threads,
                "ctas_per_sm": d.ctas_per_sm,
                "smem_bytes": d.smem_bytes,
                "quantises_q": d.quantises_q,
                "unrolled": [[u.least_keys, u.most_keys] for u in d.unrolled],
                "targets": list(targets_of(v, request.archs)),
                "file": path,
                "sha256": _digest(kernels[path]),
            }
        )
    head = {
        "format": 1,
        "profile": request.profile,
        "archs": list(request.archs),
        "gencode": {a: TARGETS[a].gencode for a in request.archs},
        "capability": {a: list(TARGETS[a].capability) for a in request.archs},
        "key_block": KEY_BLOCK,
        "scaling": {str(s): asdict(s.grain) for s in Scaling},
        "head_dims": {a: list(head_dims(a)) for a in TARGETS},
    }
    pack_entries = [
        {
            "id": p.id,
            "head_dim": p.head_dim,
            "key_block": p.key_block,
            "source": str(p.source),
            "profile": pack_profile(p, request.variants),
            "targets": list(pack_targets(p, request.variants, request.archs)),
            "file": p.path,
            "sha256": _digest(kernels[p.path]),
        }
        for p in packs
    ]
    lists = {"packs": pack_entries, "variants": entries}
    # One kernel a line, so that a diff shows which ones changed.
    body = [f' "{name}": [\n' + ",\n".join("  " + json.dumps(e) for e in lists[name]) + "\n ]" for name in lists]
    return json.dumps(head, indent=1)[:-2] + ",\n" + ",\n".join(body) + "\n}\n"


@dataclass(frozen=True, kw_only=True)
class RegistryEntry:
    id: str
    symbol: str
    head_dim: int
    tile_m: int
    tile_n: int
    out: str
    q: str
    k: str
    v: str
    diagnostic: bool
    key_block: int
    coarse: bool
    draws: bool
    quantises_q: bool
    ragged: bool


def _registry(variants: tuple[Variant, ...], packs: tuple[Pack, ...], env: Environment) -> str:
    entries = [
        RegistryEntry(
            id=v.id,
            symbol=symbol(v.id),
            head_dim=v.head_dim,
            tile_m=v.tile_m,
            tile_n=v.tile_n,
            out=str(v.out),
            **asdict(v.scaling.grain),
            diagnostic=v.kind.diagnostic,
            key_block=key_block(v),
            coarse=len(served(v)) > 1,
            draws=v.schedule.draws and v.cluster.ctas == 1,
            quantises_q=derive(v).quantises_q,
            ragged=v.walk.tables,
        )
        for v in variants
    ]
    return env.get_template("registry.cpp.j2").render(entries=entries, packs=packs)
