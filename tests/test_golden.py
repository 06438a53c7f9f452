"""Whole kernels against tests/golden: what a change to a template or a rule does to generated code, as a diff to read.

Accept an intended change with `python tests/test_golden.py --accept`; read `git diff tests/golden` before the commit.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from codegen.axes import Cluster, Kind, Out, Scaling, Schedule, Softmax  # noqa: E402
from codegen.families.warpgroup.derive import derive  # noqa: E402
from codegen.outputs import kernel_path  # noqa: E402
from codegen.render import environment, render_kernel  # noqa: E402
from codegen.select import select  # noqa: E402
from codegen.variant import Variant  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
ACCEPT = "If the change is intended: python tests/test_golden.py --accept"


def _linear_block_causal(v: Variant) -> bool:
    forward = v.family == "sm89" and v.kind is Kind.FWD and v.softmax is Softmax.LINEAR and v.out is Out.BF16
    return forward and v.head_dim == 64 and v.scaling is Scaling.BLOCK and v.causal and v.stages > 1


def _exp2_token_full(v: Variant) -> bool:
    forward = v.family == "sm89" and v.kind is Kind.FWD and v.softmax is Softmax.EXP2 and v.out is Out.FP16
    return forward and v.scaling is Scaling.TOKEN and not v.causal


def _two_terms(v: Variant) -> bool:
    return v.family == "sm89" and v.terms == 2 and v.scaling is Scaling.BLOCK and v.head_dim == 64 and v.causal


def _diagnostic(v: Variant) -> bool:
    return v.family == "sm89" and v.kind is Kind.DIAG and v.softmax is Softmax.LINEAR


def _sm90a_overlapped(v: Variant) -> bool:
    forward = v.family == "sm90a" and v.kind is Kind.FWD and v.out is Out.BF16 and v.cluster is Cluster.SOLO
    return forward and v.head_dim == 128 and v.schedule is Schedule.OVERLAP and v.terms == 1 and not v.causal


def _sm90a_wide_token(v: Variant) -> bool:
    wide = v.family == "sm90a" and v.head_dim == 256 and v.scaling is Scaling.TOKEN and v.causal
    return wide and v.kind is Kind.FWD and v.terms == 1


def _sm90a_two_terms(v: Variant) -> bool:
    return v.family == "sm90a" and v.terms == 2 and v.scaling is Scaling.TOKEN and v.head_dim == 256 and not v.causal


def _sm90a_columns(v: Variant) -> bool:
    return v.schedule is Schedule.COLUMNS and derive(v).halves == 1


def _sm90a_halves(v: Variant) -> bool:
    return v.schedule is Schedule.COLUMNS and derive(v).halves == 2 and v.head_dim == 256 and not v.causal


def _sm90a_prepared(v: Variant) -> bool:
    return v.family == "sm90a" and derive(v).prepares and v.causal


def _sm90a_unrolled(v: Variant) -> bool:
    return len(derive(v).unrolled) > 1 and v.head_dim == 128 and v.out is Out.BF16


def _sm90a_quadratic(v: Variant) -> bool:
    return v.softmax is Softmax.QUADRATIC and v.head_dim == 64 and v.schedule is Schedule.PINGPONG and v.causal


def _sm90a_split(v: Variant) -> bool:
    return v.family == "sm90a" and v.cluster is not Cluster.SOLO and v.softmax is Softmax.LINEAR


def _sm90a_diagnostic(v: Variant) -> bool:
    return v.family == "sm90a" and v.kind is Kind.DIAG and v.softmax is Softmax.EXP2


QUERIES: dict[str, Callable[[Variant], bool]] = {
    "linear_block_causal.cu": _linear_block_causal,
    "exp2_token_full.cu": _exp2_token_full,
    "two_terms.cu": _two_terms,
    "diagnostic.cu": _diagnostic,
    "sm90a_overlapped.cu": _sm90a_overlapped,
    "sm90a_wide_token.cu": _sm90a_wide_token,
    "sm90a_columns.cu": _sm90a_columns,
    "sm90a_halves.cu": _sm90a_halves,
    "sm90a_two_terms.cu": _sm90a_two_terms,
    "sm90a_prepared.cu": _sm90a_prepared,
    "sm90a_unrolled.cu": _sm90a_unrolled,
    "sm90a_quadratic.cu": _sm90a_quadratic,
    "sm90a_split.cu": _sm90a_split,
    "sm90a_diagnostic.cu": _sm90a_diagnostic,
}


def chosen(name: str) -> Variant:
    """The first emitted kernel of a query by id, those with the fewest stages first."""
    found = [v for v in select().emitted if QUERIES[name](v)]
    return min(found, key=lambda v: (v.stages, v.id))


def render(name: str) -> str:
    return render_kernel(chosen(name), environment())


@pytest.mark.parametrize("name", QUERIES)
def test_golden(name: str) -> None:
    text, path = render(name), GOLDEN / name
    if not path.is_file():
        pytest.fail(f"tests/golden/{name} is missing. {ACCEPT}")
    golden = path.read_bytes().decode()
    if golden != text:
        lines = difflib.unified_diff(
            golden.splitlines(keepends=True), text.splitlines(keepends=True), f"golden/{name}", chosen(name).id, n=2
        )
        pytest.fail(f"{chosen(name).id} is not what tests/golden/{name} holds.\n{''.join(lines)}\n{ACCEPT}")


def test_no_golden_without_a_query() -> None:
    assert {path.name for path in GOLDEN.glob("*.cu")} == set(QUERIES)


def test_the_goldens_differ_in_what_matters() -> None:
    variants = [chosen(name) for name in QUERIES]
    assert {v.kind for v in variants} == set(Kind)
    assert {v.softmax for v in variants} == set(Softmax)
    assert {v.causal for v in variants} == {False, True}
    assert {v.scaling for v in variants} >= {Scaling.BLOCK, Scaling.TOKEN}


def test_the_committed_digests_are_those_of_the_rendered_kernels() -> None:
    entries = json.loads((ROOT / "generated" / "manifest.json").read_text())["variants"]
    env = environment()
    digests = {kernel_path(v): hashlib.sha256(render_kernel(v, env).encode()).hexdigest() for v in select().emitted}
    assert {e["file"]: e["sha256"] for e in entries} == digests, "run `python -m codegen` and commit the result"


def accept() -> None:
    """Writes the goldens that the generator renders now."""
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.cu"):
        if old.name not in QUERIES:
            old.unlink()
    for name in QUERIES:
        (GOLDEN / name).write_bytes(render(name).encode())
        print(f"tests/golden/{name}: {chosen(name).id}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--accept"]:
        sys.exit("usage: python tests/test_golden.py --accept")
    accept()
