"""The compiled registry: what the host must know to launch each kernel, as rows of C++ (csrc/registry.h)."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import Environment

from codegen.arch import TARGETS
from codegen.decode import Decode
from codegen.derived import Unrolled
from codegen.families import derive
from codegen.legal import served
from codegen.pack import Pack
from codegen.resident import Resident
from codegen.scaling import key_block
from codegen.variant import Variant

MOST_UNROLLED = 4  # kMostUnrolled


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table. fields: the text of each by its name, in the struct's order."""

    fields: dict[str, str]

    def __str__(self) -> str:
        return "{" + ", ".join(self.fields.values()) + "}"


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _key_range(form: Unrolled) -> str:
    return f"{{{form.least_keys}, {form.most_keys}, {_flag(form.plain)}}}"


def variant_row(v: Variant) -> Row:
    """VariantEntry. Raises ValueError for more forms than a row holds."""
    d = derive(v)
    if len(d.unrolled) > MOST_UNROLLED:
        raise ValueError(f"{v.id} has {len(d.unrolled)} unrolled forms, a row of the registry holds {MOST_UNROLLED}")
    grain = v.grain
    numbers = {
        "head_dim": v.head_dim,
        "tile_m": v.tile_m,
        "tile_n": v.tile_n,
        "slot_keys": v.tile_n // d.halves,
        "threads": d.threads,
        "smem_bytes": d.smem_bytes,
        "ctas_per_sm": d.ctas_per_sm,
        "parts": d.parts,
        "split": v.cluster.ctas,
    }
    return Row(
        fields={
            "id": f'"{v.id}"',
            "family": f"Family::{v.family}",
            **{name: str(number) for name, number in numbers.items()},
            "mask": f"Mask::{v.mask}",
            "out": f"OutType::{v.out}",
            "q": f"Granularity::{grain.q}",
            "k": f"Granularity::{grain.k}",
            "v": f"Granularity::{grain.v}",
            "diagnostic": _flag(v.kind.diagnostic),
            "key_block": str(key_block(v)),
            "coarse": _flag(len(served(v)) > 1),
            "draws": _flag(v.schedule.draws and v.cluster.ctas == 1),
            "quantises_q": _flag(d.quantises_q),
            "ragged": _flag(v.walk.tables),
            "unrolled": "{" + ", ".join(_key_range(u) for u in d.unrolled) + "}",
            "plain": _flag(d.plain),
            "capped": _flag(v.change.capped),
            "biased": _flag(v.change.biased),
        }
    )


def pack_row(p: Pack) -> Row:
    """PackEntry."""
    delivery = (p.delivery_threads, p.delivery_bytes, p.delivery_ctas_per_sm) if p.delivers else (0, 0, 0)
    return Row(
        fields={
            "id": f'"{p.id}"',
            "head_dim": str(p.head_dim),
            "key_block": str(p.key_block),
            "source": f"SourceType::{p.source}",
            "rows": str(p.rows),
            "ctas": str(p.cluster),
            "stage_bytes": str(p.stage_bytes),
            "delivery_threads": str(delivery[0]),
            "delivery_bytes": str(delivery[1]),
            "delivery_ctas_per_sm": str(delivery[2]),
            "ragged": _flag(p.ragged),
            "integer": _flag(p.integer),
            "integer_v": _flag(p.integer_v),
        }
    )


def decode_row(d: Decode) -> Row:
    """DecodeEntry."""
    numbers = ("head_dim", "rows", "tile", "threads", "smem_bytes", "ctas_per_sm", "part_floats")
    return Row(
        fields={
            "id": f'"{d.id}"',
            "target": f'"{d.target}"',
            **{name: str(getattr(d, name)) for name in numbers},
        }
    )


def resident_row(r: Resident) -> Row:
    """ResidentEntry."""
    numbers = ("head_dim", "keys", "tile", "threads", "smem_bytes", "ctas_per_sm")
    return Row(
        fields={
            "id": f'"{r.id}"',
            "source": f"SourceType::{r.source}",
            **{name: str(getattr(r, name)) for name in numbers},
        }
    )


def target_row(name: str) -> Row:
    """TargetEntry."""
    major, minor = TARGETS[name].capability
    return Row(fields={"name": f'"{name}"', "major": str(major), "minor": str(minor)})


def render(
    variants: tuple[Variant, ...],
    packs: tuple[Pack, ...],
    decodes: tuple[Decode, ...],
    residents: tuple[Resident, ...],
    archs: tuple[str, ...],
    manifest: str,
    env: Environment,
) -> str:
    """registry.cpp. manifest: SHA-256 of the manifest of the same generation, in hex."""
    return env.get_template("registry.cpp.j2").render(
        variants=[variant_row(v) for v in variants],
        packs=[pack_row(p) for p in packs],
        decodes=[decode_row(d) for d in decodes],
        residents=[resident_row(r) for r in residents],
        targets=[target_row(name) for name in archs],
        manifest=manifest,
    )
