"""Spec to text. Pure: templates in, strings out, no disk, no clock, no environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from codegen import view_sm89, view_sm90
from codegen.arch import FAMILIES
from codegen.pack import Pack
from codegen.rules import kernel_asserts
from codegen.variant import Variant

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

_VIEW = {"sm89": view_sm89.kernel_view, "sm90a": view_sm90.kernel_view}


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


def kernel_view(v: Variant) -> object:
    """What the template of the variant's family may ask about it beyond its axes."""
    return _VIEW[v.family](v)


def render_kernel(v: Variant, env: Environment) -> str:
    template = env.get_template(FAMILIES[v.family].template)
    asserts = [Assert(cpp=cpp, message=message) for cpp, message in kernel_asserts(v.family)]
    return template.render(v=v, d=kernel_view(v), asserts=asserts)


def render_pack(pack: Pack, env: Environment) -> str:
    return env.get_template("pack.cu.j2").render(p=pack)
