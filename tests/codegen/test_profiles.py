"""Profiles: computed from what is emitted, so that no list of conditions has to follow the templates.

Regressions these catch: a line of code of a head_dim that CI compiles nowhere, a default call that the extension of
`make test` and the demo do not serve, a profile that hangs on the order of declaration, one that grows.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from codegen.axes import Operand, Out, Scaling
from codegen.profiles import DEV_HEAD_DIM, of_profile, profile_of
from codegen.render import environment, render_kernel
from codegen.select import problem_class, select
from codegen.variant import AXES, Variant, parse_id

EMITTED = select().emitted
CI, DEV = of_profile(EMITTED, "ci"), of_profile(EMITTED, "dev")


def lines(v: Variant) -> set[str]:
    """What is compiled of a kernel: without comments, numbers and its name; bf16 and F32E4M3 are no numbers."""
    text = re.sub(r"//.*", "", render_kernel(v, environment()))
    text = re.sub(v.id, "", text, flags=re.I)
    return {re.sub(r"(?<![A-WYZa-wyz0-9])[0-9]+", "", line).strip() for line in text.split("\n")}


def test_ci_compiles_every_line_at_every_head_dim() -> None:
    compiled: dict[tuple[str, int], set[str]] = defaultdict(set)
    for v in CI:
        compiled[v.family, v.head_dim] |= lines(v)
    for v in EMITTED:
        assert lines(v) <= compiled[v.family, v.head_dim], v.id


def test_ci_has_every_value_of_an_axis_at_every_head_dim() -> None:
    """But for tile and stages, of which it has every value."""
    for axis in AXES:
        shape = axis in ("tile", "stages")
        at = {(v.family, getattr(v, axis), None if shape else v.head_dim) for v in EMITTED}
        assert {(v.family, getattr(v, axis), None if shape else v.head_dim) for v in CI} == at, axis


def test_dev_serves_default_calls_of_one_head_dim() -> None:
    """By one kernel a class: the demo and the extension of `make test` ask for these."""
    classes = Counter(problem_class(v) for v in DEV)
    assert set(classes.values()) == {1}
    for v in EMITTED:
        default = (v.head_dim, v.scaling, v.dtype, v.out) == (DEV_HEAD_DIM, Scaling.BLOCK, Operand.E4M3, Out.BF16)
        assert (problem_class(v) in classes) == (default and not v.kind.diagnostic), v.id


def test_profiles_are_small() -> None:
    """Each kernel of `ci` is compiled by `make test`, at 1.4 seconds of a core on average; `dev` is built twice."""
    assert len(CI) <= 147 and len(DEV) <= 47


def test_what_was_not_emitted_is_in_no_small_profile() -> None:
    v = parse_id("sm90a_fwd_d64_m64n64w4_s2_block_full_e4m3_bf16_linear_serial_solo")
    assert v not in EMITTED and profile_of(v) == "release"
