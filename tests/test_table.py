"""The dispatch table: total, exact about what a kernel computes, reachable, and independent of declaration order.

Regressions these catch: a problem that falls through the table, a kernel of another dtype or mask, code-domain softmax
for who asked for accuracy, a kernel that is built and never chosen, a bucket that is off by one, a tie.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.arch import CARDS, MODEL_CARD, TARGETS, family_of
from codegen.derive import derive
from codegen.keys import LOAD_ROWS, LOADS, PRECISIONS, SEQLEN_BOUNDS, Key, axes, bucket_text, load_of, representative
from codegen.keys import seqlen_bucket as bucket
from codegen.matrix import MATRICES, PROFILES, in_profile, profile_of
from codegen.rules import RULES, check
from codegen.select import of_profile, order, problem_class, select, variant_cost
from codegen.spec import Kind, Softmax, Variant, axis_text, parse_id
from codegen.table import CRITERIA, Decision, Table, build, decide, keys

ARCHS = tuple(TARGETS)
SMS = CARDS[MODEL_CARD].sms
RULE = {rule.name: rule for rule in RULES}
NOT_BUILT = "NOT-BUILT"


@cache
def table(profile: str) -> Table:
    return build(of_profile(select().emitted, profile), ARCHS)


def resolved(profile: str) -> list[tuple[Key, Decision]]:
    t = table(profile)
    return [(key, t.decisions[cell]) for key, cell in zip(keys(ARCHS), t.cells, strict=True)]


@pytest.mark.parametrize("profile", PROFILES)
def test_total(profile: str) -> None:
    """Each cell holds an emitted forward kernel, or a reason that starts with a rule's name and says more."""
    t = table(profile)
    size = 1
    for _, values in t.axes:
        size *= len(values)
    assert len(t.cells) == size == len(set(keys(ARCHS)))
    assert set(t.cells) == set(range(len(t.decisions))), "a decision that no cell uses, or a cell without one"
    emitted = {v.id: v for v in of_profile(select().emitted, profile)}
    for decision in t.decisions:
        if decision.variant is None:
            rule, colon, text = decision.reason.partition(": ")
            assert colon and text and rule in {*RULE, NOT_BUILT}, decision
        else:
            assert emitted[decision.variant].kind is Kind.FWD
            assert decision.criterion in CRITERIA and decision.reason == ""
            assert decision.evidence == "model" and decision.cost_us > 0
            assert (decision.runner_up is None) == (decision.criterion == CRITERIA[0])
            assert decision.runner_up is None or decision.runner_up in emitted


@pytest.mark.parametrize("profile", PROFILES)
def test_a_cell_gets_what_it_asks_for(profile: str) -> None:
    for key, decision in resolved(profile):
        for variant in (decision.variant, decision.runner_up):
            if variant is None:
                continue
            v = parse_id(variant)
            assert v.family == family_of(key.arch).name
            asked = (key.head_dim, key.dtype, key.out, key.scaling, key.causal)
            assert (v.head_dim, v.dtype, v.out, v.scaling, v.causal) == asked, (key, variant)
            assert key.precision == "fast" or v.softmax is Softmax.EXP2, (key, variant)


def test_fast_takes_the_code_domain_softmax_wherever_it_is_legal() -> None:
    linear = {problem_class(v)[2:-1] for v in select().emitted if v.kind is Kind.FWD and v.softmax is Softmax.LINEAR}
    assert linear
    for key, decision in resolved("release"):
        if key.precision == "fast" and decision.variant is not None:
            wanted = (key.head_dim, key.scaling, key.causal, key.dtype, key.out) in linear
            assert (parse_id(decision.variant).softmax is Softmax.LINEAR) == wanted, key


def test_the_release_table_is_empty_only_where_nothing_is_legal() -> None:
    declared = defaultdict(list)
    for matrix in MATRICES:
        if matrix.kind is Kind.FWD:
            for v in matrix.points():
                declared[v.family, v.head_dim, v.scaling, v.causal, v.dtype, v.out].append(v)
    seen = set()
    for key, decision in resolved("release"):
        wanted = (family_of(key.arch).name, key.head_dim, key.scaling, key.causal, key.dtype, key.out)
        if decision.variant is not None or (wanted, decision.reason) in seen:
            continue
        seen.add((wanted, decision.reason))
        name = decision.reason.partition(":")[0]
        assert name in RULE, decision.reason
        for v in declared[wanted]:
            assert check(v) is not None, f"{v.id} is legal, yet the table says {decision.reason}"
            assert v.softmax is Softmax.LINEAR or RULE[name].broken(v, derive(v)), (v.id, decision.reason)
    assert seen


@pytest.mark.parametrize("profile", PROFILES)
def test_every_kernel_is_reached(profile: str) -> None:
    """A kernel that no cell chooses costs build time for nothing."""
    chosen = {decision.variant for decision in table(profile).decisions}
    forward = [v.id for v in of_profile(select().emitted, profile) if v.kind is Kind.FWD]
    assert [i for i in forward if i not in chosen] == []


def test_the_chosen_is_the_first_by_the_comparator() -> None:
    """Against a second implementation: every rival looked at, in every cell of the profile `ci`."""
    emitted = of_profile(select().emitted, "ci")
    classes = defaultdict(list)
    for v in emitted:
        if v.kind is Kind.FWD:
            classes[problem_class(v)].append(v)
    for key, decision in resolved("ci"):
        if decision.variant is None:
            continue
        best = parse_id(decision.variant)
        mine = order(best, variant_cost(best, key.seqlen, key.load))
        rivals = [w for w in classes[problem_class(best)] if w != best]
        theirs = {w.id: order(w, variant_cost(w, key.seqlen, key.load)) for w in rivals}
        assert all(mine < x for x in theirs.values()), key
        assert decision.cost_us == round(variant_cost(best, key.seqlen, key.load), 2)
        if not rivals:
            assert decision.criterion == CRITERIA[0]
            continue
        assert decision.runner_up == min(theirs, key=lambda i: theirs[i])
        second = theirs[decision.runner_up]
        first_difference = next(i for i in range(len(mine)) if mine[i] != second[i])
        assert decision.criterion == CRITERIA[1 + first_difference]


@pytest.mark.parametrize(
    ("first", "second", "microseconds", "criterion"),
    [
        ("m64n64w4_s2", "m64n64w4_s1", 2.0, "modelled time"),
        ("m64n64w4_s2", "m64n64w4_s3", 1.0, "fewer shared-memory bytes"),
        ("m128n64w4_s2", "m128n64w8_s2", 1.0, "fewer warps"),
        ("m64n32w4_s4", "m64n64w4_s2", 1.0, "id"),
    ],
)
def test_each_criterion_can_decide(
    first: str, second: str, microseconds: float, criterion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rivals that are equal up to this criterion, in either order; the winner takes 1 us."""
    key = replace(next(keys(("sm89",))), head_dim=64)
    best, rival = (parse_id(f"sm89_fwd_d64_{x}_tensor_full_e4m3_bf16_exp2") for x in (first, second))
    monkeypatch.setattr("codegen.table.variant_cost", lambda v, seqlen, load: 1.0 if v == best else microseconds)
    assert decide(key, (best,)).criterion == "only candidate"
    for emitted in ((best, rival), (rival, best)):
        decision = decide(key, emitted)
        assert (decision.variant, decision.runner_up, decision.criterion) == (best.id, rival.id, criterion)


def test_an_empty_cell_of_a_small_profile_is_not_built() -> None:
    key = replace(next(keys(("sm89",))), head_dim=64)
    assert decide(key, ()).reason.startswith(f"{NOT_BUILT}: ")


def test_profiles_nest() -> None:
    sets = [set(of_profile(select().emitted, profile)) for profile in PROFILES]
    assert sets[0] < sets[1] < sets[2] == set(select().emitted)
    for v in select().emitted:
        smallest = profile_of(v)
        assert [p for p in PROFILES if in_profile(v, p)] == list(PROFILES[PROFILES.index(smallest) :])


def test_ci_holds_every_value_of_every_axis() -> None:
    """Tile and stages are what the selection chooses; everything else that is emitted at all must be compiled in CI."""
    for axis in ("family", "kind", "head_dim", "scaling", "causal", "dtype", "out", "softmax"):
        everywhere = {getattr(v, axis) for v in select().emitted}
        assert {getattr(v, axis) for v in of_profile(select().emitted, "ci")} == everywhere, axis


def test_the_comparator_is_total() -> None:
    classes = defaultdict(list)
    for matrix in MATRICES:
        for v in matrix.points():
            if check(v) is None:
                classes[problem_class(v)].append(v)
    for members in classes.values():
        assert len({order(v, 1.0) for v in members}) == len(members), members[0].id
        shuffled = random.Random(0).sample(members, len(members))
        assert sorted(shuffled, key=lambda v: order(v, 1.0)) == sorted(members, key=lambda v: order(v, 1.0))


def test_the_order_of_declaration_does_not_matter() -> None:
    turned = tuple(replace(m, tile=m.tile[::-1], stages=m.stages[::-1], scaling=m.scaling[::-1]) for m in MATRICES)
    assert select(turned).emitted == select().emitted


@pytest.mark.parametrize("position", range(len(SEQLEN_BOUNDS)))
def test_bucket_edges(position: int) -> None:
    bound = SEQLEN_BOUNDS[position]
    assert bucket(bound) == position
    assert bucket(bound + 1) == position + 1
    assert bucket(bound - 1) == position
    assert bucket_text(position).endswith(f"..{bound}")
    assert bucket_text(position + 1).startswith(f"{bound + 1}..")


def test_the_first_and_the_last_bucket() -> None:
    assert bucket(0) == bucket(1) == 0
    assert bucket(2**40) == len(SEQLEN_BOUNDS)
    assert bucket_text(0).startswith("0..") and bucket_text(len(SEQLEN_BOUNDS)).endswith("..")
    assert dict(axes(ARCHS))["seqlen"] == [*SEQLEN_BOUNDS, None]


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_buckets_are_monotone(a: int, b: int) -> None:
    assert (a <= b) <= (bucket(a) <= bucket(b))


@pytest.mark.parametrize(
    ("batch_heads", "seqlen_q", "load"),
    [
        (2 * SMS - 1, 1, "light"),
        (2 * SMS, 1, "heavy"),
        (2 * SMS - 1, LOAD_ROWS, "light"),
        (SMS, LOAD_ROWS, "light"),
        (SMS, LOAD_ROWS + 1, "heavy"),
        (0, 1 << 20, "light"),
        (8, 0, "light"),
    ],
)
def test_load(batch_heads: int, seqlen_q: int, load: str) -> None:
    assert load_of(batch_heads, seqlen_q, SMS) == load


def test_the_problem_that_stands_for_a_cell_lies_in_it() -> None:
    """Or the model would rank kernels by a problem that never looks them up there."""
    outside = []
    for key in (replace(next(keys(ARCHS)), seqlen=s, load=x) for s in range(len(SEQLEN_BOUNDS) + 1) for x in LOADS):
        shape = representative(key)
        if (bucket(shape.seqlen_k), load_of(shape.batch_heads, shape.seqlen_q, SMS)) != (key.seqlen, key.load):
            outside.append((bucket_text(key.seqlen), key.load, shape))
    assert outside == []


def test_keys_walk_the_axes_in_order() -> None:
    names = [name for name, _ in axes(ARCHS)]
    assert names == ["arch", "head_dim", "seqlen", "dtype", "out", "scaling", "causal", "precision", "load"]
    every = list(keys(ARCHS))
    sizes = [len(values) for _, values in axes(ARCHS)]
    for position in range(0, len(every), 97):
        rest, coordinates = position, []
        for size in reversed(sizes):
            rest, coordinate = divmod(rest, size)
            coordinates.append(coordinate)
        for (name, values), coordinate in zip(axes(ARCHS), reversed(coordinates), strict=True):
            value = getattr(every[position], name)
            wanted = coordinate if name == "seqlen" else values[coordinate]
            assert axis_text(value) == axis_text(wanted), (position, name)
    assert {key.precision for key in every} == set(PRECISIONS)


def test_variants_of_a_class_differ_in_tile_or_stages_only() -> None:
    v = select().emitted[0]
    same: list[Variant] = [replace(v, stages=v.stages + 1), replace(v, tile=replace(v.tile, n=2 * v.tile.n))]
    assert all(problem_class(w) == problem_class(v) for w in same)
    assert problem_class(replace(v, causal=not v.causal)) != problem_class(v)
