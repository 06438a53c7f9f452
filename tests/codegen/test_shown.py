"""The kernels that generated/ shows whole, and the digests of all: what an edit does to generated code can be read.

Regressions these catch: a line of a template that no shown kernel has, a shown kernel that is not what is rendered, a
kernel that changes while its digest stays, a cover that grows, needs luck, or hangs on the order of declaration.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

from codegen.axes import Change, Kind, Mask, Operand, Out, Scaling, Schedule, Softmax, Walk
from codegen.cover import committed, cover, kinds_of_lines
from codegen.decode import ALL
from codegen.families import FAMILIES
from codegen.outputs import APPEND_PATH, CUT_PATH, MERGE_PATH, PACK_MASK_PATH, PLAN_PATH, ROUTE_PATH, kernel_path
from codegen.pack import packs_of
from codegen.render import (
    environment,
    render_decode,
    render_kernel,
    render_pack,
    render_resident,
    render_single,
)
from codegen.resident import ALL as ALL_RESIDENTS
from codegen.select import select
from codegen.variant import Variant, parse_id

ROOT = Path(__file__).resolve().parents[2]
SHOWN = sorted((ROOT / "generated" / "shown").glob("*.cu"))
# 9 are of 8-bit integers, 3 of capped scores, 3 of biases, 4 of masks, 3 keep K and V, 1 decodes by warpgroups. So
# many are read in a review; 800 are not.
MOST = 57


@cache
def rendered() -> dict[str, str]:
    """Every kernel by its path in a folder that has all."""
    env = environment()
    packs = {p.path: render_pack(p, env) for p in packs_of(select().emitted)}
    decodes = {d.path: render_decode(d, env) for d in ALL}
    variants = {kernel_path(v): render_kernel(v, env) for v in select().emitted}
    residents = {r.path: render_resident(r, env) for r in ALL_RESIDENTS}
    paths = (PLAN_PATH, CUT_PATH, APPEND_PATH, ROUTE_PATH, PACK_MASK_PATH, MERGE_PATH)
    singles = {path: render_single(path, env) for path in paths}
    return variants | packs | singles | decodes | residents


def lines(text: str, name: str) -> set[str]:
    """A second implementation: what of a line is neither the name nor a number, nor the rule behind a heading. bf16 and
    F32E4M3 are no numbers; 65,536 is one."""
    found = set()
    for line in text.split("\n"):
        said = re.sub(r"(?<=\d),(?=\d)", "", re.sub(name, "", line, flags=re.I)).strip().rstrip("- ")
        words = re.split(r"(\W|_|(?<=\d)x(?=\d))", said)
        found.add("".join("" if word.isdigit() else word for word in words))
    return found


def test_every_line_of_every_kernel_is_shown() -> None:
    shown: set[str] = set()
    for path in SHOWN:
        shown |= lines(path.read_text(), path.stem)
    for path, text in rendered().items():
        assert lines(text, Path(path).stem) <= shown, path
    assert SHOWN and len(SHOWN) <= MOST


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_a_shown_kernel_is_what_is_rendered(path: Path) -> None:
    texts = {Path(name).name: text for name, text in rendered().items()}
    text, shown = texts[path.name], path.read_bytes().decode()
    difference = difflib.unified_diff(shown.splitlines(), text.splitlines(), "shown", "rendered", lineterm="", n=2)
    assert shown == text, "\n".join(difference) + "\nIf the change is intended: python -m codegen"


def test_what_is_shown_differs_in_what_matters() -> None:
    variants = [parse_id(path.stem) for path in SHOWN if path.stem.split("_")[0] in FAMILIES]
    assert len(variants) < len(SHOWN)
    for axis, values in (
        ("kind", Kind),
        ("softmax", Softmax),
        ("mask", Mask),
        ("scaling", (Scaling.BLOCK, Scaling.TOKEN)),
        ("schedule", Schedule),
        ("walk", Walk),
        ("out", Out),
        ("dtype", Operand),
        ("change", Change),
    ):
        for family in ("sm89", "sm90a"):
            of_family = {getattr(v, axis) for v in select().emitted if v.family == family}
            assert {getattr(v, axis) for v in variants if v.family == family} == of_family & set(values), (family, axis)


def test_the_committed_digests_are_those_of_the_rendered_kernels() -> None:
    manifest = json.loads((ROOT / "generated" / "manifest.json").read_text())
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in rendered().items()}
    lists = ("variants", "packs", "plans", "decodes", "residents")
    entries = {e["file"]: e["sha256"] for name in lists for e in manifest[name]}
    assert entries == digests, "run `python -m codegen` and commit the result"


def test_a_checkout_holds_the_lists_and_the_cover() -> None:
    lists = {"manifest.json": "{}", "table.txt": "format 2"}
    held = committed(lists | rendered())
    assert held.keys() == lists.keys() | {f"shown/{path.name}" for path in SHOWN}
    assert all(held[f"shown/{path.name}"] == path.read_text() for path in SHOWN)


def test_a_cover_by_hand() -> None:
    """`d` first, as it has most; then `b`, the first of those with both others; `a` was taken for nothing."""
    parts = {"a": {1, 2}, "b": {4, 5, 6}, "c": {4, 5, 6}, "d": {1, 2, 3, 4}}
    frozen = {name: frozenset(of) for name, of in parts.items()}
    assert cover(frozen) == ("b", "d")
    greedy = {"big": frozenset({1, 2, 3, 4}), "left": frozenset({1, 2, 5}), "right": frozenset({3, 4, 6})}
    assert cover(greedy) == ("left", "right"), "what the others make needless goes"
    assert cover({"none": frozenset()}) == ()


def test_a_cover_does_not_hang_on_the_order() -> None:
    parts = {path: kinds_of_lines(text, Path(path).stem) for path, text in rendered().items()}
    shuffled = list(parts)
    random.Random(7).shuffle(shuffled)
    assert cover({path: parts[path] for path in shuffled}) == cover(parts)


def test_what_a_line_is() -> None:
    v: Variant = next(v for v in select().emitted if v.family == "sm89")
    text = f"// {v.id}\nint kRows = 64;\n    int kRows = 128;\n{v.id}(MMA_64x8x32_F32E4M3);\n"
    assert kinds_of_lines(text, v.id) == {"// @", "int kRows = #;", "@(MMA_#x#x#_F32E4M3);"}
