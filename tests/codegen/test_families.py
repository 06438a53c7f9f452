"""A family is one object, and a target that it serves is one record.

Regressions these catch: a list of targets or families that is kept by hand beside TARGETS and FAMILIES; a finding of
tuning/kernels.csv that no declared kernel has, or that cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import tuned
from codegen.arch import TARGETS
from codegen.axes import Kind
from codegen.families import FAMILIES, families_of, family_of, model_card
from codegen.matrix import MATRICES, head_dims
from codegen.outputs import Request, files
from codegen.profiles import of_profile
from codegen.select import select
from codegen.table import build, built
from codegen.variant import parse_id


@pytest.fixture
def sm120(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A target that the generator does not have: its cards run the instructions of the family of sm89."""
    like = TARGETS["sm89"]
    target = replace(like, name="sm120", compute="compute_120", code="sm_120", capability=(12, 0), cards=("RTX 5090",))
    monkeypatch.setitem(TARGETS, target.name, target)
    yield target.name


def test_a_new_target_is_served_by_a_family_that_is_there(sm120: str) -> None:
    family = family_of(sm120)
    assert families_of(sm120) == (family,) == (FAMILIES["sm89"],) and sm120 not in family.emulated
    assert head_dims(sm120) == head_dims("sm89") and model_card(sm120) is model_card("sm89")
    kernels = built(select().emitted, (sm120,), False)
    assert {v.family for v in kernels} == {"sm89"} and kernels == built(select().emitted, ("sm89",), False)


def test_kernels_are_generated_for_a_new_target(sm120: str) -> None:
    variants = built(of_profile(select().emitted, "dev"), (sm120,), False)
    rendered = files(Request(archs=(sm120,), profile="dev", variants=variants), select())
    manifest = json.loads(rendered["manifest.json"])
    assert manifest["gencode"] == {sm120: "-gencode=arch=compute_120,code=sm_120"}
    assert manifest["capability"] == {sm120: [12, 0]}
    assert manifest["head_dims"][sm120] == manifest["head_dims"]["sm89"]
    assert manifest["variants"] and all(v["targets"] == [sm120] for v in manifest["variants"])
    assert {v["file"] for v in manifest["variants"]} <= set(rendered)


def test_the_table_of_a_new_target_chooses_as_for_its_like(sm120: str) -> None:
    emitted = of_profile(select().emitted, "dev")
    new, old = (build(emitted, (arch,)) for arch in (sm120, "sm89"))
    assert [new.decisions[c].variant for c in new.cells] == [old.decisions[c].variant for c in old.cells]
    assert any(d.variant for d in new.decisions)


def test_families_and_targets_name_each_other() -> None:
    for name, family in FAMILIES.items():
        assert family.name == name and family.targets
        assert set(family.emulated) < set(family.targets)
        for target in family.targets:
            facts = TARGETS[target]
            assert facts.smem_per_block >= family.smem_per_block and facts.smem_per_sm >= family.smem_per_sm
        assert {m.kind for m in MATRICES if m.family == name} == set(Kind)
    assert {name for t in TARGETS.values() for name in t.families} == set(FAMILIES)
    assert {m.family for m in MATRICES} == set(FAMILIES)


def test_every_finding_is_about_a_declared_kernel() -> None:
    points = [v for m in MATRICES for v in m.points if v.kind is Kind.FWD]
    for (family, what, head_dim), findings in tuned.read(tuned.PATH).items():
        mine = [v for v in points if (v.family, v.head_dim) == (family, head_dim)]
        for finding in findings:
            covered = [v for v in mine if finding.covers(v)]
            assert covered, (what, finding)
            assert all(tuned.numbers(v, what) == finding.value for v in covered), "two rows speak of one kernel"


def test_a_finding_is_found_where_it_is_and_nowhere_else() -> None:
    v = parse_id("sm90a_fwd_d64_m192n192w12_s2_block_full_e4m3_bf16_linear_pingpong_solo")
    assert tuned.numbers(v, "spilled") == (4,) and FAMILIES[v.family].derive(v).spilled == 4
    for other in ("_e4m3_e4m3_linear", "_e4m3_bf16_quadratic", "_e4m3_bf16_exp2"):
        assert tuned.found(parse_id(v.id.replace("_e4m3_bf16_linear", other)), "spilled") is None
    assert tuned.found(parse_id(v.id.replace("_d64_", "_d96_")), "spilled") is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("sm90a,spits,64,*,*,*,*,*,*,,seen", "line 2: a row says what was found"),
        ("sm90a,spills,64,*,*,*,*,*,*,,", "line 2: a row says what was found"),
        ("sm90a,spills,64,*,exp3,*,*,*,*,,seen", "line 2: softmax exp3 is not known"),
        ("sm90a,spills,64,*,*,serial|turns,*,*,*,,seen", "line 2: schedule turns is not known"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(",".join(tuned.COLUMNS) + "\n" + row + "\n")
    with pytest.raises(ValueError, match=said):
        tuned.read(path)
