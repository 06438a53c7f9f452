"""The dispatch table: total, exact about what a kernel computes, reachable, and independent of declaration order.

Regressions these catch: a problem that falls through the table, a kernel of another dtype or mask, code-domain softmax
for who asked for accuracy, a kernel that is built and never chosen, a bucket that is off by one, a tie.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.arch import CARDS, TARGETS, Card
from codegen.axes import Change, Cluster, Kind, Mask, Out, Scaling, Schedule, Softmax, Walk
from codegen.families import FAMILIES, derive, family_of, model_card
from codegen.keys import (
    LOAD_ROWS,
    LOADS,
    PRECISIONS,
    SEQLEN_BOUNDS,
    SOFTMAXES,
    Key,
    axes,
    bucket_text,
    load_of,
    representative,
)
from codegen.keys import seqlen_bucket as bucket
from codegen.legal import check, served
from codegen.matrix import HEAD_DIMS, MATRICES, head_dims
from codegen.profiles import PROFILES, in_profile, of_profile, profile_of
from codegen.scaling import key_block
from codegen.select import Timing, order, problem_class, select, timing
from codegen.table import CRITERIA, Decision, Table, build, built, chosen_by, decide, keys, serving, targets_of, whole
from codegen.variant import Variant, axis_text, parse_id

ARCHS = tuple(TARGETS)
SMS = model_card("sm89").sms
RULE = {name: {rule.name: rule for rule in family.rules} for name, family in FAMILIES.items()}
RULE_NAMES = {name for rules in RULE.values() for name in rules}
NOT_BUILT, PADDED = "NOT-BUILT", "PADDED"


def table(profile: str) -> Table:
    return whole(of_profile(select().emitted, profile))


@cache
def chosen_alone(profile: str, arch: str) -> set[str | None]:
    """Ids in the table of one target that is built by itself."""
    return {d.variant for d in build(of_profile(select().emitted, profile), (arch,)).decisions} - {None}


@cache
def every_key() -> tuple[Key, ...]:
    return tuple(keys(ARCHS))


def resolved(profile: str) -> Iterator[tuple[Key, Decision]]:
    t = table(profile)
    return ((key, t.decisions[cell]) for key, cell in zip(every_key(), t.cells, strict=True))


@cache
def kernel(variant: str) -> Variant:
    """Of its id."""
    return parse_id(variant)


@pytest.mark.parametrize("profile", PROFILES)
def test_total(profile: str) -> None:
    """Each cell holds an emitted forward kernel, or a reason that starts with a rule's name and says more."""
    t = table(profile)
    size = 1
    for _, values in t.axes:
        size *= len(values)
    assert len(t.cells) == size == len(set(every_key()))
    assert set(t.cells) == set(range(len(t.decisions))), "a decision that no cell uses, or a cell without one"
    emitted = {v.id: v for v in of_profile(select().emitted, profile)}
    for decision in t.decisions:
        if decision.variant is None:
            rule, colon, text = decision.reason.partition(": ")
            assert colon and text and rule in {*RULE_NAMES, NOT_BUILT, PADDED}, decision
        else:
            assert emitted[decision.variant].kind is Kind.FWD
            assert decision.criterion in CRITERIA and decision.reason == ""
            assert decision.evidence.startswith(("model", "measured on ")) and decision.cost_us > 0
            assert (decision.runner_up is None) == (decision.criterion == CRITERIA[0])
            assert decision.runner_up is None or decision.runner_up in emitted


@pytest.mark.parametrize("profile", PROFILES)
def test_a_cell_gets_what_it_asks_for(profile: str) -> None:
    given = defaultdict(set)  # what all cells of a class get
    for key, decision in resolved(profile):
        asked = (key.arch, key.head_dim, key.dtype, key.out, key.causal, key.scaling, key.precision)
        given[asked] |= {decision.variant, decision.runner_up} - {None}
    assert any(given.values())
    for asked, variants in given.items():
        arch, head_dim, dtype, out, causal, scaling, precision = asked
        for v in map(kernel, variants):
            assert arch in FAMILIES[v.family].targets
            assert (v.head_dim, v.dtype, v.out, v.causal) == (head_dim, dtype, out, causal), (asked, v.id)
            assert scaling in served(v), (asked, v.id)
            assert v.softmax in SOFTMAXES[precision], (asked, v.id)


def test_an_emulated_kernel_is_taken_only_where_no_native_one_is_built() -> None:
    emitted = of_profile(select().emitted, "ci")
    emulated = 0
    for key, decision in resolved("ci"):
        if decision.variant is None:
            continue
        v = kernel(decision.variant)
        native = family_of(key.arch).name
        if v.family == native:
            assert "emulated" not in decision.evidence
            continue
        emulated += 1
        assert decision.evidence == f"model of {FAMILIES[v.family].model_card}, emulated on {key.arch}"
        for w in emitted:
            asked = key.scaling in served(w) and w.softmax is SOFTMAXES[key.precision][-1]
            if w.family == native and w.kind is Kind.FWD and not w.special and asked:  # of these there are no cells
                assert (w.head_dim, w.dtype, w.out, w.causal) != (key.head_dim, key.dtype, key.out, key.causal)
    assert emulated, "the profile has no such cell: this test shows nothing"


def test_a_kernel_that_reads_descales_through_strides_serves_coarser_ones() -> None:
    hopper = parse_id("sm90a_fwd_d64_m128n128w8_s2_block_full_e4m3_bf16_linear_serial_solo")
    ada = parse_id("sm89_fwd_d64_m64n64w4_s2_block_full_e4m3_bf16_linear")
    for scaling in Scaling:
        key = replace(next(keys(("sm90a",))), head_dim=64, scaling=scaling)
        served = scaling is not Scaling.TOKEN
        assert decide(key, (hopper, ada)).variant == (hopper.id if served else None)
        assert decide(key, (ada,)).variant == (ada.id if served else None)
        assert decide(replace(key, arch="sm89"), (hopper, ada)).variant == (ada.id if served else None)


def test_a_head_dim_that_is_padded_has_no_kernels() -> None:
    padded = {(key.arch, key.head_dim) for key, d in resolved("release") if d.reason.startswith(PADDED)}
    assert padded == {(a, d) for a in ARCHS for d in HEAD_DIMS if d not in head_dims(a)}
    assert padded == {("sm89", 192), ("sm90a", 32)}


@pytest.mark.parametrize(("precision", "softmax"), [("fast", Softmax.LINEAR), ("balanced", Softmax.QUADRATIC)])
def test_the_code_domain_softmax_is_taken_wherever_it_is_legal(precision: str, softmax: Softmax) -> None:
    legal = {
        (arch, v.head_dim, scaling, v.causal, v.dtype, v.out)
        for v in select().emitted
        if v.kind is Kind.FWD and v.softmax is softmax
        for scaling in served(v)
        for arch in ARCHS
        if v.family == family_of(arch).name
    }
    assert legal
    for key, decision in resolved("release"):
        if key.precision == precision and decision.variant is not None:
            wanted = (key.arch, key.head_dim, key.scaling, key.causal, key.dtype, key.out) in legal
            assert kernel(decision.variant).softmax is (softmax if wanted else Softmax.EXP2), key


def test_the_release_table_is_empty_only_where_nothing_is_legal() -> None:
    declared = defaultdict(list)
    for matrix in MATRICES:
        if matrix.kind is Kind.FWD:
            for v in matrix.points:
                for scaling in served(v):
                    declared[v.family, v.head_dim, scaling, v.causal, v.dtype, v.out].append(v)
    seen = set()
    for key, decision in resolved("release"):
        wanted = (key.head_dim, key.scaling, key.causal, key.dtype, key.out)
        cell = (key.arch, key.precision, wanted, decision.reason)
        if decision.variant is not None or cell in seen or key.head_dim not in head_dims(key.arch):
            continue
        seen.add(cell)
        name = decision.reason.partition(":")[0]
        native = family_of(key.arch).name
        assert name in RULE[native], decision.reason
        for family in serving(key):
            for v in declared[(family.name, *wanted)]:
                legal = v.softmax in SOFTMAXES[key.precision] and check(v) is None
                assert not legal, f"{v.id} is legal, yet the table says {decision.reason}"
        for v in declared[(native, *wanted)]:
            if v.softmax is SOFTMAXES[key.precision][-1]:
                assert RULE[native][name].broken(v, derive(v)), (v.id, decision.reason)
    assert {(arch, precision) for arch, precision, *_ in seen} == set(itertools.product(ARCHS, PRECISIONS))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_kernel_is_reached(profile: str) -> None:
    """A kernel that no cell chooses costs build time for nothing, unless no other one of its mask and output reads keys
    that were packed for one that is chosen."""
    chosen = {decision.variant for decision in table(profile).decisions}
    forward = [v for v in of_profile(select().emitted, profile) if v.kind is Kind.FWD and not v.special]
    for v in (v for v in forward if v.id not in chosen):
        same_keys = [w for w in forward if problem_class(replace(w, mask=v.mask, out=v.out)) == problem_class(v)]
        readers = [w for w in same_keys if key_block(w) == key_block(v)]
        assert [w for w in readers if (w.causal, w.out) == (v.causal, v.out)] == [v], v.id
        assert any(w.id in chosen and w.out is not Out.E4M3 for w in readers), v.id


def test_a_class_without_cells_has_one_kernel() -> None:
    """No cell chooses between kernels for a window, lists of tiles, a ragged batch, a cap, a bias: who looks must find
    one."""
    special = [v for v in select().emitted if v.special]
    capped, biased, plain = ([v for v in special if v.change is x] for x in (Change.TANH, Change.BIAS, Change.NONE))
    bands = set(Mask) - {Mask.BLOCKS}
    assert {v.mask for v in plain if not v.walk.tables} == {Mask.WINDOW, Mask.BLOCKS}
    assert {v.mask for v in capped if v.walk.tables} == {Mask.WINDOW}
    assert {(v.mask, v.walk) for v in biased} == {(Mask.WINDOW, Walk.DENSE)}
    assert {v.mask for v in plain if v.walk.tables} == {v.mask for v in capped if not v.walk.tables} == bands
    assert len({problem_class(v) for v in special}) == len(special) and special
    assert {v.id for v in special}.isdisjoint(d.variant for d in table("release").decisions)


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
        best = kernel(decision.variant)
        mine = order(best, timing(best, key.seqlen, key.load))
        rivals = [w for w in classes[problem_class(best)] if w != best]
        theirs = {w.id: order(w, timing(w, key.seqlen, key.load)) for w in rivals}
        assert all(mine < x for x in theirs.values()), key
        assert decision.cost_us == round(timing(best, key.seqlen, key.load).us, 2)
        if not rivals:
            assert decision.criterion == CRITERIA[0]
            continue
        assert decision.runner_up == min(theirs, key=lambda i: theirs[i])
        second = theirs[decision.runner_up]
        first_difference = next(i for i in range(len(mine)) if mine[i] != second[i])
        by_time = "measured time" if mine[0] == 0 else "modelled time"
        named = ("measured, the others are not", by_time, "fewer shared-memory bytes", "fewer warps", "id")
        assert decision.criterion == named[first_difference]


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
    monkeypatch.setattr("codegen.table.timing", lambda v, seqlen, load: Timing(us=1.0 if v == best else microseconds))
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
    numbers = ("head_dim", "scaling", "dtype", "out", "softmax")
    for axis in ("kind", "mask", "schedule", "cluster", "walk", "change", *numbers):
        everywhere = {(v.family, getattr(v, axis)) for v in select().emitted}
        assert {(v.family, getattr(v, axis)) for v in of_profile(select().emitted, "ci")} == everywhere, axis


def test_the_comparator_is_total() -> None:
    classes = defaultdict(list)
    for matrix in MATRICES:
        for v in matrix.points:
            if check(v) is None:
                classes[problem_class(v)].append(v)
    for members in classes.values():
        assert len({order(v, Timing(us=1.0)) for v in members}) == len(members), members[0].id
        shuffled = random.Random(0).sample(members, len(members))
        ordered = [sorted(x, key=lambda v: order(v, Timing(us=1.0))) for x in (shuffled, members)]
        assert ordered[0] == ordered[1]


def test_the_order_of_declaration_does_not_matter() -> None:
    turned = tuple(replace(m, **{axis: getattr(m, axis)[::-1] for axis in m.AXES}) for m in MATRICES)
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
        (SMS // 4, LOAD_ROWS, "few"),
        (SMS // 4 + 1, LOAD_ROWS, "short"),
        (SMS // 4 + 1, 1, "short"),
        (9 * SMS, LOAD_ROWS, "short"),
        (1, SMS // 4 * LOAD_ROWS + 1, "half"),
        (1, SMS // 2 * LOAD_ROWS, "half"),
        (1, SMS // 2 * LOAD_ROWS + 1, "wave1"),
        *((1, waves * SMS * LOAD_ROWS, f"wave{waves}") for waves in (1, 2, 3, 4)),
        *((1, waves * SMS * LOAD_ROWS + 1, f"wave{waves + 1}") for waves in (1, 2, 3)),
        (1, 4 * SMS * LOAD_ROWS + 1, "heavy"),
        (2 * SMS, LOAD_ROWS + 1, "wave4"),
        (1, LOAD_ROWS + 1, "few"),
        (0, 1 << 20, "few"),
        (8, 0, "few"),
    ],
)
def test_load(batch_heads: int, seqlen_q: int, load: str) -> None:
    assert load_of(batch_heads, seqlen_q, SMS) == load


@pytest.mark.parametrize("card", [CARDS[f.model_card] for f in FAMILIES.values()], ids=lambda c: c.name)
def test_the_problem_that_stands_for_a_cell_lies_in_it(card: Card) -> None:
    """Or the model would rank kernels by a problem that never looks them up there."""
    outside = []
    for seqlen, load in ((s, x) for s in range(len(SEQLEN_BOUNDS) + 1) for x in LOADS):
        shape = representative(card, seqlen, load, False)
        if (bucket(shape.seqlen_k), load_of(shape.batch_heads, shape.seqlen_q, card.sms)) != (seqlen, load):
            outside.append((bucket_text(seqlen), load, shape))
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


def test_variants_of_a_class_differ_in_what_rivals_may_only() -> None:
    v = select().emitted[0]
    same: list[Variant] = [
        replace(v, stages=v.stages + 1),
        replace(v, tile=replace(v.tile, n=2 * v.tile.n)),
        replace(v, schedule=Schedule.OVERLAP),
        replace(v, cluster=Cluster.SPLIT2),
    ]
    assert all(problem_class(w) == problem_class(v) for w in same)
    for other in ({"mask": Mask.WINDOW}, {"walk": Walk.RAGGED}, {"change": Change.BIAS}):
        assert problem_class(replace(v, **other)) != problem_class(v)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_build_holds_what_its_targets_choose(profile: str) -> None:
    """Or dispatch would pick a kernel that was not compiled, or kernels would be compiled that nobody picks."""
    emitted = of_profile(select().emitted, profile)
    for arch in ARCHS:
        kept = built(emitted, (arch,), False)
        chosen = chosen_alone(profile, arch)
        assert chosen <= {v.id for v in kept}
        assert {v.id for v in kept if v.family != family_of(arch).name} <= chosen
        assert {v for v in emitted if v.family == family_of(arch).name} <= set(kept)
        assert all(targets_of(v, (arch,)) == (arch,) for v in kept)
        everything = {v for v in emitted if arch in FAMILIES[v.family].targets}
        assert set(built(emitted, (arch,), True)) == everything
    assert built(emitted, ARCHS, False) == emitted


def test_a_kernel_is_compiled_for_what_its_family_serves() -> None:
    of = {v.family: targets_of(v, ARCHS) for v in select().emitted}
    assert of == {"sm89": ("sm89", "sm90a"), "sm90a": ("sm90a",)}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_build_of_all_targets_leaves_out_what_is_emulated_and_not_chosen(profile: str) -> None:
    """As a build of one target does: nobody would run it."""
    emitted = of_profile(select().emitted, profile)
    chosen = chosen_by(emitted, ARCHS)
    for arch in ARCHS:
        assert chosen[arch] == chosen_alone(profile, arch)
        alone = {v for v in built(emitted, (arch,), False) if arch in targets_of(v, (arch,), chosen)}
        assert {v for v in emitted if arch in targets_of(v, ARCHS, chosen)} == alone
        assert {v.id for v in alone} >= chosen[arch]
    assert all(targets_of(v, ARCHS, chosen) for v in emitted)
