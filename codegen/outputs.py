"""The files of a generation: kernels, registry, dispatch table, manifest, ledger. Pure: a dict of path to text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property

from codegen import registry
from codegen.arch import TARGETS
from codegen.axes import Operand, Scaling
from codegen.decode import Decode
from codegen.decode import profile_of as decode_profile
from codegen.decode_ledger import render as render_decode_ledger
from codegen.evidence import digest
from codegen.families import derive
from codegen.ledger import render as render_ledger
from codegen.legal import served
from codegen.matrix import head_dims
from codegen.pack import Pack, pack_targets, packs_of
from codegen.profiles import pack_profile, profile_of
from codegen.render import (
    environment,
    render_decode,
    render_kernel,
    render_pack,
    render_resident,
    render_single,
)
from codegen.resident import TARGET as RESIDENT_TARGET
from codegen.resident import Resident
from codegen.scaling import KEY_BLOCK, key_block
from codegen.select import Selection
from codegen.table import chosen_by, targets_of, whole
from codegen.table_text import table_text, times_text
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate: which targets, which emitted variants, kernels of decode and those that keep K and V, and how
    the set is called in the manifest."""

    archs: tuple[str, ...]
    profile: str
    variants: tuple[Variant, ...]
    decodes: tuple[Decode, ...] = ()
    residents: tuple[Resident, ...] = ()
    emulated: bool = False  # also for targets where they are only emulated, and which choose others

    @cached_property
    def _chosen(self) -> dict[str, frozenset[str]] | None:
        return None if self.emulated else chosen_by(self.variants, self.archs)

    def targets_of(self, v: Variant) -> tuple[str, ...]:
        """What one of the variants is compiled for."""
        return targets_of(v, self.archs, self._chosen)


PLAN = "plan"  # the kernel that lists the row tiles of ragged batches
PLAN_PATH = f"{PLAN}.cu"
PACK_MASK = "pack_mask"  # the kernel that packs boolean masks into lists of tiles
PACK_MASK_PATH = f"{PACK_MASK}.cu"
CUT = "cut"  # the kernel that cuts the work of decode
CUT_PATH = f"{CUT}.cu"
APPEND = "append"  # the kernel that writes tokens to pages
APPEND_PATH = f"{APPEND}.cu"
ROUTE = "route"  # the kernel that chooses what kernels of ragged batches do of a call over pages
ROUTE_PATH = f"{ROUTE}.cu"
MERGE = "merge"  # the kernel that merges partial results
MERGE_PATH = f"{MERGE}.cu"


def kernel_path(v: Variant) -> str:
    return f"{v.family}/{v.id}.cu"


def files(request: Request, selection: Selection) -> dict[str, str]:
    env = environment()
    packs = packs_of(request.variants)
    kernels = {kernel_path(v): render_kernel(v, env) for v in request.variants}
    kernels |= {p.path: render_pack(p, env) for p in packs}
    ragged = tuple(v for v in request.variants if v.walk.tables)
    if ragged:
        kernels[PLAN_PATH] = render_single(PLAN_PATH, env)
    if any(v.listed for v in request.variants):
        kernels[PACK_MASK_PATH] = render_single(PACK_MASK_PATH, env)
    kernels |= {d.path: render_decode(d, env) for d in request.decodes}
    if request.decodes:
        kernels[CUT_PATH] = render_single(CUT_PATH, env)
        kernels[APPEND_PATH] = render_single(APPEND_PATH, env)
    if ragged and request.decodes:
        kernels[ROUTE_PATH] = render_single(ROUTE_PATH, env)
    kernels |= {r.path: render_resident(r, env) for r in request.residents}
    kernels[MERGE_PATH] = render_single(MERGE_PATH, env)
    out = dict(kernels)
    out["manifest.json"] = _manifest(request, packs, ragged, kernels)
    out["table.txt"], out["times.txt"] = _tables(request.variants, digest())
    out["registry.cpp"] = registry.render(
        request.variants, packs, request.decodes, request.residents, request.archs, _digest(out["manifest.json"]), env
    )
    out["ledger.txt"] = render_ledger(selection) + render_decode_ledger()
    return out


@cache
def _tables(variants: tuple[Variant, ...], measured: str) -> tuple[str, str]:
    """The texts of the table and of its times. It answers for every target, so that a laptop can ask about any card.

    measured: digest of the measurements, which decide with the variants.
    """
    table = whole(variants)
    return table_text(table), times_text(table)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(request: Request, packs: tuple[Pack, ...], ragged: tuple[Variant, ...], kernels: dict[str, str]) -> str:
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
                "plain": [*([0] if d.plain else []), *(u.most_keys for u in d.unrolled if u.plain)],
                "targets": list(request.targets_of(v)),
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
        "operands": {str(o): {"qk": str(o.qk), "p": str(o.p), "v": str(o.v)} for o in Operand},
        "head_dims": {a: list(head_dims(a)) for a in TARGETS},
    }
    pack_entries = [
        {
            "id": p.id,
            "head_dim": p.head_dim,
            "key_block": p.key_block,
            "source": str(p.source),
            "profile": pack_profile(p, request.variants),
            "targets": list(pack_targets(p, request.variants, request.archs, request.targets_of)),
            "file": p.path,
            "sha256": _digest(kernels[p.path]),
        }
        for p in packs
    ]
    walking, decoding = {t for v in ragged for t in request.targets_of(v)}, {d.target for d in request.decodes}
    planned = {  # targets of the kernels of which there is one
        PLAN: walking,
        CUT: decoding,
        APPEND: decoding,
        ROUTE: walking & decoding,
        PACK_MASK: {t for v in request.variants if v.listed for t in request.targets_of(v)},
        MERGE: set(request.archs),
    }
    plan_entries = [
        {
            "id": name,
            "targets": [a for a in request.archs if a in targets],
            "file": f"{name}.cu",
            "sha256": _digest(kernels[f"{name}.cu"]),
        }
        for name, targets in planned.items()
        if targets
    ]
    decode_entries = [
        {
            "id": d.id,
            "head_dim": d.head_dim,
            "rows": d.rows,
            "tile": d.tile,
            "stages": d.stages,
            "threads": d.threads,
            "ctas_per_sm": d.ctas_per_sm,
            "smem_bytes": d.smem_bytes,
            "part_floats": d.part_floats,
            "candidate": d.candidate,
            "profile": decode_profile(d),
            "targets": [d.target],
            "file": d.path,
            "sha256": _digest(kernels[d.path]),
        }
        for d in request.decodes
    ]
    resident_entries = [
        {
            "id": r.id,
            "head_dim": r.head_dim,
            "keys": r.keys,
            "source": str(r.source),
            "threads": r.threads,
            "ctas_per_sm": r.ctas_per_sm,
            "smem_bytes": r.smem_bytes,
            "profile": r.profile,
            "targets": [RESIDENT_TARGET],
            "file": r.path,
            "sha256": _digest(kernels[r.path]),
        }
        for r in request.residents
    ]
    lists: dict[str, Sequence[Mapping[str, object]]] = {
        "plans": plan_entries,
        "packs": pack_entries,
        "decodes": decode_entries,
        "residents": resident_entries,
        "variants": entries,
    }
    # One kernel a line, so that a diff shows which ones changed.
    body = [f' "{name}": [' + ",".join("\n  " + json.dumps(e) for e in lists[name]) + "\n ]" for name in lists]
    return json.dumps(head, indent=1)[:-2] + ",\n" + ",\n".join(body) + "\n}\n"
