"""Spec to text. Pure: templates in, strings out, no disk, no clock, no environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from codegen.families import FAMILIES
from codegen.legal import kernel_asserts
from codegen.pack import Pack
from codegen.variant import Variant

if TYPE_CHECKING:
    from codegen.decode import Decode  # which needs the profiles, and they this module
    from codegen.resident import Resident  # likewise

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


@cache  # compiling the templates takes longer than rendering a profile; one that is edited is compiled again
def environment(templates: Path = TEMPLATES) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@dataclass(frozen=True, kw_only=True)
class Assert:
    cpp: str
    message: str


def render_kernel(v: Variant, env: Environment) -> str:
    family = FAMILIES[v.family]
    asserts = [Assert(cpp=cpp, message=message) for cpp, message in kernel_asserts(v)]
    return env.get_template(family.template).render(v=v, d=family.view(v), asserts=asserts)


def render_single(path: str, env: Environment) -> str:
    """A kernel of which there is one, by its path in the generated folder."""
    return env.get_template(f"{path}.j2").render()


def render_decode(d: Decode, env: Environment) -> str:
    return env.get_template("decode_wide.cu.j2" if d.wide else "decode.cu.j2").render(d=d)


def render_resident(r: Resident, env: Environment) -> str:
    from codegen.resident import FORMS

    return env.get_template("resident.cu.j2").render(r=r, forms=FORMS)


def render_pack(pack: Pack, env: Environment) -> str:
    return env.get_template("pack.cu.j2" if pack.quantises else "pack_fp8.cu.j2").render(p=pack)
